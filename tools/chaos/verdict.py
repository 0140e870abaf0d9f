"""What became of one request to the `sim` engine, whose text is known in advance. Pure."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final

import msgspec

from tools.bench.answer import Answer, Break
from tools.bench.verdict import Completed, Failed, Incomplete, SimText, describe_difference, judge

_SIM_TOKEN: Final = re.compile(r" tok(\d+)")
REFUSALS: Final = frozenset({429, 503})
"""Statuses that say "not now": nothing was started, and a client asks again."""


class Fate(enum.StrEnum):
    """The last three are no ends: the client sends the same request again."""

    COMPLETED = "completed"
    FAILED = "failed"
    HUNG = "hung"
    REFUSED = "refused"
    BROKEN = "broken"
    """The gateway that served it was killed on purpose."""
    LEFT = "left"
    """The client itself went away on purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`reason` says why it is not completed, without text of the stream beyond token numbers."""

    fate: Fate
    duplicated: int
    missing: int
    reason: str = ""


class _Message(msgspec.Struct):
    content: str = ""


class _Choice(msgspec.Struct):
    message: _Message = msgspec.field(default_factory=_Message)
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    """An answer in one piece."""

    choices: list[_Choice] = []

    @property
    def text(self) -> str:
        return self.choices[0].message.content if self.choices else ""

    @property
    def finished(self) -> bool:
        return bool(self.choices) and self.choices[0].finish_reason is not None


def verdict(answer: Answer, *, tokens: int, left: bool, gateway_killed: bool, stream: bool = True) -> Verdict:
    """The fate of a complete `answer` to a request for `tokens` tokens, as a `stream` or in one piece.

    `left`: its client closed the connection. `gateway_killed`: the gateway was killed while the request was under way.
    Whatever the fate, the tokens that did come are compared.
    """
    if stream:
        text, finished = "".join(answer.transcript.content), answer.transcript.finish_reason is not None
    else:
        completion = _completion(answer)
        text, finished = completion.text, completion.finished
    duplicated, missing = wrong_tokens(text, tokens=tokens, finished=finished)
    early = _early_end(answer, tokens=tokens, left=left, gateway_killed=gateway_killed)
    if early is not None:
        fate, reason = early
    elif stream:
        fate, reason = _fate_of_stream(answer, tokens=tokens)
    else:
        fate, reason = _fate_of_completion(answer, text, tokens=tokens, finished=finished)
    return Verdict(fate=fate, duplicated=duplicated, missing=missing, reason=reason)


def wrong_tokens(text: str, *, tokens: int, finished: bool) -> tuple[int, int]:
    """How many tokens of ` tok1 ... tok<tokens>` came once too often, and how many are missing.

    Of a stream that did not finish, only those below the highest one that came are missing.
    """
    numbers = [int(match[1]) for match in _SIM_TOKEN.finditer(text)]
    distinct = {number for number in numbers if 1 <= number <= tokens}
    due = tokens if finished else max(distinct, default=0)
    return len(numbers) - len(distinct), due - len(distinct)


def _early_end(answer: Answer, *, tokens: int, left: bool, gateway_killed: bool) -> tuple[Fate, str] | None:
    """The fate of what did not come to its end, or was not begun."""
    if left and answer.broken is Break.CLOSED:
        return Fate.LEFT, ""
    if gateway_killed and answer.broken is Break.CLOSED:
        return Fate.BROKEN, ""
    if answer.broken is Break.TIMEOUT:
        return Fate.HUNG, f"status {answer.status}, {len(answer.transcript.content)} of {tokens} tokens"
    if answer.broken is None and answer.status in REFUSALS:
        return Fate.REFUSED, f"{answer.status} {answer.error_code()}"
    return None


def _fate_of_stream(answer: Answer, *, tokens: int) -> tuple[Fate, str]:
    # The time to the first token is not asked for here.
    match judge(answer, started_at=0.0, expected=SimText(tokens)):
        case Completed():
            return Fate.COMPLETED, ""
        case Failed(code=code):
            return Fate.FAILED, code
        case Incomplete(problem=problem):
            return Fate.FAILED, problem


def _fate_of_completion(answer: Answer, text: str, *, tokens: int, finished: bool) -> tuple[Fate, str]:
    if answer.broken is not None:
        return Fate.FAILED, f"{answer.broken} {answer.break_detail}".strip()
    if answer.status != 200:
        return Fate.FAILED, f"{answer.status} {answer.error_code()}"
    if (difference := describe_difference(text, tokens=tokens)) is not None:
        return Fate.FAILED, difference
    if not finished or wrong_tokens(text, tokens=tokens, finished=True) != (0, 0):
        return Fate.FAILED, "the text ends too early"
    return Fate.COMPLETED, ""


def _completion(answer: Answer) -> _Completion:
    """What an answer in one piece says; nothing where it is an error, or broken off."""
    if answer.status != 200 or answer.broken is not None:
        return _Completion()
    try:
        return msgspec.json.decode(answer.body, type=_Completion)
    except msgspec.DecodeError:
        return _Completion()
