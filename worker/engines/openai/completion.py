"""One choice: its request to the server, its stream, its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from schemas.errors import ErrorCode, MeshError
from schemas.frames import FinishReason, TokenLogprob, Usage
from worker.engines.openai.chunks import ChunkError, Piece, parse_chunk
from worker.engines.openai.client import Answer, Client, Cut, Deadline, NotReached, Silent
from worker.engines.openai.refusals import failure_in_stream, is_model_gone, refusal
from worker.engines.openai.request import ServerRequest
from worker.engines.openai.settings import OpenAISettings, Wait
from worker.engines.openai.sse import SseError, SseEvent, SseReader

ERROR_BODY_BYTES_MAX: Final = 64 * 1024
"""Of a refusal's body; a larger one is none that could be understood, and its status alone counts."""
BUSY_WAIT_S: Final = 0.25
"""Seconds before a busy server without Retry-After is asked again; doubled each time, up to `busy_wait_max_s`."""
TOKENS_MIN: Final = 256
"""A stream with more pieces or likelihoods (`pieces_per_token_max`), or more text (`token_chars_max`), for each token
that it may have, and at least for so many, is cut off: the server does not heed the limit. Proxies may send a token's
text in pieces."""
EVENT_STREAM: Final = "text/event-stream"


class ServerRefusedUs(MeshError):
    """The server does not accept our key (401): nothing that a request could be blamed for."""


class ModelGone(MeshError):
    """The server does not have the model any more: asked again, it would refuse every request as quickly."""


class Busy(MeshError):
    """The server has no room; `retry_after_s` is what it said."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a choice ended. `usage` is counted by the `pieces` that came where the server does not tell."""

    reason: FinishReason
    usage: Usage
    pieces: int
    accepted_at: float
    first_text_at: float


