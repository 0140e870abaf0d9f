"""Answers to a plain completion as bytes: the SSE events of a stream, and the whole body. Both have one shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gateway.dialects.events import ChunkFrame, encode, json_line, json_string, shown_usage
from gateway.dialects.likelihoods import (
    LikelihoodTrack,
    Placed,
    placed_to_end,
    text_logprobs,
    text_logprobs_pieces,
    text_of,
)
from gateway.echoed import EchoedPrompt
from schemas.frames import Delta, FinishReason, Usage


class TextWriter(ChunkFrame):
    """Writes the events of one streamed answer: `opening`, any number of `delta`, then `ending`.

    Each choice ends with one chunk that has its finish reason and no text: as soon as it is known, at the latest in the
    `ending`. `usage` as in `chat_response.ChunkWriter`. `choices` are those of all prompts; `echoed` is empty or has a
    text for each prompt, `stops` says that stop strings may end a text, `logprobs` that likelihoods are shown.
    """

    def __init__(
        self,
        request_id: str,
        *,
        created: int,
        model: str,
        echoed: Sequence[str] = (),
        include_usage: bool = False,
        choices: int = 1,
        logprobs: bool = False,
        stops: bool = False,
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
        self._stops = stops
        self._tracks = tuple(LikelihoodTrack() for _ in range(choices)) if logprobs else ()

    def opening(self) -> bytes:
        """The first events: the echoed prompt of each choice, if there is one."""
        if not self._echoed:
            return b""
        choices = len(self._heads)
        return b"".join(
            self._chunk(index, text, [])
            for index in range(choices)
            if (text := _echoed_in(index, self._echoed, choices))
        )

    def delta(self, frame: Delta) -> bytes:
        """The events for `frame`, perhaps none."""
        if isinstance(frame, EchoedPrompt):
            return self._echo(frame)
        tokens = self._tracks[frame.choice].push(frame) if self._tracks else []
        events = self._chunk(frame.choice, frame.text, tokens) if frame.text else b""
        if frame.finish is not None:
            events += self._finish(frame.choice, frame.finish)
        return events

    def _echo(self, part: EchoedPrompt) -> bytes:
        """The prompt in each of its choices. Control tokens have no text."""
        events = b""
        for choice in range(part.choice, part.choice + part.choices):
            tokens = self._tracks[choice].push(part) if self._tracks else []
            if part.text or tokens:
                events += self._chunk(choice, part.text, tokens)
        return events

    def _finish(self, index: int, reason: FinishReason) -> bytes:
        """The event that ends a choice, and before it the rest of its tokens."""
        rest = []
        if self._tracks and index in self._unfinished:
            rest = self._tracks[index].end(reason, stops=self._stops)
        return (self._chunk(index, "", rest) if rest else b"") + super()._finish(index, reason)

    def _chunk(self, index: int, text: str, tokens: Sequence[Placed]) -> bytes:
        shown = json_line(text_logprobs(tokens)) if tokens else b"null"
        body = b'%b,"logprobs":%b,"finish_reason":null' % (json_string(text), shown)
        return self._heads[index] + body + self._close


def text_completion(
    request_id: str,
    *,
    created: int,
    model: str,
    echoed: Sequence[str],
    choices: Sequence[Sequence[Delta]],
    finish_reasons: Sequence[FinishReason],
    usage: Usage,
    logprobs: bool = False,
    stops: bool = False,
) -> Iterator[bytes]:
    """The body of an answer that is not streamed, piece by piece: all at once would hold up other requests. `created`
    in seconds since the epoch, `choices` the deltas of each; the rest as in `TextWriter`."""
    yield b'{"id":%b,"object":"text_completion","created":%d,"model":%b,"choices":[' % (
        encode(request_id),
        created,
        encode(model),
    )
    for index, (deltas, reason) in enumerate(zip(choices, finish_reasons, strict=True)):
        text = encode(_echoed_in(index, echoed, len(choices)) + text_of(deltas))
        head = b'%b{"text":%b,"index":%d,"logprobs":' % (b"," if index else b"", text, index)
        end = b',"finish_reason":%b}' % encode(reason)
        if logprobs:
            yield head
            yield from text_logprobs_pieces(placed_to_end(deltas, reason=reason, stops=stops))
            yield end
        else:
            yield head + b"null" + end
    yield b'],"usage":%b}' % encode(shown_usage(usage))


def _echoed_in(index: int, echoed: Sequence[str], choices: int) -> str:
    """What is repeated in choice number `index`: the choices of each prompt follow one another."""
    return echoed[index * len(echoed) // choices] if echoed else ""
