"""One short class or function per route."""

from __future__ import annotations

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
from gateway.exchanges import new_id
from gateway.progress import Progress
from gateway.serving import Endpoint, Reply, Room
from gateway.settings import Limits
from gateway.sse import REQUEST_ID_HEADER
from gateway.terms import tier_of


class ChatCompletions(Endpoint[InnerRequest]):
    """``POST /v1/chat/completions``, streamed or not."""

    route = "chat"

    def parse(self, body: bytes, *, limits: Limits) -> InnerRequest:
        """A chat."""
        return parse_chat(body, limits=limits)

    async def respond(self, request: InnerRequest, exchange: Progress, reply: Reply) -> None:
        """The assistant's messages."""
        job, sampling = exchange.job, exchange.job.sampling
        shown_id, created = f"chatcmpl-{exchange.id}", int(job.created)
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
        pieces = completion(
            shown_id,
            created=created,
            model=job.model,
            choices=choices,
            finish_reasons=outcome.finish_reasons,
            usage=outcome.usage,
            service_tier=tier,
            logprobs=sampling.logprobs is not None,
        )
        await reply.send(pieces)


class Completions(Endpoint[CompletionRequest]):
    """``POST /v1/completions``, streamed or not."""

    route = "completions"

    def parse(self, body: bytes, *, limits: Limits) -> CompletionRequest:
        """Texts to go on with."""
        return parse_completion(body, limits=limits)

    async def respond(self, request: CompletionRequest, exchange: Progress, reply: Reply) -> None:
        """How they go on."""
        job, sampling = exchange.job, exchange.job.sampling
        shown_id, created = f"cmpl-{exchange.id}", int(job.created)
        if request.stream:
            writer = TextWriter(
                shown_id,
                created=created,
                model=job.model,
                echoed=request.echoed,
                include_usage=request.include_usage,
                choices=exchange.choice_count,
                logprobs=sampling.logprobs is not None,
                stops=bool(sampling.stop),
            )
            await reply.stream(writer)
            return
        choices, outcome = await reply.collect()
        pieces = text_completion(
            shown_id,
            created=created,
            model=job.model,
            echoed=request.echoed,
            choices=choices,
            finish_reasons=outcome.finish_reasons,
            usage=outcome.usage,
            logprobs=sampling.logprobs is not None,
            stops=bool(sampling.stop),
        )
        await reply.send(pieces)


class Embeddings(Endpoint[EmbeddingRequest]):
    """``POST /v1/embeddings``."""

    route = "embeddings"

    def parse(self, body: bytes, *, limits: Limits) -> EmbeddingRequest:
        """Texts or token ids."""
        return parse_embedding(body, limits=limits)

    async def respond(self, request: EmbeddingRequest, exchange: Progress, reply: Reply) -> None:
        """One vector for each."""
        assert isinstance(exchange, Exchange), "all inputs are one job"
        _, outcome = await reply.collect()
        pieces = embedding_list(
            exchange.vectors,
            request,
            model=exchange.job.model,
            usage=outcome.usage,
            bytes_max=self._room.settings.answer_bytes_max,
        )
        await reply.send(pieces)


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
    headers = {REQUEST_ID_HEADER.decode(): new_id()}
    return Response(body, headers=headers, media_type="application/json")