class Completion:
    """One choice of one request; `run` it once.

    `on_accepted()` is called when the server takes the request, `on_text` with each piece as it comes. Cancelling `run`
    closes the connection, which is how servers learn that nobody wants the answer.
    """

    def __init__(
        self,
        client: Client,
        settings: OpenAISettings,
        *,
        tokens_max: int,
        on_accepted: Callable[[], None],
        on_text: Callable[[str, tuple[TokenLogprob, ...]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tokens_max`: more than these cannot come of a server that does as it was asked."""
        self._client = client
        self._settings = settings
        self._on_accepted = on_accepted
        self._on_text = on_text
        self._clock = clock
        self._pieces = 0
        self._likelihoods = 0
        self._chars = 0
        self._tokens_max = max(TOKENS_MIN, tokens_max)
        self._logprobs_due = False
        self._reason: FinishReason | None = None
        self._usage: Usage | None = None
        self._accepted_at = self._first_text_at = 0.0

    async def run(self, request: ServerRequest) -> Ended:
        """See it through. Raises `MeshError`: final for what the server refuses, else of a retryable code.

        A server without room is asked again, `busy_retries_max` times, and one that refuses a field which means nothing
        without that field. Neither after the first text.
        """
        busy = 0
        while True:
            try:
                return await self._attempt(request)
            except Busy as full:
                if busy >= self._settings.busy_retries_max:
                    message = f"{full.message} {busy + 1} times in a row (engine.busy_retries_max)"
                    raise MeshError(full.code, message) from None
                wait_s = full.retry_after_s if full.retry_after_s is not None else BUSY_WAIT_S * 2**busy
                busy += 1
                await asyncio.sleep(min(wait_s, self._settings.busy_wait_max_s))
            except MeshError as error:
                changed = request.after(error) if not self._pieces else None
                if changed is None:
                    raise
                request = changed

    async def _attempt(self, request: ServerRequest) -> Ended:
        settings = self._settings
        self._logprobs_due = "logprobs" in request.body
        try:
            async with self._client.request(
                "POST", request.path, request.encoded(), head_wait=settings.first_token_wait
            ) as answer:
                await expect_ok(answer, wait=settings.token_wait)
                if answer.content_type != EVENT_STREAM:
                    raise failed("answered a streamed request with something else than a stream")
                self._accepted_at = self._clock()
                self._on_accepted()
                await self._read(answer)
        except (Cut, Silent, NotReached) as error:
            if self._reason is None:
                raise failed(str(error)) from None
            # Only the usage, or the end of the stream, is missing.
        except (SseError, ChunkError) as error:
            raise failed(str(error)) from None
        return self._ended()

    async def _read(self, answer: Answer) -> None:
        """Take the stream to its end: ``[DONE]``, or the end of the body where a server sends none."""
        settings = self._settings
        reader = SseReader(event_bytes_max=settings.event_bytes_max)
        until = Deadline.after(settings.first_token_wait)
        while data := await answer.read(until=until):
            pieces = self._pieces
            for event in reader.feed(data):
                if event.data.strip() == b"[DONE]":
                    return
                self._take(event)
            if self._pieces > pieces:
                # Comments and empty chunks, by which a server keeps the connection alive, are no progress.
                until = Deadline.after(settings.token_wait)

    def _take(self, event: SseEvent) -> None:
        # Within a text the quotes are escaped: only a key or a whole value matches, so a chunk is rarely decoded twice.
        error = failure_in_stream(event.data) if event.failed or b'"error"' in event.data else None
        if error is not None or event.failed:
            raise self._failure(error)
        piece = parse_chunk(event.data)
        if piece.usage is not None:
            self._usage = piece.usage
        if self._reason is None:
            self._tell(piece)
            self._reason = piece.finish_reason

    def _failure(self, error: MeshError | None) -> MeshError:
        """What a failure in the stream is: none of the request's own once the model has generated something for it."""
        if error is None or self._pieces:
            return failed("reported a failure")
        return Busy(error.code, error.message) if error.code is ErrorCode.OVERLOADED else error

    def _tell(self, piece: Piece) -> None:
        if not piece.text and not piece.logprobs and not piece.thought:
            return
        if not self._pieces:
            self._first_text_at = self._clock()
        self._pieces += 1
        self._likelihoods += len(piece.logprobs)
        self._chars += len(piece.text)
        settings = self._settings
        if max(self._pieces, self._likelihoods) > settings.pieces_per_token_max * self._tokens_max:
            raise self._too_much(f"{settings.pieces_per_token_max} pieces", "pieces_per_token_max")
        if self._chars > settings.token_chars_max * self._tokens_max:
            raise self._too_much(f"{settings.token_chars_max} characters", "token_chars_max")
        if piece.thought and not piece.text:
            # Its log probabilities would tell what is not told.
            return
        if self._logprobs_due and not piece.logprobs:
            # Ollama has them for chats only, and leaves them out in silence.
            message = "this model's server gives no log probabilities here"
            raise MeshError(ErrorCode.UNSUPPORTED_PARAMETER, message, param="logprobs")
        self._logprobs_due = False
        self._on_text(piece.text, piece.logprobs)

    def _too_much(self, bound: str, setting: str) -> MeshError:
        return failed(f"streamed more than {bound} for each of {self._tokens_max} tokens (engine.{setting})")

    def _ended(self) -> Ended:
        if self._reason is None:
            raise failed("ended the stream without saying why")
        return Ended(
            reason=self._reason,
            usage=self._counted(),
            pieces=self._pieces,
            accepted_at=self._accepted_at,
            first_text_at=self._first_text_at or self._clock(),
        )

    def _counted(self) -> Usage:
        """What the server counted. Some tell zeros with every chunk, and the truth in one that may not have come."""
        told = self._usage or Usage(prompt_tokens=0, completion_tokens=0)
        return told if told.completion_tokens else msgspec.structs.replace(told, completion_tokens=self._pieces)


def failed(what: str) -> MeshError:
    """A failure of the server that says nothing against the request."""
    return MeshError(ErrorCode.ENGINE_ERROR, f"the model's server failed: {what}")


async def expect_ok(answer: Answer, *, wait: Wait) -> None:
    """Raise the `MeshError` that an answer other than 200 stands for: `Busy`, `ServerRefusedUs`, `ModelGone` or
    another."""
    if answer.status == 200:
        return
    body = await answer.whole(bytes_max=ERROR_BODY_BYTES_MAX, wait=wait) or b""
    if is_model_gone(answer.status, body):
        raise ModelGone(ErrorCode.ENGINE_ERROR, "the model's server does not have the model any more")
    error = refusal(answer.status, body)
    if answer.status == 401:
        raise ServerRefusedUs(error.code, error.message)
    if error.code is ErrorCode.OVERLOADED:
        raise Busy(error.code, error.message, retry_after_s=answer.retry_after_s)
    raise error
