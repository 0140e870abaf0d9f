"""What became of one stream of the `sim` engine, whose text is known in advance. Pure."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final

from tools.bench.answer import Answer, Break
from tools.bench.verdict import Completed, Failed, Incomplete, SimText, judge

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


def verdict(answer: Answer, *, tokens: int, left: bool, gateway_killed: bool) -> Verdict:
    """The fate of a complete `answer` to a request for `tokens` tokens.

    `left`: its client closed the connection. `gateway_killed`: the gateway was killed while the request was under way.
    Whatever the fate, the tokens that did come are compared.
    """
    transcript = answer.transcript
    text = "".join(transcript.content)
    duplicated, missing = wrong_tokens(text, tokens=tokens, finished=transcript.finish_reason is not None)
    fate, reason = _fate(answer, tokens=tokens, left=left, gateway_killed=gateway_killed)
    return Verdict(fate=fate, duplicated=duplicated, missing=missing, reason=reason)


def wrong_tokens(text: str, *, tokens: int, finished: bool) -> tuple[int, int]:
    """How many tokens of ` tok1 ... tok<tokens>` came once too often, and how many are missing.

    Of a stream that did not finish, only those below the highest one that came are missing.
    """
    numbers = [int(match[1]) for match in _SIM_TOKEN.finditer(text)]
    distinct = {number for number in numbers if 1 <= number <= tokens}
    due = tokens if finished else max(distinct, default=0)
    return len(numbers) - len(distinct), due - len(distinct)


def _fate(answer: Answer, *, tokens: int, left: bool, gateway_killed: bool) -> tuple[Fate, str]:
    if left and answer.broken is Break.CLOSED:
        return Fate.LEFT, ""
    if gateway_killed and answer.broken is Break.CLOSED:
        return Fate.BROKEN, ""
    if answer.broken is Break.TIMEOUT:
        return Fate.HUNG, f"status {answer.status}, {len(answer.transcript.content)} of {tokens} tokens"
    if answer.broken is None and answer.status in REFUSALS:
        return Fate.REFUSED, f"{answer.status} {answer.error_code()}"
    # The time to the first token is not asked for here.
    match judge(answer, started_at=0.0, expected=SimText(tokens)):
        case Completed():
            return Fate.COMPLETED, ""
        case Failed(code=code):
            return Fate.FAILED, code
        case Incomplete(problem=problem):
            return Fate.FAILED, problem
