"""Answers to a plain completion as bytes: the SSE events of a stream, and the whole body. Both have one shape."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.dialects.events import ChunkFrame, ShownUsage, encode, json_line, json_string, shown_usage
from gateway.dialects.likelihoods import LikelihoodTrack, Placed, TextLogprobs, WholeChoice, text_logprobs
from schemas.frames import Delta, FinishReason, Usage


class _Choice(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    index: int
    logprobs: TextLogprobs | None
    finish_reason: FinishReason


class _Completion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: tuple[_Choice, ...]
    usage: ShownUsage


class TextWriter(ChunkFrame):
    """Writes the events of one streamed answer: `opening`, any number of `delta`, then `ending`.

    Each choice ends with one chunk that has its finish reason and no text: as soon as it is known, at the latest in the
    `ending`. `usage` as in `chat_response.ChunkWriter`.
    """

    def __init__(
        self,
        request_id: str,
        *,
        created: int,
        model: str,
        echoed: str = "",
        include_usage: bool = False,
        choices: int = 1,
        logprobs: bool = False,
    ) -> None:
        names = (json_string(request_id), created, json_string(model))
        super().__init__(
            b'data: {"id":%b,"object":"text_completion","created":%d,"model":%b,"choices":[' % names,
            field=b"text",
            end=b'"","logprobs":null,"finish_reason":"%b"',
            include_usage=include_usage,
            choices=choices,
        )
        self._echoed = echoed
        self._tracks = tuple(LikelihoodTrack() for _ in range(choices)) if logprobs else ()

    def opening(self) -> bytes:
        """The first events: the echoed prompt of each choice, if there is one."""
        if not self._echoed:
            return b""
        return b"".join(self._chunk(index, self._echoed, []) for index in range(len(self._heads)))

    def delta(self, frame: Delta) -> bytes:
        """The events for `frame`, perhaps none."""
        tokens = self._tracks[frame.choice].push(frame) if self._tracks else []
        events = self._chunk(frame.choice, frame.text, tokens) if frame.text else b""
        if frame.finish is not None:
            events += self._finish(frame.choice, frame.finish)
        return events

    def _chunk(self, index: int, text: str, tokens: Sequence[Placed]) -> bytes:
        shown = json_line(text_logprobs(tokens)) if tokens else b"null"
        body = b'%b,"logprobs":%b,"finish_reason":null' % (json_string(text), shown)
        return self._heads[index] + body + self._close


def text_completion(
    request_id: str,
    *,
    created: int,
    model: str,
    echoed: str,
    choices: Sequence[WholeChoice],
    finish_reasons: Sequence[FinishReason],
    usage: Usage,
) -> bytes:
    """The body of an answer that is not streamed. `created` in seconds since the epoch."""
    return encode(
        _Completion(
            id=request_id,
            created=created,
            model=model,
            choices=tuple(
                _Choice(
                    text=echoed + choice.text,
                    index=index,
                    logprobs=None if choice.tokens is None else text_logprobs(choice.tokens),
                    finish_reason=reason,
                )
                for index, (choice, reason) in enumerate(zip(choices, finish_reasons, strict=True))
            ),
            usage=shown_usage(usage),
        )
    )
