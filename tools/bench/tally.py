"""Outcomes added up, in bounded memory."""

from __future__ import annotations

from collections import Counter
from typing import Final, assert_never

from tools.bench.stats import Samples
from tools.bench.verdict import Completed, Failed, Incomplete, Outcome

FAILURE_CODES_MAX: Final = 50
"""Distinct failure codes counted; the rest goes under `other`."""
EXAMPLES_MAX: Final = 5
"""Incomplete streams described."""


class Tally:
    """What a run came to. Latencies and prompt tokens are those of completed streams only; `tokens` counts every one
    received."""

    def __init__(self) -> None:
        self.completed = 0
        self.failed = 0
        self.incomplete = 0
        self.tokens = 0
        self.computed_prompt_tokens = 0
        self.failures: Counter[str] = Counter()
        self.examples: list[str] = []
        self.ttft = Samples()
        self.itl = Samples()
        self.total = Samples()

    @property
    def requests(self) -> int:
        """Requests that came to an outcome."""
        return self.completed + self.failed + self.incomplete

    def problems(self) -> list[str]:
        """What went wrong, one line per kind of failure and per incomplete stream described."""
        failures = [f"failed: {count:,} x {code}" for code, count in self.failures.most_common()]
        return failures + [f"incomplete: {example}" for example in self.examples]

    def count(self, outcome: Outcome, *, number: int) -> None:
        """Add the outcome of request `number`."""
        self.tokens += outcome.tokens
        match outcome:
            case Completed():
                self.completed += 1
                self.computed_prompt_tokens += outcome.computed_prompt_tokens
                self.ttft.add(outcome.ttft_s)
                self.itl.extend(outcome.gaps_s)
                self.total.add(outcome.total_s)
            case Failed():
                self.failed += 1
                known = outcome.code in self.failures or len(self.failures) < FAILURE_CODES_MAX
                self.failures[outcome.code if known else "other"] += 1
            case Incomplete():
                self.incomplete += 1
                if len(self.examples) < EXAMPLES_MAX:
                    self.examples.append(f"request {number}: {outcome.problem}")
            case _:
                assert_never(outcome)
