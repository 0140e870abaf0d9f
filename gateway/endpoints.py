"""One short class or function per route."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from gateway.dialects.chat_request import parse_chat
from gateway.dialects.chat_response import ChunkWriter, completion
from gateway.dialects.completions_request import CompletionRequest, parse_completion
from gateway.dialects.completions_response import TextWriter, text_completion
from gateway.dialects.embeddings import EmbeddingRequest, embedding_list, parse_embedding
from gateway.dialects.inner import InnerRequest
from gateway.dialects.models_response import model_list, model_object
from gateway.errors import model_not_found
from gateway.exchange import Exchange
from gateway.serving import Endpoint, Reply, Room
from gateway.settings import Limits
from gateway.terms import tier_of


class ChatCompletions(Endpoint[InnerRequest]):
    """``POST /v1/chat/completions``, streamed or not."""

    route = "chat"

    def parse(self, body: bytes, *, limits: Limits) -> InnerRequest:
        """A chat."""
        return parse_chat(body, limits=limits)

    async def respond(self, request: InnerRequest, exchange: Exchange, reply: Reply) -> None:
        """The assistant's messages."""
        job, sampling = exchange.job, exchange.job.sampling
        shown_id, created = f"chatcmpl-{job.id}", int(job.created)
        tier = None if request.service_tier is None else tier_of(job.band, self._room.settings)
        if request.stream:
            writer = ChunkWriter(
                shown_id,
                created=created,
                model=job.model,
                service_tier=tier,
                include_usage=request.include_usage,
                choices=sampling.choices,
                logprobs=sampling.logprobs is not None,
            )
            await reply.stream(writer)
            return
        choices, outcome = await reply.collect()
        body = completion(
            shown_id,
            created=created,
            model=job.model,
            choices=choices,
            finish_reasons=outcome.finish_reasons,
            usage=outcome.usage,
            service_tier=tier,
        )
        await reply.send(body)


class Completions(Endpoint[CompletionRequest]):
    """``POST /v1/completions``, streamed or not."""

    route = "completions"

    def parse(self, body: bytes, *, limits: Limits) -> CompletionRequest:
        """A text to go on with."""
        return parse_completion(body, limits=limits)

    async def respond(self, request: CompletionRequest, exchange: Exchange, reply: Reply) -> None:
        """How it goes on."""
        job, sampling = exchange.job, exchange.job.sampling
        shown_id, created = f"cmpl-{job.id}", int(job.created)
        if request.stream:
            writer = TextWriter(
                shown_id,
                created=created,
                model=job.model,
                echoed=request.echoed,
                include_usage=request.include_usage,
                choices=sampling.choices,
                logprobs=sampling.logprobs is not None,
            )
            await reply.stream(writer)
            return
        choices, outcome = await reply.collect()
        body = text_completion(
            shown_id,
            created=created,
            model=job.model,
            echoed=request.echoed,
            choices=choices,
            finish_reasons=outcome.finish_reasons,
            usage=outcome.usage,
        )
        await reply.send(body)


class Embeddings(Endpoint[EmbeddingRequest]):
    """``POST /v1/embeddings``."""

    route = "embeddings"

    def parse(self, body: bytes, *, limits: Limits) -> EmbeddingRequest:
        """Texts or token ids."""
        return parse_embedding(body, limits=limits)

    async def respond(self, request: EmbeddingRequest, exchange: Exchange, reply: Reply) -> None:
        """One vector for each."""
        _, outcome = await reply.collect()
        pieces: list[bytes] = []
        for piece in embedding_list(exchange.vectors, request, model=exchange.job.model, usage=outcome.usage):
            pieces.append(piece)
            await asyncio.sleep(0)  # others' tokens go between the vectors
        await reply.send(b"".join(pieces))


async def list_models(request: Request) -> Response:
    """``GET /v1/models``: the models with a replica that takes jobs."""
    room: Room = request.app.state.room
    await room.exchanges.until_heard(lambda: False)
    return _json(model_list(room.fleet.ready_models, created=room.started_at))


async def show_model(request: Request) -> Response:
    """``GET /v1/models/{id}``."""
    room: Room = request.app.state.room
    model = request.path_params["model"]
    await room.exchanges.until_heard(lambda: room.fleet.knows(model))
    if not room.fleet.knows(model):
        raise model_not_found(model)
    return _json(model_object(model, created=room.started_at))


async def health(request: Request) -> Response:
    """``GET /health``: this process answers."""
    return _json(b'{"status":"ok"}')


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
