"""What one chat completion stream said, event by event. No I/O.

Every event is decoded in full. A typed msgspec decoder does that in about a microsecond, so that a search for
`"content":` in the bytes would save little and be wrong for escaped text.
"""

from __future__ import annotations

from typing import Final

import msgspec

PROBLEMS_MAX: Final = 3
"""Problems remembered of one stream; the first ones tell the story."""
CODE_CHARS_MAX: Final = 64
_DONE: Final = b"[DONE]"


class _Delta(msgspec.Struct, gc=False):
    role: str | None = None
    content: str | None = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    index: int = 0
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    completion_tokens: int
    prompt_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None

    @property
    def computed_prompt_tokens(self) -> int:
        """Those of the prompt that were not in a cache."""
        details = self.prompt_tokens_details
        return self.prompt_tokens - ((details.cached_tokens if details is not None else None) or 0)


class _Error(msgspec.Struct, gc=False):
    code: str | int | None = None
    type: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_decode_event: Final = msgspec.json.Decoder(_Event).decode


class Transcript:
    """The facts of one stream: text, arrival times, how it ended, and every breach of the stream's own order.

    The order held to: role, then content, then one finish_reason, then at most a usage event, then [DONE], then
    nothing; or, at any point before [DONE], one error event and nothing after it except [DONE].
    """

    __slots__ = (
        "_events_left",
        "computed_prompt_tokens",
        "content",
        "content_at",
        "done_at",
        "error_code",
        "finish_reason",
        "problems",
        "role",
        "usage_tokens",
    )

    def __init__(self, *, events_max: int) -> None:
        self.content: list[str] = []
        """Non-empty content deltas in order."""
        self.content_at: list[float] = []
        """Arrival of each of them, in seconds of the caller's clock; deltas read at once share a time."""
        self.role: str | None = None
        self.finish_reason: str | None = None
        self.usage_tokens: int | None = None
        self.computed_prompt_tokens = 0
        self.error_code: str | None = None
        self.done_at: float | None = None
        self.problems: list[str] = []
        self._events_left = events_max

    @property
    def overrun(self) -> bool:
        """Whether more events came than `events_max`; nothing is taken from then on."""
        return self._events_left < 0

    def take(self, payload: bytes, now: float) -> None:
        """Take the payload of one event that arrived at `now`."""
        self._events_left -= 1
        if self._events_left < 0:
            return
        if self.done_at is not None:
            self._problem("event after [DONE]")
        elif payload == _DONE:
            self.done_at = now
        elif self.error_code is not None:
            self._problem("event after the error event")
        else:
            self._take_json(payload, now)

    def _take_json(self, payload: bytes, now: float) -> None:
        try:
            event = _decode_event(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._problem("event is not the JSON of a completion chunk")
            return
        if event.error is not None:
            self.error_code = code_of(event.error)
            return
        if event.usage is not None:
            self.usage_tokens = event.usage.completion_tokens
            self.computed_prompt_tokens = event.usage.computed_prompt_tokens
        for choice in event.choices:
            self._take_choice(choice, now)

    def _take_choice(self, choice: _Choice, now: float) -> None:
        delta = choice.delta
        if choice.index != 0:
            self._problem("choice that was not asked for")
            return
        if self.finish_reason is not None:
            self._problem("choice after finish_reason")
            return
        if delta.role is not None:
            self.role = delta.role
        if delta.content:
            if self.role is None and not self.content:
                self._problem("content before role")
            self.content.append(delta.content)
            self.content_at.append(now)
        self.finish_reason = choice.finish_reason

    def _problem(self, text: str) -> None:
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(text)


def code_of(error: _Error) -> str:
    """`code`, else `type`, of an OpenAI error; cut to `CODE_CHARS_MAX`. Never its message, which may quote a prompt."""
    code = error.code if error.code is not None else error.type
    return "unknown" if code is None else str(code)[:CODE_CHARS_MAX]


def code_of_error_body(body: bytes) -> str:
    """The code in the body of an HTTP error; `unknown` when the body is not an OpenAI error."""
    try:
        error = _decode_event(body).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "unknown"
    return "unknown" if error is None else code_of(error)
