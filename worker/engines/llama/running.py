"""A request while it holds slots, and its end."""

from __future__ import annotations

from dataclasses import dataclass, field

from schemas.frames import FinishReason, Usage
from worker.engines.base import Finished
from worker.engines.llama.cells import KvCells
from worker.engines.llama.layout import TOLD_CHUNK
from worker.engines.llama.lookup import Lookup
from worker.engines.llama.plan import Chunk, Progress
from worker.engines.llama.request import Choice, Prepared
from worker.engines.llama.settings import PREFILL_CHUNK_MAX


@dataclass(eq=False, kw_only=True)
class Running:
    """A request that holds slots. Times are of the monotonic clock, in seconds. `arrival` numbers requests in order.

    `cached`: tokens of the prompt that were not computed anew. `followers` wait for the prompt that another sequence of
    the request computes, `later` for a slot: there are more choices than slots. `reasons`: why each choice ended.
    """

    request: Prepared
    arrival: int
    admitted_at: float
    cached: int = 0
    first_token_at: float | None = None
    followers: list[SlotSequence] = field(default_factory=list)
    later: list[Choice] = field(default_factory=list)
    reasons: list[FinishReason | None]

    def finished(self, *, now: float) -> Finished | None:
        """The report of the request's end, once all of its choices have ended."""
        reasons = tuple(reason for reason in self.reasons if reason is not None)
        if len(reasons) < len(self.reasons):
            return None
        first_token_at = self.first_token_at or now
        return Finished(
            self.request.key,
            reasons,
            Usage(
                prompt_tokens=len(self.request.prompt),
                completion_tokens=sum(len(choice.completion.ids) for choice in self.request.choices),
                cached_tokens=self.cached,
            ),
            prefill_ms=(first_token_at - self.admitted_at) * 1000,
            decode_ms=(now - first_token_at) * 1000,
        )


@dataclass(eq=False, kw_only=True)
class SlotSequence:
    """A choice in a slot. `lookup`: its tokens up to some step, once guesses were wanted."""

    running: Running
    choice: Choice
    slot: int
    lookup: Lookup | None = None

    def progress(self, cells: KvCells, *, resume_chunk: int) -> Progress:
        """How far it is, for the plan of the next step."""
        request = self.running.request
        return Progress(
            slot=self.slot,
            layout=request.layout,
            resumed=len(self.choice.resumed),
            computed=cells.computed(self.slot),
            resume_chunk=resume_chunk,
            alone_below=cells.rules.alone_below,
            width_max=PREFILL_CHUNK_MAX if request.telling is None else TOLD_CHUNK,
        )

    def given(self, chunk: Chunk) -> list[int]:
        """The tokens of a chunk of this sequence."""
        prompt = self.running.request.prompt
        given = prompt if chunk.end <= len(prompt) else [*prompt, *self.choice.resumed]
        return given[chunk.start : chunk.end]

    def begin_after(self, chunk: Chunk) -> list[SlotSequence]:
        """The sequences to draw for after a chunk of this one: this, and those that wait for the prompt and no more."""
        ends_prompt = chunk.end == len(self.running.request.prompt)
        fresh = [follower for follower in self.running.followers if ends_prompt and not follower.choice.resumed]
        return [self, *fresh] if chunk.last else fresh

    def guess(self, most: int) -> list[int]:
        """Tokens that may come next, `most` of them and none beyond the completion's length."""
        prompt, completion = self.running.request.prompt, self.choice.completion
        most = min(most, completion.room - 1)
        if most <= 0:
            return []
        if self.lookup is None:
            self.lookup = Lookup(prompt)
        self.lookup.extend(completion.ids[len(self.lookup) - len(prompt) :])
        return self.lookup.draft(most)
