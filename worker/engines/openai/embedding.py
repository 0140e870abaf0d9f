"""Vectors for all inputs of a request, in one answer."""

from __future__ import annotations

from schemas.errors import ErrorCode, MeshError
from schemas.frames import Usage
from schemas.job import EmbeddingPrompt
from worker.engines.openai.client import Answer, Client, Cut, NotReached, Silent
from worker.engines.openai.completion import expect_ok, failed
from worker.engines.openai.request import embedding_request
from worker.engines.openai.settings import OpenAISettings, Wait
from worker.engines.openai.vectors import VectorError, parse_vectors


async def embed(
    client: Client, settings: OpenAISettings, prompt: EmbeddingPrompt, *, model: str
) -> tuple[list[bytes], Usage]:
    """The vectors as `parse_vectors` gives them. Raises `MeshError`; cancelling closes the connection."""
    request = embedding_request(prompt, model=model)
    try:
        async with client.request(
            "POST", request.path, request.encoded(), head_wait=settings.first_token_wait
        ) as answer:
            await _expect_endpoint(answer, wait=settings.token_wait)
            body = await answer.whole(bytes_max=settings.vectors_bytes_max, wait=settings.token_wait)
    except (Cut, Silent, NotReached) as error:
        raise failed(str(error)) from None
    if body is None:
        raise failed(f"its answer exceeds {settings.vectors_bytes_max} bytes (engine.vectors_bytes_max)")
    try:
        return parse_vectors(body, count=len(prompt.inputs))
    except VectorError as error:
        raise failed(str(error)) from None


async def _expect_endpoint(answer: Answer, *, wait: Wait) -> None:
    """`expect_ok`, but a server without the endpoint is told in the mesh's words."""
    try:
        await expect_ok(answer, wait=wait)
    except MeshError as error:
        if error.code is not ErrorCode.UNSUPPORTED_PARAMETER:
            raise
        message = "this model does not compute embeddings"
        raise MeshError(ErrorCode.UNSUPPORTED_PARAMETER, message, param="model") from None
