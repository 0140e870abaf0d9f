"""What `infermesh bench engine` asks of both engines. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tools.bench.target import Prompting

LONG_PROMPT_WORDS: Final = 1_400
"""About 2,000 tokens of the default model."""
SHARED_WORDS: Final = 400
"""About 600 tokens: a system prompt of the longer kind."""
CONTEXT_TOKENS: Final = 3_072
"""Per slot, on both sides: the long prompt, its completion, and room for other tokenizers."""
SLOTS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One cell of the comparison: `concurrency` clients in a closed loop, `requests` in all.

    Every request has `words` of its own, behind `shared_words` that are the same for all of a round.
    """

    name: str
    concurrency: int
    requests: int
    words: int
    tokens: int
    shared_words: int = 0

    def prompting(self, *, model: str, seed: int, service_tier: str | None) -> Prompting:
        """What its requests say; prompts of another seed have no prefix in common with these."""
        return Prompting(
            model=model,
            tokens=self.tokens,
            prompt_words=self.words,
            shared_words=self.shared_words,
            seed=seed,
            service_tier=service_tier,
            ignore_eos=True,
        )


def workloads(*, tokens: int) -> tuple[Workload, ...]:
    """All cells of one round. `tokens`: completion tokens of a request of the plain workload."""
    return (
        *(
            Workload(name="chat", concurrency=clients, requests=max(8, 2 * clients), words=32, tokens=tokens)
            for clients in (1, 4, 8)
        ),
        Workload(
            name="shared-prefix", concurrency=4, requests=12, words=16, tokens=tokens // 2, shared_words=SHARED_WORDS
        ),
        Workload(name="long-prompt", concurrency=2, requests=4, words=LONG_PROMPT_WORDS, tokens=tokens // 2),
    )


def running_streams(*, tokens: int) -> Workload:
    """Streams that run while a long prompt arrives."""
    return Workload(name="running", concurrency=4, requests=4, words=32, tokens=tokens)


LONG_ARRIVAL: Final = Workload(name="long-prompt arrival", concurrency=1, requests=1, words=LONG_PROMPT_WORDS, tokens=8)
