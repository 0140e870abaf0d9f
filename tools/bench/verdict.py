"""Was the stream whole? From an answer to one of three outcomes. Pure.

- `Completed`: role, content, finish_reason, [DONE], the last byte of the body, and the text that was expected.
- `Failed`: the server or the connection said so: no answer, an HTTP error, an error event, a time-out.
- `Incomplete`: it looked like a success and was not: something missing, repeated, out of order or cut off. An error
  event does not excuse wrong tokens before it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final

from tools.bench.answer import Answer, Break
from tools.bench.transcript import Transcript

_SIM_TOKEN: Final = re.compile(r" tok(\d+)")


@dataclass(frozen=True, slots=True)
class SimText:
    """The `sim` engine answers ` tok1 tok2 ... tokT` to a request of T `tokens`: loss and repetition can be seen.

    The steps of the first `prefill_tokens` of them stand for a prefill: latencies take the next one for the first.
    """

    tokens: int
    prefill_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AnyText:
    """A real model's text: any that is not empty."""


Expected = SimText | AnyText


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """Times in seconds from `started_at`; `gaps_s` lie between consecutive content deltas (0 when read at once).
    `computed_prompt_tokens`: those that no cache had, by the usage
    event; 0 where it says nothing."""

    tokens: int
    ttft_s: float
    gaps_s: list[float]
    total_s: float
    computed_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """`code` groups failures: `429 queue_full`, `stream worker_lost`, `client_timeout`, `connect ECONNREFUSED`."""

    tokens: int
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Incomplete:
    """`problem` says what is wrong with the stream without quoting a real model's text."""

    tokens: int
    problem: str


Outcome = Completed | Failed | Incomplete


def judge(answer: Answer, *, started_at: float, expected: Expected) -> Outcome:
    """The outcome of a complete `answer` to a request that began at `started_at`, by the clock it was fed with."""
    transcript = answer.transcript
    tokens = count_tokens(transcript, expected)
    if not answer.is_stream:
        return Failed(tokens=tokens, code=_failure_code(answer))
    problems = _text_problems(transcript, expected) + transcript.problems
    if transcript.error_code is not None and not problems:
        return Failed(tokens=tokens, code=f"stream {transcript.error_code}")
    if answer.broken is Break.TIMEOUT and not problems:
        return Failed(tokens=tokens, code=answer.broken.value)
    problems += _ending_problems(answer)
    done_at = transcript.done_at
    if problems or done_at is None:
        return Incomplete(tokens=tokens, problem="; ".join(problems))
    times = transcript.content_at[_deltas_of_prefill(transcript, expected) :]
    return Completed(
        tokens=tokens,
        ttft_s=times[0] - started_at,
        gaps_s=[later - earlier for earlier, later in pairwise(times)],
        total_s=done_at - started_at,
        computed_prompt_tokens=transcript.computed_prompt_tokens,
    )


def count_tokens(transcript: Transcript, expected: Expected) -> int:
    """Tokens received: those in the text of the sim engine, else what usage says, else the number of content deltas."""
    if isinstance(expected, SimText):
        return sum(part.count(" tok") for part in transcript.content)
    return len(transcript.content) if transcript.usage_tokens is None else transcript.usage_tokens


def describe_difference(text: str, *, tokens: int) -> str | None:
    """The first place where `text` leaves ` tok1 ... tok<tokens>`, or None. A mere early end is not a difference."""
    expected = _sim_text(tokens)
    if expected.startswith(text):
        return None
    place = 0
    for number, match in enumerate(_SIM_TOKEN.finditer(text), start=1):
        if match.start() != place:
            break
        place = match.end()
        found = int(match[1])
        if number > tokens:
            return f"tok{found} after the last token, tok{tokens}"
        if found < number:
            return f"tok{found} again where tok{number} belongs"
        if found > number:
            return f"tok{number} missing: tok{found} is in its place"
    return f"text differs from the sim engine's at character {place}"


def _deltas_of_prefill(transcript: Transcript, expected: Expected) -> int:
    """How many content deltas come before the one that brings the first token after the prefill."""
    if isinstance(expected, AnyText) or expected.prefill_tokens == 0:
        return 0
    seen = 0
    for place, part in enumerate(transcript.content):
        seen += part.count(" tok")
        if seen > expected.prefill_tokens:
            return place
    raise AssertionError("a whole stream has more tokens than its prefill")


def _failure_code(answer: Answer) -> str:
    if answer.broken is not None and answer.status in (0, 200):
        return f"{answer.broken.value} {answer.break_detail}".strip()
    if answer.status == 200:
        return "200 not_an_event_stream"
    return f"{answer.status} {answer.error_code()}"


def _text_problems(transcript: Transcript, expected: Expected) -> list[str]:
    """What is wrong with the text so far, however the stream ended."""
    if isinstance(expected, AnyText):
        return []
    text = "".join(transcript.content)
    difference = describe_difference(text, tokens=expected.tokens)
    if difference is not None:
        return [difference]
    if transcript.finish_reason is not None and text != _sim_text(expected.tokens):
        return [f"finished after {text.count(' tok')} of {expected.tokens} tokens"]
    return []


def _ending_problems(answer: Answer) -> list[str]:
    """What a stream that claims no error lacks."""
    transcript = answer.transcript
    problems: list[str] = []
    if transcript.role is None:
        problems.append("no role")
    if not transcript.content:
        problems.append("no content")
    if transcript.finish_reason is None:
        problems.append("no finish_reason")
    if transcript.done_at is None:
        problems.append("no [DONE]")
    if answer.broken is not None:
        problems.append(f"{answer.broken.value} {answer.break_detail}".strip())
    elif answer.cut_in_event:
        problems.append("body ends inside an event")
    return problems


@lru_cache(maxsize=64)
def _sim_text(tokens: int) -> str:
    return "".join(f" tok{number}" for number in range(1, tokens + 1))
