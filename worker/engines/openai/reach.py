"""Loading: wait for the server, find the model on it, have it generate for real."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from schemas.errors import ErrorCode, MeshError
from schemas.frames import TokenLogprob
from schemas.job import ChatPrompt, EmbeddingPrompt, TextPrompt
from schemas.sampling import Sampling
from worker.engines.base import LoadError
from worker.engines.openai.client import Client, Cut, NotReached, Silent
from worker.engines.openai.command import ServerCommand
from worker.engines.openai.completion import Busy, Completion, ServerRefusedUs, failed
from worker.engines.openai.embedding import embed
from worker.engines.openai.numbers import NUMBER_MAX
from worker.engines.openai.request import completion_requests
from worker.engines.openai.settings import OpenAISettings
from worker.engines.openai.watch import MODELS_PATH

RETRY_S: Final = 0.25
"""Between two questions; for how long they are asked is `ready_within_s`."""
WARM_UP_TOKENS: Final = 16
NAMES_SHOWN_MAX: Final = 5
"""Of a list, in an error, which has the number of all."""
_REFUSED_US: Final = "the server does not accept the API key: check --api-key-file"


class _Meta(msgspec.Struct, frozen=True):
    n_ctx: int | None = None


class _Model(msgspec.Struct, frozen=True):
    """`max_model_len` is of vLLM and SGLang, `meta.n_ctx` of llama-server (of one slot), the others of proxies."""

    id: str
    max_model_len: int | None = None
    meta: _Meta | None = None
    context_length: int | None = None

    @property
    def context(self) -> int | None:
        """Tokens of prompt plus completion, where the server says so."""
        return self.max_model_len or (self.meta.n_ctx if self.meta is not None else None) or self.context_length


class _Models(msgspec.Struct, frozen=True):
    """Ollama without a model says null."""

    data: list[_Model] | None


_decoder: Final = msgspec.json.Decoder(_Models)


@dataclass(frozen=True, kw_only=True)
class Served:
    """The model as the server calls it, and its context in tokens."""

    model: str
    context: int

    @property
    def shown(self) -> str:
        """The model's name for people: where a server calls it by its file, without the folder."""
        return self.model.rpartition("/")[2] if self.model.startswith("/") else self.model


async def until_served(
    client: Client, settings: OpenAISettings, *, command: ServerCommand | None, progress: Callable[[str, float], None]
) -> Served:
    """Wait until the server lists its models, and choose ours. Raises `LoadError`."""
    began = time.monotonic()
    while True:
        waited_s = time.monotonic() - began
        progress("waiting for the server", min(1.0, waited_s / settings.ready_within_s))
        body, reason = await _list_models(client, settings)
        if body is not None:
            return choose_model(body, settings)
        if command is not None and command.ended.done():
            said = f": {command.last_words()}" if command.last_words() else ""
            raise LoadError(f"the command ended with exit code {command.ended.result()} before it served{said}")
        if waited_s >= settings.ready_within_s:
            within = f"{settings.ready_within_s:g} s (engine.ready_within_s)"
            raise LoadError(f"the server at {settings.url} was not ready in {within}: {reason}")
        # The start of another program: there is nothing to await but time.
        await asyncio.sleep(RETRY_S)


async def _list_models(client: Client, settings: OpenAISettings) -> tuple[bytes | None, str]:
    """The server's list of models, or why there is none yet. Raises `LoadError` when waiting would not help."""
    try:
        async with client.request("GET", MODELS_PATH, head_wait=settings.answer_wait) as answer:
            body = await answer.whole(bytes_max=settings.models_bytes_max, wait=settings.answer_wait)
    except (NotReached, Cut, Silent) as error:
        return None, str(error)
    if answer.status in (401, 403):
        raise LoadError(_REFUSED_US)
    if answer.status >= 500 or answer.status == 429:
        return None, f"status {answer.status}"
    if body is None:
        limit = f"{settings.models_bytes_max} bytes (engine.models_bytes_max)"
        raise LoadError(f"the server's {MODELS_PATH} is larger than {limit}")
    if answer.status != 200:
        raise LoadError(f"the server has no {MODELS_PATH} (status {answer.status}): it must speak the OpenAI API")
    return body, ""


def choose_model(body: bytes, settings: OpenAISettings) -> Served:
    """The model that `settings` ask for, out of a server's list. Raises `LoadError`."""
    try:
        models = _decoder.decode(body).data or []
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise LoadError(f"the server's {MODELS_PATH} is not a list of models: it must speak the OpenAI API") from None
    if not models:
        raise LoadError("the server lists no model: load one there")
    wanted = settings.upstream_model
    found = [model for model in models if wanted in (None, model.id)]
    if len(found) != 1:
        names = ", ".join(model.id[:100] for model in models[:NAMES_SHOWN_MAX])
        raise LoadError(f"choose the server's model by --upstream-model; it lists {len(models)}: {names}")
    context = settings.context or found[0].context
    if context is None or not 1 <= context <= NUMBER_MAX:
        raise LoadError("the server does not say how long its context is: give --context")
    return Served(model=found[0].id, context=context)


async def warm_up(client: Client, settings: OpenAISettings, served: Served) -> float:
    """Have the server generate, or embed, for real; returns tokens per second of one request alone, 0.0 of a model that
    only embeds. Raises `LoadError`."""
    began = time.monotonic()
    while True:
        try:
            return await _first_that_works(client, settings, served)
        except ServerRefusedUs:
            raise LoadError(_REFUSED_US) from None
        except Busy as error:
            if time.monotonic() - began >= settings.ready_within_s:
                raise LoadError(f"the server had no room for a first request: {error.message}") from None
            await asyncio.sleep(RETRY_S)
        except MeshError as error:
            raise LoadError(f"the server did not complete a first request: {error.message}") from None


async def _first_that_works(client: Client, settings: OpenAISettings, served: Served) -> float:
    """A chat; else, of a model without a chat template, a completion; else a vector."""
    words = "Count from one to fifty."
    for prompt in (ChatPrompt(({"role": "user", "content": words},)), TextPrompt(words)):
        try:
            return await _decode_rate(client, settings, served, prompt)
        except MeshError as error:
            if error.traits.status >= 500 or error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED:
                raise
            refused = error
    try:
        await embed(client, settings, EmbeddingPrompt((words,)), model=served.model)
    except MeshError:
        raise refused from None
    return 0.0


async def _decode_rate(
    client: Client, settings: OpenAISettings, served: Served, prompt: ChatPrompt | TextPrompt
) -> float:
    times: list[float] = []

    def on_text(text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        times.append(time.monotonic())

    sampling = Sampling(max_tokens=min(WARM_UP_TOKENS, served.context), seed=0, temperature=0.0)
    (request,) = completion_requests(prompt, sampling, model=served.model)
    began = time.monotonic()
    completion = Completion(client, settings, tokens_max=sampling.max_tokens, on_accepted=lambda: None, on_text=on_text)
    ended = await completion.run(request)
    tokens = ended.usage.completion_tokens
    if not ended.pieces or not tokens:
        raise failed("generated nothing")
    # The first token carries the prompt's time; what comes in one piece, or is thought and not told, cannot be told
    # apart from it.
    if len(times) < 2:
        return tokens / max(time.monotonic() - began, 1e-3)
    return max(1, tokens - 1) / max(times[-1] - times[0], 1e-3)
