"""Bookkeeping of cells against a memory that remembers who wrote what: whatever happens, in whatever order."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from worker.engines.llama.cache import (
    BLOCK,
    NOTHING,
    CellText,
    PrefixCache,
    Rules,
    Wanted,
    common_prefix,
    reusable,
)
from worker.engines.llama.cells import HASHES_HELD_MAX, CellsLost, KvCells
from worker.engines.llama.layout import NARROW_BEGINNING, WIDE_BATCH, Layout, alike
from worker.engines.llama.starts import Continued, Copied, SlotView, Whole, choose_start

EXACT = Rules(mode=PrefixCache.EXACT, cuts=True, interchangeable=True, alone_below=10**6)
CONTEXT = 24


@dataclass
class FakeMemory:
    """Cells as lists of tokens. `cuts` False: a running state, which cannot go back. `copies`: how many were made."""

    slots: int
    cuts: bool = True
    whole: int = 0
    cells: list[list[int]] = field(default_factory=list)
    copies: int = 0

    def __post_init__(self) -> None:
        self.cells = [[] for _ in range(self.slots + (self.whole > 0))]

    def drop(self, slot: int) -> None:
        self.cells[slot] = []

    def cut(self, slot: int, keep: int) -> bool:
        if self.cuts:
            del self.cells[slot][keep:]
        return self.cuts

    def copy(self, source: int, target: int) -> bool:
        assert source != target
        self.cells[target] = self.cells[source].copy()
        self.copies += 1
        return True

    def swap(self, one: int, other: int) -> bool:
        assert not self.whole
        self.cells[one], self.cells[other] = self.cells[other], self.cells[one]
        return True


class CellsMachine(RuleBasedStateMachine):
    """Sequences come, grow, fork and go; `self.expected` is what each one has given to be computed."""

    taken: Bundle[int] = Bundle("taken")

    @initialize(
        slots=st.integers(1, 5),
        cuts=st.booleans(),
        whole=st.sampled_from([0, 1, 10**4]),
        mode=st.sampled_from(PrefixCache),
    )
    def start(self, slots: int, cuts: bool, whole: int, mode: PrefixCache) -> None:
        self.memory = FakeMemory(slots, cuts, whole)
        self.cells = KvCells(
            self.memory, slots=slots, rules=Rules(mode=mode, cuts=cuts, interchangeable=True, alone_below=10**6)
        )
        self.slot_of: dict[int, int] = {}
        self.given: dict[int, list[int]] = {}
        self.names = 0

    @precondition(lambda self: self.cells.free > 0)
    @rule(target=taken, prompt=st.lists(st.integers(0, 1), min_size=1, max_size=CONTEXT), chunk=st.integers(1, 8))
    def take(self, prompt: list[int], chunk: int) -> int:
        slot = self.cells.take(Wanted(given=prompt, layout=Layout(prompt=len(prompt), chunk=chunk)))
        kept = self.cells.computed(slot)
        assert kept < len(prompt), "the last token is always computed"
        self.names += 1
        self.slot_of[self.names], self.given[self.names] = slot, prompt[:kept]
        self.compute(self.names, prompt[kept:])
        return self.names

    @rule(name=taken, token=st.integers(0, 1))
    def decode(self, name: int, token: int) -> None:
        if name in self.slot_of and len(self.given[name]) < CONTEXT:
            self.compute(name, [token])

    @precondition(lambda self: self.cells.free > 0)
    @rule(target=taken, name=taken)
    def fork(self, name: int) -> int:
        if name not in self.slot_of:
            return name
        slot = self.cells.take(NOTHING)
        assert self.memory.cells[slot] == []
        self.cells.fork(self.slot_of[name], slot)
        self.names += 1
        self.slot_of[self.names], self.given[self.names] = slot, self.given[name].copy()
        return self.names

    @rule(name=consumes(taken), trusted=st.booleans())
    def leave(self, name: int, trusted: bool) -> None:
        if name not in self.slot_of:
            return
        slot = self.slot_of.pop(name)
        if trusted:
            self.cells.release(slot)
        else:
            self.cells.discard(slot)
            assert self.memory.cells[slot] == []

    @rule()
    def close_gaps(self) -> None:
        moved = self.cells.close_gaps()
        self.slot_of = {name: moved.get(slot, slot) for name, slot in self.slot_of.items()}
        busy = sorted(self.slot_of.values())
        assert busy == list(range(min(busy, default=0), min(busy, default=0) + len(busy)))

    @invariant()
    def every_sequence_has_its_own_cells_and_only_them(self) -> None:
        for name, slot in getattr(self, "slot_of", {}).items():
            assert self.memory.cells[slot] == self.given[name]

    @invariant()
    def the_books_say_what_the_memory_holds(self) -> None:
        if hasattr(self, "cells"):
            assert [text.tokens for text in self.cells.texts()] == self.memory.cells
            assert len(set(self.slot_of.values())) == len(self.slot_of)
            assert self.cells.free == self.memory.slots - len(self.slot_of)
            assert all(slot < self.cells.slots for slot in self.slot_of.values())
            assert all(text.sure <= len(text.tokens) <= CONTEXT for text in self.cells.texts())

    def compute(self, name: int, tokens: list[int]) -> None:
        slot = self.slot_of[name]
        self.memory.cells[slot] += tokens
        self.cells.extend(slot, tokens, alone=False)
        self.given[name] += tokens


CellsMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestCells = CellsMachine.TestCase


@given(st.integers(0, 3 * BLOCK), st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_the_common_prefix_is_one_and_cannot_be_longer(shared: int, one: list[int], other: list[int]) -> None:
    one, other = [0] * shared + one, [0] * shared + other
    length = common_prefix(one, other)
    assert one[:length] == other[:length]
    assert length == min(len(one), len(other)) or one[length] != other[length]


def wanted(prompt: int, *, chunk: int, narrow: int = 0, resumed: int = 0) -> Wanted:
    return Wanted(given=list(range(prompt + resumed)), layout=Layout(prompt=prompt, chunk=chunk, narrow=narrow))


def held(tokens: list[int], *, prompt: int, chunk: int, narrow: int = 0) -> CellText:
    return CellText(tokens=tokens, layout=Layout(prompt=prompt, chunk=chunk, narrow=narrow), sure=len(tokens))


layouts = st.builds(
    Layout,
    prompt=st.integers(1, 900),
    chunk=st.sampled_from([32, 48, 64, 100, 512]),
    narrow=st.sampled_from([0, NARROW_BEGINNING]),
)


@given(layouts, layouts)
def test_layouts_are_alike_up_to_the_first_token_of_another_kind(one: Layout, other: Layout) -> None:
    kinds = [[position in layout.wide for position in range(1000)] for layout in (one, other)]
    expected = next((position for position in range(1000) if kinds[0][position] != kinds[1][position]), None)
    assert alike(one, other) == expected


@given(
    computed=layouts,
    asked=layouts,
    more=st.integers(0, 100),
    same=st.integers(0, 1000),
    resumed=st.integers(0, 60),
)
def test_reused_cells_are_those_that_would_be_computed_and_the_rest_keeps_its_kind_of_batch(
    computed: Layout, asked: Layout, more: int, same: int, resumed: int
) -> None:
    length = computed.prompt + more
    text = CellText(
        tokens=[token if token < same else -1 for token in range(length)],
        layout=computed,
        sure=length,
    )
    given = asked.prompt + resumed
    keep = reusable(text, Wanted(given=list(range(given)), layout=asked), EXACT)
    assert 0 <= keep < given
    assert keep <= min(same, length)
    assert [position in computed.wide for position in range(keep)] == [
        position in asked.wide for position in range(keep)
    ]
    if keep in asked.wide:
        assert asked.wide.stop - keep >= WIDE_BATCH
    else:
        # Nothing less could be left to compute.
        reasons = (same, length, given - 1, alike(computed, asked))
        assert keep in reasons


@pytest.mark.parametrize("interchangeable,expected", [(True, 99), (False, 96)])
def test_where_widths_do_not_agree_reuse_ends_with_a_whole_chunk(interchangeable: bool, expected: int) -> None:
    rules = Rules(mode=PrefixCache.EXACT, cuts=True, interchangeable=interchangeable, alone_below=10**6)
    text = held(list(range(100)), prompt=100, chunk=48)
    assert reusable(text, wanted(100, chunk=48), rules) == expected
    other = reusable(text, wanted(100, chunk=32), rules)
    assert other == (99 if interchangeable else 0)
    # What an answer added is no chunk of a prompt.
    assert reusable(held(list(range(100)), prompt=50, chunk=48), wanted(200, chunk=48), rules) == (
        100 if interchangeable else 48
    )


@pytest.mark.parametrize("common,expected", [(500, 500), (536, 536), (570, 536), (599, 536)])
def test_a_wide_batch_is_left_to_compute_of_a_wide_prompt(common: int, expected: int) -> None:
    text = held([*range(common), *[-1] * 100], prompt=common + 100, chunk=64)
    assert reusable(text, wanted(600, chunk=512), EXACT) == expected


def test_an_answer_is_reused_where_the_next_prompt_is_narrow() -> None:
    short = held(list(range(200)), prompt=100, chunk=64, narrow=256)
    assert reusable(short, wanted(220, chunk=64, narrow=256), EXACT) == 200
    assert reusable(short, wanted(400, chunk=64, narrow=256), EXACT) == 200
    assert reusable(short, wanted(400, chunk=64), EXACT) == 0
    long = held(list(range(450)), prompt=400, chunk=64, narrow=256)
    assert reusable(long, wanted(600, chunk=64, narrow=256), EXACT) == 400


def test_a_memory_that_cannot_go_back_continues_whole_texts_only() -> None:
    rules = Rules(mode=PrefixCache.EXACT, cuts=False, interchangeable=True, alone_below=10**6)
    text = held(list(range(10)), prompt=10, chunk=48)
    assert reusable(text, wanted(20, chunk=48), rules) == 10
    assert reusable(text, wanted(10, chunk=48), rules) == 0
    assert reusable(held([0, 1, 9], prompt=3, chunk=48), wanted(20, chunk=48), rules) == 0


@pytest.mark.parametrize("alone_below,expected", [(10**6, 150), (150, 149), (60, 149), (0, 149)])
def test_no_chunk_is_left_with_a_single_token_where_that_matters(alone_below: int, expected: int) -> None:
    rules = Rules(mode=PrefixCache.EXACT, cuts=True, interchangeable=True, alone_below=alone_below)
    text = held(list(range(150)), prompt=150, chunk=48)
    assert reusable(text, wanted(151, chunk=48), rules) == expected
    # Before the wide part, too; a single resumed token is alone in any case.
    assert reusable(held(list(range(255)), prompt=255, chunk=48), wanted(400, chunk=64, narrow=256), rules) == (
        255 if alone_below > 255 else 254
    )
    assert reusable(text, wanted(150, chunk=48, resumed=1), rules) == 150
    assert reusable(held([0], prompt=1, chunk=48), wanted(2, chunk=48), rules) == (1 if alone_below > 1 else 0)


def test_what_follows_a_token_computed_alone_is_not_reused_where_that_matters() -> None:
    cells = KvCells(
        FakeMemory(1),
        slots=1,
        rules=Rules(mode=PrefixCache.EXACT, cuts=True, interchangeable=True, alone_below=4),
    )
    slot = cells.take(Wanted(given=[0] * 3, layout=Layout(prompt=3, chunk=48)))
    for tokens, alone in (([0] * 3, False), ([1], True), ([2], False), ([3], True), ([4], False)):
        cells.extend(slot, tokens, alone=alone)
    assert cells.texts()[slot].sure == 5


def test_any_agreement_is_taken_where_that_is_wanted_and_none_where_not() -> None:
    text = held(list(range(400)), prompt=400, chunk=64)
    slots = [SlotView(number=0, text=text, busy=False, used_at=1)]
    for mode, keep in ((PrefixCache.ALL, 350), (PrefixCache.EXACT, 320), (PrefixCache.OFF, 0)):
        start = choose_start(
            Wanted(given=[*range(350), *[-1] * 60], layout=Layout(prompt=320, chunk=128)),
            slots,
            Rules(mode=mode, cuts=True, interchangeable=True, alone_below=10**6),
        )
        assert start == Continued(slot=0, keep=keep)


def view(number: int, text: list[int], *, used_at: int, busy: bool = False) -> SlotView:
    held_text = held(text, prompt=len(text), chunk=48) if text else CellText()
    return SlotView(number=number, text=held_text, busy=busy, used_at=used_at)


def start_of(prompt: list[int], slots: list[SlotView]) -> Continued | Copied:
    return choose_start(Wanted(given=prompt, layout=Layout(prompt=len(prompt), chunk=48)), slots, EXACT)


HEADER = [7] * 5
ONE, OTHER, THIRD = ([*HEADER, *[number] * 300] for number in (1, 2, 3))


def test_the_oldest_text_is_given_up_and_an_empty_slot_before_it() -> None:
    assert start_of(THIRD, [view(0, ONE, used_at=5), view(1, OTHER, used_at=3)]) == Continued(slot=1, keep=5)
    assert start_of(THIRD, [view(0, ONE, used_at=5), view(1, [], used_at=9)]) == Continued(slot=1, keep=0)
    assert start_of(THIRD, [view(0, ONE, used_at=5), view(1, OTHER, used_at=3, busy=True)]) == Continued(slot=0, keep=5)


def test_a_conversation_goes_on_where_it_is_and_a_branch_of_it_leaves_it_there() -> None:
    slots = [view(0, ONE, used_at=5), view(1, [], used_at=1)]
    assert start_of([*ONE, 9, 9], slots) == Continued(slot=0, keep=len(ONE))
    branch = [*ONE[:200], *[9] * 100]
    assert start_of(branch, slots) == Copied(source=0, keep=200, victim=1)
    assert start_of(branch, slots[:1]) == Continued(slot=0, keep=200)


def test_cells_of_a_running_sequence_are_copied_where_that_saves_more_than_it_costs() -> None:
    def slots(*, common: int) -> list[SlotView]:
        return [view(0, [*ONE[:common], *[9] * 100], used_at=5, busy=True), view(1, [], used_at=1)]

    assert start_of(ONE, slots(common=100)) == Copied(source=0, keep=100, victim=1)
    assert start_of(ONE, slots(common=10)) == Continued(slot=1, keep=0)


@given(st.integers(2, 6), st.lists(st.integers(0, 5), min_size=1, max_size=20), st.integers(0, 30))
def test_as_many_conversations_as_slots_are_all_remembered(slots: int, turns: list[int], header: int) -> None:
    memory = FakeMemory(slots)
    cells = KvCells(memory, slots=slots, rules=EXACT)
    texts = {number: [*[7] * header, *[100 + number] * 60] for number in range(slots)}
    told: dict[int, int] = {}
    for turn, number in enumerate(turns):
        if number < slots:
            assert run_one(cells, memory, texts[number]) >= told.get(number, 0)
            told[number] = len(texts[number])
            texts[number] += [1000 + turn] * 10


def run_one(cells: KvCells, memory: FakeMemory, tokens: list[int]) -> int:
    """A sequence that comes, computes, and goes; how much it could reuse."""
    slot = cells.take(Wanted(given=[*tokens, 0], layout=Layout(prompt=len(tokens) + 1, chunk=8)))
    kept = cells.computed(slot)
    memory.cells[slot] += tokens[kept:]
    cells.extend(slot, tokens[kept:], alone=False)
    cells.release(slot)
    return kept


def running(cells: KvCells, memory: FakeMemory, tokens: list[int]) -> int:
    """The slot of a sequence that has computed `tokens`."""
    slot = cells.take(Wanted(given=[*tokens, 0], layout=Layout(prompt=len(tokens) + 1, chunk=8)))
    kept = cells.computed(slot)
    memory.cells[slot] += tokens[kept:]
    cells.extend(slot, tokens[kept:], alone=False)
    return slot


def of_whole_slots(slots: int, *, running_texts: int, length: int = 1000) -> tuple[KvCells, FakeMemory]:
    """Cells whose copies move slots of 8,192 cells, and so many sequences in them; each computed `length` tokens."""
    memory = FakeMemory(slots, whole=8192)
    cells = KvCells(memory, slots=slots, rules=EXACT)
    for number in range(running_texts):
        assert running(cells, memory, [100 + number] * length) == number
    assert memory.copies == 0
    return cells, memory


@pytest.mark.parametrize("ended", [0, 3])
def test_where_the_first_or_the_last_of_a_row_ends_nothing_moves(ended: int) -> None:
    cells, memory = of_whole_slots(4, running_texts=4)
    cells.release(ended)
    assert cells.close_gaps() == {}
    # The next one begins beside the others.
    assert running(cells, memory, [7] * 20) == ended
    assert cells.close_gaps() == {}
    # What has ended moved to the place more, as it is worth a copy.
    assert memory.copies == 1
    assert [100 + ended] * 1000 in memory.cells


def test_a_sequence_begins_beside_those_that_run_and_not_in_the_lowest_slot() -> None:
    cells, memory = of_whole_slots(4, running_texts=4)
    cells.release(0)
    cells.release(1)
    assert running(cells, memory, [7] * 20) == 1
    assert cells.close_gaps() == {}
    cells.release(2)
    assert running(cells, memory, [8] * 20) == 2, "between them, before any other"


@pytest.mark.parametrize("length,copies,kept", [(1000, 2, True), (100, 1, False)])
def test_a_gap_is_closed_with_two_copies_of_whole_slots_and_with_one_where_the_text_is_short(
    length: int, copies: int, kept: bool
) -> None:
    cells, memory = of_whole_slots(4, running_texts=4, length=length)
    cells.release(1)
    assert cells.close_gaps() == {3: 1}
    assert memory.copies == copies
    assert memory.cells[1] == [103] * length
    assert ([101] * length in memory.cells) == kept


def test_sequences_without_cells_move_without_a_copy() -> None:
    cells, memory = of_whole_slots(4, running_texts=0)
    for _ in range(4):
        cells.take(NOTHING)
    cells.discard(1)
    assert cells.close_gaps() == {3: 1}
    assert memory.copies == 0


def test_nothing_is_copied_out_of_an_empty_slot_to_begin_there() -> None:
    cells, memory = of_whole_slots(2, running_texts=1)
    cells.discard(0)
    assert running(cells, memory, [7] * 20) == 0
    assert memory.copies == 0


def test_a_copy_of_a_whole_slot_has_its_price_however_short_the_text() -> None:
    slots = [view(0, ONE, used_at=5, busy=True), view(1, [], used_at=1), view(2, [], used_at=1)]
    wanted = Wanted(given=[*ONE[:120], *[9] * 50], layout=Layout(prompt=170, chunk=48))
    for cells, start in ((0, Copied(source=0, keep=120, victim=1)), (8192, Continued(slot=1, keep=0))):
        whole = Whole(cells=cells, target=1) if cells else None
        assert choose_start(wanted, slots, EXACT, whole) == start


def test_a_new_text_goes_where_it_begins_rather_than_to_an_older_one_a_whole_copy_away() -> None:
    memory = FakeMemory(2, whole=8192)
    cells = KvCells(memory, slots=2, rules=EXACT)
    slots = [view(0, [1] * 100, used_at=5), view(1, [2] * 100, used_at=3), view(2, [3] * 100, used_at=1)]
    assert start_of([9] * 10, slots) == Continued(slot=2, keep=0)
    for number in range(4):
        run_one(cells, memory, [100 + number] * 100)
    assert memory.copies == 0


def test_texts_are_evicted_in_the_order_of_their_last_use() -> None:
    memory = FakeMemory(3)
    cells = KvCells(memory, slots=3, rules=EXACT)
    texts = [[number] * 5 for number in range(1, 5)]
    for text in texts[:3]:
        run_one(cells, memory, text)
    assert run_one(cells, memory, texts[0]) == 5
    run_one(cells, memory, texts[3])
    assert sorted(cells_ for cells_ in memory.cells) == [texts[0], texts[2], texts[3]]


def test_hashes_of_held_texts_are_told_the_newest_first_and_bounded() -> None:
    memory = FakeMemory(3)
    cells = KvCells(memory, slots=3, rules=EXACT)
    for number in range(3):
        tokens = [number] * 4
        slot = cells.take(Wanted(given=[*tokens, 9], layout=Layout(prompt=5, chunk=8)))
        memory.cells[slot] += tokens
        cells.extend(slot, tokens, alone=False)
        cells.name(slot, ("shared", *(f"{number}-{block}" for block in range(60))))
        cells.release(slot)
    held = cells.held()
    assert len(held) == HASHES_HELD_MAX
    assert held[:2] == ("shared", "2-0")
    assert held.count("shared") == 1
    cells.empty_all()
    assert cells.held() == ()


def test_cells_that_cannot_be_moved_are_an_error() -> None:
    memory = FakeMemory(2)
    cells = KvCells(memory, slots=2, rules=EXACT)
    first, second = (cells.take(Wanted(given=[1, 2], layout=Layout(prompt=2, chunk=8))) for _ in range(2))
    memory.copy = lambda source, target: False  # type: ignore[method-assign]
    with pytest.raises(CellsLost):
        cells.fork(first, second)
