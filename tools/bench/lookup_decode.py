"""Greedy decoding on the llama engine's own context, with and without drafts."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from schemas.job import ChatPrompt, TextPrompt
from tools.bench.lookup_report import Generated
from worker.engines.llama import LlamaSettings, binding
from worker.engines.llama.cache import NOTHING
from worker.engines.llama.compute import Compute, DecodeFailed
from worker.engines.llama.layout import NARROW_CHUNK
from worker.engines.llama.logs import LogCapture
from worker.engines.llama.lookup import Lookup
from worker.engines.llama.model import LoadedModel
from worker.engines.llama.prompt import PromptEncoder
from worker.engines.llama.sampler import GreedySampler

CREATED: Final = 0.0
"""For chat templates that tell the model the date: the same in every run."""


class NothingToDraft(Exception):
    """The model's memory cannot give tokens back, so that none can be tried."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt whose cells are in `slot`, and the first token of its completion."""

    ids: Sequence[int]
    slot: int
    first: int


@dataclass(kw_only=True)
class Stream:
    """A completion under way. The last token of `ids` is not computed yet. `lookup` None: decoded without drafts."""

    slot: int
    computed: int
    ids: list[int]
    lookup: Lookup | None


class Decoder:
    """A loaded model and a context of the engine's. Steps have `settings.slots` tokens at most: for each of them the
    context returns a result, and it returns one per slot. Raises `LoadError` and `NothingToDraft`."""

    def __init__(self, settings: LlamaSettings) -> None:
        log = LogCapture()
        self._model = LoadedModel(settings, progress=lambda stage, fraction: None, log=log)
        if not binding.remembers_all_cells(self._model.handle):
            self._model.close()
            raise NothingToDraft("the model keeps a running state, from which tokens cannot be taken back")
        self.compute = Compute(self._model, settings, log=log)
        self._prompts = PromptEncoder(self._model)
        self._batch = binding.Batch(settings.slots)
        banned = [(token, -math.inf) for token in self._model.suppressed_tokens]
        self._greedy = GreedySampler(banned, vocabulary=len(self._model.pieces))

    def encode(self, text: str) -> list[int]:
        """The tokens of a user's message. Raises `MeshError` where the context is too short for it."""
        prompt = ChatPrompt(messages=({"role": "user", "content": text},)) if self._prompts.chats else TextPrompt(text)
        return self._prompts.encode(prompt, created=CREATED)

    def prefill(self, ids: Sequence[int]) -> Prompt:
        """Compute a prompt in a slot of its own, in narrow batches, with which tokens computed one by one agree."""
        slot = self.compute.cells.take(NOTHING)
        for start in range(0, len(ids), NARROW_CHUNK):
            self.compute.extend_one(slot, ids[start : start + NARROW_CHUNK], want_logits=True)
        last = (len(ids) - 1) % NARROW_CHUNK
        return Prompt(ids=ids, slot=slot, first=self._choose(last))

    def generate(self, prompts: Sequence[Prompt], slots: Sequence[int], *, tokens: int, draft: int) -> Generated:
        """Decode a completion of `tokens` tokens at most for each prompt, all at once, in the first of `slots`.

        `draft`: tokens that are tried per step at most. 0: none, and nothing is looked up.
        """
        for prompt, slot in zip(prompts, slots, strict=False):
            self.compute.cells.fork(prompt.slot, slot)
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        streams = [
            Stream(
                slot=slot,
                computed=len(prompt.ids),
                ids=[prompt.first],
                lookup=Lookup([*prompt.ids, prompt.first]) if draft else None,
            )
            for prompt, slot in zip(prompts, slots, strict=False)
        ]
        running, steps, drafted = streams.copy(), 0, 0
        while running:
            drafts = [_draft(stream, min(draft, tokens - len(stream.ids) - 1)) for stream in running]
            chosen = self.step(
                [
                    (stream.slot, stream.computed, [stream.ids[-1], *guess])
                    for stream, guess in zip(running, drafts, strict=True)
                ]
            )
            steps, drafted = steps + len(running), drafted + sum(map(len, drafts))
            for stream, guess, choices in zip(running.copy(), drafts, chosen, strict=True):
                self._take(stream, guess, taken(guess, choices))
                if len(stream.ids) >= tokens or self._model.ends_generation(stream.ids[-1]):
                    self._close_gap(running, stream)
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        completions = tuple(tuple(stream.ids) for stream in streams)
        return Generated(completions=completions, steps=steps, drafted=drafted, wall_s=wall_s, cpu_s=cpu_s)

    def step(self, batch: Sequence[tuple[int, int, Sequence[int]]]) -> list[list[int]]:
        """Compute tokens of several sequences: (slot, tokens in it, tokens behind them). The model's choice after each.

        Raises `DecodeFailed`.
        """
        tokens = [token for _, _, row in batch for token in row]
        positions = [computed + place for _, computed, row in batch for place in range(len(row))]
        self._batch.fill(tokens, positions, [slot for slot, _, row in batch for _ in row], [True] * len(tokens))
        code = binding.decode(self.compute.context, self._batch)
        if code != 0:
            raise DecodeFailed(f"llama.cpp could not compute a batch (code {code})")
        choices = iter([self._choose(row) for row in range(len(tokens))])
        return [list(itertools.islice(choices, len(row))) for _, _, row in batch]

    def cut(self, slot: int, *, keep: int) -> None:
        """Take back all but the first `keep` tokens of a slot."""
        binding.truncate_cells(self.compute.context, slot, keep=keep)

    def _choose(self, row: int) -> int:
        return self._greedy.choose(self.compute.logits(row))

    def _take(self, stream: Stream, guess: Sequence[int], tokens: Sequence[int]) -> None:
        ends = (number for number, token in enumerate(tokens, 1) if self._model.ends_generation(token))
        tokens = tokens[: next(ends, len(tokens))]
        stream.ids.extend(tokens)
        stream.computed += len(tokens)
        if stream.lookup is not None:
            stream.lookup.extend(tokens)
        if len(tokens) <= len(guess):
            self.cut(stream.slot, keep=stream.computed)

    def _close_gap(self, running: list[Stream], ended: Stream) -> None:
        """The last of `running` moves to where `ended` was: llama.cpp needs a pass over the weights for each gap."""
        last = running.pop()
        if last is not ended:
            self.compute.cells.fork(last.slot, ended.slot)
            last.slot = ended.slot
            running[running.index(ended)] = last


def taken(draft: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """What a step brings: the right beginning of `draft`, and the model's own token after it.

    `chosen[n]` is the model's choice after the first `n` tokens of the draft; one more than `draft` has.
    """
    right = 0
    while right < len(draft) and draft[right] == chosen[right]:
        right += 1
    return list(chosen[: right + 1])


def _draft(stream: Stream, most: int) -> list[int]:
    return [] if stream.lookup is None else stream.lookup.draft(most)
