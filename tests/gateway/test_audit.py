"""What one attempt that is found says of the others: never that one is there which went with the stream before."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from bus.work_queue import Receipt
from gateway.audit import Audit
from schemas.bands import BATCH, STANDARD, Band

FRESH_S = 1.0
LOOK_EVERY_S = 30.0


def receipt(number: int, *, band: Band = STANDARD, attempt: int = 1) -> Receipt:
    return Receipt(band=band, seq=number, message_id=f"job-{number}.{attempt}")


def audit() -> Audit:
    return Audit(fresh_s=FRESH_S, look_every_s=LOOK_EVERY_S)


def test_one_that_is_found_speaks_for_all_that_came_after_it() -> None:
    watched = audit()
    for number in range(10):
        watched.watch(receipt(number), asked_at=float(number), held_at=number + 0.5)
    assert not watched.knows(receipt(0), 20.0), "nothing was looked up yet"
    watched.found(receipt(0), asked_at=20.0)
    assert all(watched.knows(receipt(number), 20.5) for number in range(10))
    assert not watched.knows(receipt(5), 21.5), "for a while"
    watched.found(receipt(9), asked_at=22.0)
    assert all(watched.knows(receipt(number), 22.0) for number in range(10)), "and whoever is found goes on from there"


def test_one_that_is_found_says_nothing_of_what_was_there_before_it() -> None:
    watched = audit()
    watched.watch(receipt(1), asked_at=0.0, held_at=0.5)
    watched.watch(receipt(2), asked_at=5.0, held_at=5.5)
    watched.found(receipt(2), asked_at=6.0)
    assert not watched.knows(receipt(1), 6.0), "the stream may have come back empty in between"
    assert watched.knows(receipt(2), 6.0)


def test_publications_that_overlap_do_not_speak_for_each_other_until_both_were_seen() -> None:
    watched = audit()
    watched.watch(receipt(1), asked_at=0.0, held_at=3.0)
    watched.watch(receipt(2), asked_at=1.0, held_at=2.0)
    watched.found(receipt(1), asked_at=4.0)
    assert not watched.knows(receipt(2), 4.0)
    watched.found(receipt(2), asked_at=4.0)
    watched.found(receipt(1), asked_at=5.0)
    assert watched.knows(receipt(2), 5.0)


def test_streams_of_other_bands_come_and_go_by_themselves() -> None:
    watched = audit()
    watched.watch(receipt(1), asked_at=0.0, held_at=0.1)
    watched.watch(receipt(2, band=BATCH), asked_at=1.0, held_at=1.1)
    watched.found(receipt(1), asked_at=2.0)
    assert watched.knows(receipt(1), 2.0)
    assert not watched.knows(receipt(2, band=BATCH), 2.0)


def test_each_attempt_is_looked_at_itself_now_and_then_and_when_another_was_missing() -> None:
    watched = audit()
    for number in (1, 2, 3):
        watched.watch(receipt(number), asked_at=0.0, held_at=0.0)
    watched.found(receipt(1), asked_at=29.5)
    assert watched.knows(receipt(2), 29.9)
    assert not watched.knows(receipt(2), 30.0)
    watched.found(receipt(2), asked_at=30.0)
    watched.missed(receipt(3), 30.2)
    assert [watched.knows(receipt(number), 30.3) for number in (1, 2, 3)] == [False] * 3
    watched.found(receipt(2), asked_at=30.4)
    assert [watched.knows(receipt(number), 30.5) for number in (1, 2, 3)] == [False, True, False]


def test_after_our_own_absence_each_is_looked_at_itself() -> None:
    watched = audit()
    for number in (1, 2):
        watched.watch(receipt(number), asked_at=0.0, held_at=0.0)
    watched.doubt(5.0)
    watched.found(receipt(1), asked_at=6.0)
    assert (watched.knows(receipt(1), 6.0), watched.knows(receipt(2), 6.0)) == (True, False)


def test_while_a_look_is_under_way_the_last_one_counts_for_longer() -> None:
    watched = audit()
    for number in (1, 2):
        watched.watch(receipt(number), asked_at=0.0, held_at=0.0)
    watched.found(receipt(1), asked_at=1.0)
    assert not watched.knows(receipt(1), 2.1)
    watched.asks(receipt(1), 2.1)
    assert watched.knows(receipt(2), 2.2)
    assert not watched.knows(receipt(2), 3.1)


def test_what_is_claimed_or_replaced_is_not_spoken_for_and_a_look_that_comes_too_late_raises_no_doubt() -> None:
    watched = audit()
    for number in (1, 2, 3):
        watched.watch(receipt(number), asked_at=0.0, held_at=0.0)
    watched.found(receipt(1), asked_at=1.0)
    assert watched.forget("job-2") == receipt(2)
    assert watched.forget("job-2") is None
    watched.watch(receipt(3, attempt=2), asked_at=1.0, held_at=1.0)
    for gone in (receipt(2), receipt(3)):
        assert not watched.knows(gone, 1.0)
        watched.missed(gone, 1.1)
    assert watched.knows(receipt(1), 1.2)
    assert len(watched) == 2


@dataclass
class Fate:
    """An attempt, its publication's three moments, and what became of it."""

    receipt: Receipt
    asked_at: float
    stored: bool = False
    acked: bool = False
    wiped_at: float = float("inf")
    dropped_at: float = float("inf")

    @property
    def there(self) -> bool:
        return self.stored and self.wiped_at == self.dropped_at == float("inf")


