"""Continuous batching, read top-down: submit -> admit -> plan -> compute -> sample -> events."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator, Sequence

from schemas.errors import ErrorCode, ErrorInfo
from worker.engines.base import Accepted, Errored, Event, Held, Prefilled
from worker.engines.llama.cache import NOTHING
from worker.engines.llama.compute import Compute, DecodeFailed
from worker.engines.llama.drawing import Drawing, append_tokens
from worker.engines.llama.model import LoadedModel
from worker.engines.llama.pace import Pace
from worker.engines.llama.plan import Chunk, plan_step
from worker.engines.llama.request import Prepared
from worker.engines.llama.running import Running, SlotSequence
from worker.engines.llama.turns import Pending, Turns

logger = logging.getLogger(__name__)


class Scheduler:
    """Runs valid requests. A request leaves once: finished, failed, or aborted."""

    def __init__(
        self, model: LoadedModel, compute: Compute, *, resume_chunk: int, prompt_lookup: int, pace: Pace
    ) -> None:
        self.pace = pace
        self._compute = compute
        self._cells = compute.cells
        self._drawing = Drawing(model, compute)
        self._resume_chunk = resume_chunk
        self._prompt_lookup = prompt_lookup
        self._arrivals = itertools.count()
        self._waiting: dict[int, Prepared] = {}  # by arrival
        self._turns = Turns()
        self._sequences: list[SlotSequence] = []  # in order of admission
        self._wide: list[Running] = []  # with choices that had no slot yet
        self._began_to_decode = False  # the last step ended with a choice's first tokens, or its end without any
        self._held: tuple[str, ...] = ()

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._sequences or self._wide)

    def submit(self, request: Prepared) -> None:
        """Queue a request."""
        self._waiting[next(self._arrivals)] = request

    def abort(self, key: int) -> None:
        """Forget a request at once; its slots are free when this returns. Unknown keys are ignored."""
        for arrival in [arrival for arrival, request in self._waiting.items() if request.key == key]:
            self._waiting.pop(arrival).close()
        for running in [running for running in self._running() if running.request.key == key]:
            self._remove(running, trust_cells=True)

    def step(self) -> list[Event]:
        """Compute one step: at most one prefill chunk, then the next token of every decoding sequence; of one that
        decodes alone, also those behind it that were guessed (see `lookup`).

        The chunk goes first and in a batch of its own: its results are those it would have without neighbours, and
        the decoded tokens, which people watch, leave right after they were drawn. So do the first ones of a prompt:
        where a chunk brings them, the others' tokens come with the next step, which has no chunk.
        """
        events: list[Event] = []
        self._begin_later()
        decodes_only = self._began_to_decode and any(self._left(sequence) == 0 for sequence in self._sequences)
        turn = None if decodes_only else self._take_turn(events)
        self._close_gaps()
        widths = self.pace.widths() if self._cells.rules.interchangeable else None
        progress = [each.progress(self._cells, resume_chunk=self._resume_chunk) for each in self._sequences]
        others_wait = bool(self._waiting or self._wide)
        plan = plan_step(progress, widths, turn=None if turn is None else turn.slot, others_wait=others_wait)
        by_slot = {sequence.slot: sequence for sequence in self._sequences}
        self._began_to_decode = False
        if plan.chunk is not None:
            self._prefill(by_slot[plan.chunk.slot], plan.chunk, events)
        # A request whose prefill failed has left, with choices that may have been decoding.
        decoding = [by_slot[slot] for slot in plan.decodes if by_slot[slot] in self._sequences]
        if decoding and not self._began_to_decode:
            self._decode(decoding, events)
        self._tell_held(events)
        return events

    def close(self) -> None:
        """Free all requests."""
        while self._waiting:
            self._waiting.popitem()[1].close()
        for running in self._running():
            self._remove(running, trust_cells=True)

    def _running(self) -> list[Running]:
        """Requests that were admitted and have not left."""
        return list(dict.fromkeys([*(sequence.running for sequence in self._sequences), *self._wide]))

    # --- admission ----------------------------------------------------------------------------------------------------

    def _take_turn(self, events: list[Event]) -> SlotSequence | None:
        """The sequence whose prompt is computed next, if any. A request whose turn has come gets its slots.

        Not before: by then, prompts that arrived together with it are cells to reuse.
        """
        while True:
            # Of a request's choices, the first one that has something to compute.
            begun = {each.running.arrival: each for each in reversed(self._sequences) if self._left(each) > 0}
            pending = [
                *(Pending(arrival=arrival, left=self._left(each), begun=True) for arrival, each in begun.items()),
                *self._admissible(),
            ]
            if not pending:
                return None
            arrival = self._turns.choose(pending).arrival
            if arrival in begun:
                return begun[arrival]
            self._begin(arrival, self._waiting.pop(arrival), events)

    def _admissible(self) -> Iterator[Pending]:
        """Waiting requests for which there are slots: one for each choice that goes on, or all that there are, and
        nobody overtakes there."""
        free = self._cells.free
        for arrival, request in self._waiting.items():
            wanted = request.wanted(request.active[: self._cells.slots])
            free -= min(len(request.active), self._cells.slots)
            if free < 0:
                return
            left = 0 if wanted is None else len(wanted.given) - self._cells.reusable(wanted)
            yield Pending(arrival=arrival, left=left, begun=False)

    def _begin(self, arrival: int, request: Prepared, events: list[Event]) -> None:
        running = Running(
            request=request,
            arrival=arrival,
            admitted_at=time.monotonic(),
            reasons=[choice.completion.replayed.finish for choice in request.choices],
        )
        first, running.later = request.active[: self._cells.slots], list(request.active[self._cells.slots :])
        if running.later:
            self._wide.append(running)
        wanted = request.wanted(first)
        if wanted is not None:
            leader, *others = first
            slot = self._cells.take(wanted, hashes=request.prefix_hashes)
            running.cached = min(self._cells.computed(slot), len(request.prompt))
            self._sequences.append(SlotSequence(running=running, choice=leader, slot=slot))
            running.followers += [
                SlotSequence(running=running, choice=choice, slot=self._cells.take(NOTHING)) for choice in others
            ]
        events.append(
            Accepted(
                request.key,
                prompt_tokens=len(request.prompt),
                cached_tokens=running.cached,
                prefill_chunk=request.layout.chunk,
            )
        )
        for choice in request.choices:
            append_tokens(events, request.key, choice, choice.completion.replayed)
        if wanted is None:
            self._finish(running, events, now=running.admitted_at)

    def _begin_later(self) -> None:
        """Give slots that became free to choices that had none, before any request that waits: theirs came earlier."""
        for running in self._wide:
            while running.later and self._cells.free:
                choice = running.later.pop(0)
                wanted = running.request.wanted([choice])
                assert wanted is not None, "it is a choice that goes on"
                slot = self._cells.take(wanted, hashes=running.request.prefix_hashes)
                self._sequences.append(SlotSequence(running=running, choice=choice, slot=slot))
        self._wide = [running for running in self._wide if running.later]

    def _close_gaps(self) -> None:
        moved = self._cells.close_gaps()
        if moved:
            followers = [follower for each in self._sequences for follower in each.running.followers]
            for sequence in [*self._sequences, *followers]:
                sequence.slot = moved.get(sequence.slot, sequence.slot)

    # --- computing ----------------------------------------------------------------------------------------------------

    def _left(self, sequence: SlotSequence) -> int:
        """Tokens to compute before the sequence's first new one is drawn."""
        given = len(sequence.running.request.prompt) + len(sequence.choice.resumed)
        return max(0, given - self._cells.computed(sequence.slot))

    def _prefill(self, sequence: SlotSequence, chunk: Chunk, events: list[Event]) -> None:
        """Compute a chunk, and draw the first tokens of those choices of which it was the last one."""
        request, prompt_end = sequence.running.request, len(sequence.running.request.prompt)
        begin = sequence.begin_after(chunk)
        try:
            self._compute_chunk(sequence, chunk, draw=bool(begin))
        except DecodeFailed as error:
            self._fail([sequence.running], error, events)
            return
        if chunk.end == prompt_end:
            self._share_prompt(sequence)
        if (telling := request.telling) is not None:
            events += telling.tell(request.key, start=chunk.start, end=chunk.end, logits=self._compute.logits)
        if not chunk.last:
            events.append(Prefilled(request.key, tokens=min(chunk.end, prompt_end)))
        self._began_to_decode = bool(begin)
        for each in begin:
            if each.choice.finished or not self._drawing.draw(each, row=len(chunk) - 1, events=events):
                self._leave(each, events)

    def _compute_chunk(self, sequence: SlotSequence, chunk: Chunk, *, draw: bool) -> None:
        """Compute a chunk, with the logits of its last token to `draw` from it, and with those of all that are told.
        Raises `DecodeFailed`."""
        running, rows = sequence.running, int(draw)
        if (telling := running.request.telling) is not None:
            rows = max(rows, telling.rows(start=chunk.start, end=chunk.end))
        seconds = self._compute.extend_one(sequence.slot, sequence.given(chunk), want_logits=rows)
        if rows <= 1:
            # A chunk with more takes longer, and says nothing of the next one.
            self.pace.note(len(chunk), seconds=seconds)
        self._turns.note(running.arrival, tokens=len(chunk))

    def _share_prompt(self, sequence: SlotSequence) -> None:
        """The prompt is computed: its cells get their name, and the request's other choices a copy of them."""
        running = sequence.running
        self._cells.name(sequence.slot, running.request.prefix_hashes)
        followers, running.followers = running.followers, []
        for follower in followers:
            self._cells.fork(sequence.slot, follower.slot)
            self._sequences.append(follower)

    def _decode(self, sequences: Sequence[SlotSequence], events: list[Event]) -> None:
        last_tokens = [sequence.choice.completion.ids[-1] for sequence in sequences]
        try:
            if len(sequences) == 1 and (guess := sequences[0].guess(self._prompt_lookup)):
                self._decode_along(sequences[0], [*last_tokens, *guess], events)
                return
            self._compute.extend_each([sequence.slot for sequence in sequences], last_tokens)
        except DecodeFailed as error:
            self._fail(list(dict.fromkeys(sequence.running for sequence in sequences)), error, events)
            return
        for row, sequence in enumerate(sequences):
            if not self._drawing.draw(sequence, row=row, events=events):
                self._leave(sequence, events)

    def _decode_along(self, sequence: SlotSequence, tokens: list[int], events: list[Event]) -> None:
        """Compute the last of a sequence's `tokens` and those guessed behind it; wrong ones are taken back.

        Where the sequence ends they stay: a text to reuse like any other. Raises `DecodeFailed`.
        """
        self._compute.extend_one(sequence.slot, tokens, want_logits=len(tokens))
        if self._drawing.draw_along(sequence, tokens[1:], events=events):
            drawn = len(sequence.running.request.prompt) + len(sequence.choice.completion.ids)
            self._cells.take_back(sequence.slot, keep=drawn - 1)
        else:
            self._leave(sequence, events)

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _leave(self, sequence: SlotSequence, events: list[Event]) -> None:
        """A choice has ended."""
        self._sequences.remove(sequence)
        self._cells.release(sequence.slot)
        self._finish(sequence.running, events, now=time.monotonic())

    def _finish(self, running: Running, events: list[Event], *, now: float) -> None:
        """Report the request's end, if all of its choices have ended."""
        finished = running.finished(now=now)
        if finished is not None:
            events.append(finished)
            running.request.close()

    def _fail(self, requests: Sequence[Running], error: DecodeFailed, events: list[Event]) -> None:
        logger.error("%s: %d requests failed", error, len(requests))
        for running in requests:
            info = ErrorInfo(code=ErrorCode.ENGINE_ERROR, message=str(error))
            events.append(Errored(running.request.key, info))
            self._remove(running, trust_cells=False)

    def _remove(self, running: Running, *, trust_cells: bool) -> None:
        for sequence in [each for each in self._sequences if each.running is running] + running.followers:
            if trust_cells:
                self._cells.release(sequence.slot)
            else:
                self._cells.discard(sequence.slot)
        self._sequences = [each for each in self._sequences if each.running is not running]
        self._wide = [each for each in self._wide if each is not running]
        running.request.close()

    def _tell_held(self, events: list[Event]) -> None:
        held = self._cells.held()
        if held != self._held:
            self._held = held
            events.append(Held(held))
