"""Answers to a chat completion as bytes: the SSE events of a stream, and the whole body.

`logprobs` where nobody asked for it, `refusal` and `system_fingerprint` are left out of chunks; the whole body has the
keys that OpenAI's specification requires (`logprobs` and `refusal`, null).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from gateway.dialects.events import ChunkFrame, encode, json_line, json_string, shown_usage
from gateway.dialects.likelihoods import LikelihoodTrack, chat_logprobs, chat_logprobs_pieces, placed, text_of
from schemas.frames import Delta, FinishReason, Usage


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str
    refusal: None = None


class ChunkWriter(ChunkFrame):
    """Writes the events of one streamed answer. All but the text is rendered once, beforehand.

    Order of a complete stream: `opening`, any number of `delta`, then `ending`. Each choice has one chunk with its
    role, then its text, then one with its finish reason: as soon as it is known, at the latest in the `ending`. With
    `include_usage`, the `ending` brings the usage chunk and every other chunk says ``"usage":null``; without it no
    chunk has that key.
    """

    def __init__(
        self,
        request_id: str,
        *,
        created: int,
        model: str,
        service_tier: str | None = None,
        include_usage: bool = False,
        choices: int = 1,
        logprobs: bool = False,
    ) -> None:
        tier = b"" if service_tier is None else b',"service_tier":' + json_string(service_tier)
        names = (json_string(request_id), created, json_string(model), tier)
        super().__init__(
            b'data: {"id":%b,"object":"chat.completion.chunk","created":%d,"model":%b%b,"choices":[' % names,
            field=b"delta",
            end=b'{},"finish_reason":"%b"',
            include_usage=include_usage,
            choices=choices,
        )
        self._tracks = tuple(LikelihoodTrack() for _ in range(choices)) if logprobs else ()
        # What most answers consist of: the text of a single choice.
        self._is_plain = choices == 1 and not logprobs
        self._text_head = self._heads[0] + b'{"content":'
        self._text_tail = b'},"finish_reason":null' + self._close

    def opening(self) -> bytes:
        """The first events: the role of each choice, with empty content."""
        return b"".join(head + b'{"role":"assistant","content":""' + self._text_tail for head in self._heads)

    def delta(self, frame: Delta) -> bytes:
        """The events for `frame`, perhaps none."""
        if self._is_plain and frame.text:
            return self._text_head + json_string(frame.text) + self._text_tail
        events = self._text(frame)
        if frame.finish is not None:
            events += self._finish(frame.choice, frame.finish)
        return events

    def _text(self, frame: Delta) -> bytes:
        tokens = self._tracks[frame.choice].push(frame) if self._tracks else []
        if not frame.text:
            return b""
        shown = b'"logprobs":%b,' % json_line(chat_logprobs(tokens)) if self._tracks else b""
        body = b'{"content":%b},%b"finish_reason":null' % (json_string(frame.text), shown)
        return self._heads[frame.choice] + body + self._close


def completion(
    request_id: str,
    *,
    created: int,
    model: str,
    choices: Sequence[Sequence[Delta]],
    finish_reasons: Sequence[FinishReason],
    usage: Usage,
    service_tier: str | None = None,
    logprobs: bool = False,
) -> Iterator[bytes]:
    """The body of an answer that is not streamed, piece by piece: all at once would hold up other requests. `created`
    in seconds since the epoch, `choices` the deltas of each."""
    tier = b"" if service_tier is None else b',"service_tier":' + encode(service_tier)
    yield b'{"id":%b,"object":"chat.completion","created":%d,"model":%b%b,"choices":[' % (
        encode(request_id),
        created,
        encode(model),
        tier,
    )
    for index, (deltas, reason) in enumerate(zip(choices, finish_reasons, strict=True)):
        message = encode(_Message(content=text_of(deltas)))
        head = b'%b{"index":%d,"message":%b,"logprobs":' % (b"," if index else b"", index, message)
        end = b',"finish_reason":%b}' % encode(reason)
        if logprobs:
            yield head
            yield from chat_logprobs_pieces(placed(deltas))
            yield end
        else:
            yield head + b"null" + end
    yield b'],"usage":%b}' % encode(shown_usage(usage))