@dataclass
class Look:
    """A look on its way: there is an answer once the stream was read."""

    fate: Fate
    asked_at: float
    answer: list[bool] = field(default_factory=list)


class Stream(RuleBasedStateMachine):
    """A stream that is emptied at any moment, publications and looks that overlap in any way, and what is believed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.audit = audit()
        self.fates: list[Fate] = []
        self.looks: list[Look] = []

    @rule(tenths=st.integers(1, 12))
    def time_passes(self, tenths: int) -> None:
        self.now += tenths / 10

    @rule()
    def publish(self) -> None:
        self.fates.append(Fate(receipt(len(self.fates)), self.now))

    @precondition(lambda self: any(not fate.stored for fate in self.fates))
    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from([fate for fate in self.fates if not fate.stored])).stored = True

    @precondition(lambda self: any(fate.stored and not fate.acked for fate in self.fates))
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        fate = data.draw(st.sampled_from([fate for fate in self.fates if fate.stored and not fate.acked]))
        fate.acked = True
        self.audit.watch(fate.receipt, asked_at=fate.asked_at, held_at=self.now)

    @rule()
    def wipe(self) -> None:
        for fate in self.fates:
            if fate.there:
                fate.wiped_at = self.now

    @precondition(lambda self: any(fate.there for fate in self.fates))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from([fate for fate in self.fates if fate.there])).dropped_at = self.now

    @precondition(lambda self: any(fate.acked for fate in self.fates))
    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        fate = data.draw(st.sampled_from([fate for fate in self.fates if fate.acked]))
        self.audit.asks(fate.receipt, self.now)
        self.looks.append(Look(fate, self.now))

    @precondition(lambda self: self.looks)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        """The stream is read the first time, the answer arrives the second time."""
        look = data.draw(st.sampled_from(self.looks))
        if not look.answer:
            look.answer.append(look.fate.there)
            return
        self.looks.remove(look)
        if look.answer[0]:
            self.audit.found(look.fate.receipt, asked_at=look.asked_at)
        else:
            self.audit.missed(look.fate.receipt, self.now)

    @rule()
    def nobody_is_believed_to_be_there_for_long(self) -> None:
        for fate in self.fates:
            if fate.acked and self.audit.knows(fate.receipt, self.now):
                assert fate.wiped_at >= self.now - 2 * FRESH_S
                assert fate.dropped_at >= self.now - LOOK_EVERY_S


TestStream = Stream.TestCase
TestStream.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
