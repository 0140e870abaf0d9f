"""What follows a loss: the next attempt, or the end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.continuation import Continue, GiveUp, LossCause, LossRecord, after_loss
from schemas.errors import ErrorCode

Decision = Continue | GiveUp

CRASH = LossCause.ENGINE_CRASHED
HANDED_BACK = LossCause.HANDED_BACK
ORDINARY = [cause for cause in LossCause if cause not in (CRASH, HANDED_BACK)]


def decide(record: LossRecord, cause: LossCause, *, new_tokens: bool = False) -> Decision:
    return after_loss(
        record,
        cause,
        said="its queue is full (engine.waiting_max)",
        new_tokens=new_tokens,
        losses_in_a_row_max=3,
        handed_back_in_a_row_max=16,
        engine_crashes_max=2,
        engine_crashes_in_all_max=8,
    )


def replay(*losses: tuple[LossCause, bool]) -> list[Decision]:
    """The decisions on these losses, up to the first end."""
    record, decisions = LossRecord(), []
    for cause, new_tokens in losses:
        decision = decide(record, cause, new_tokens=new_tokens)
        decisions.append(decision)
        if isinstance(decision, GiveUp):
            break
        record = decision.record
    return decisions


OWN_CODES = {
    LossCause.ENGINE_ERROR: ErrorCode.ENGINE_ERROR,
    LossCause.ENGINE_OVERLOADED: ErrorCode.OVERLOADED,
}


@pytest.mark.parametrize("cause", ORDINARY)
def test_the_third_loss_in_a_row_ends_the_job_and_names_its_cause(cause: LossCause) -> None:
    *first, last = replay(*[(cause, False)] * 5)
    assert [type(decision) for decision in first] == [Continue, Continue]
    assert isinstance(last, GiveUp)
    assert last.error.code is OWN_CODES.get(cause, ErrorCode.WORKER_LOST)
    assert "3 times in a row (losses_in_a_row_max)" in last.error.message
    assert cause in OWN_CODES or cause in last.error.message
    assert ("(engine.waiting_max)" in last.error.message) == (cause is LossCause.ENGINE_OVERLOADED)


@pytest.mark.parametrize("cause", OWN_CODES)
@pytest.mark.parametrize("handed_back", [0, 2])
def test_an_end_is_the_engines_only_if_every_loss_in_a_row_was(cause: LossCause, handed_back: int) -> None:
    mixed = replay((LossCause.STALLED, False), (cause, False), (cause, False))[-1]
    assert isinstance(mixed, GiveUp)
    assert mixed.error.code is ErrorCode.WORKER_LOST
    before_the_row = replay((LossCause.STALLED, False), (cause, True), (cause, False), (cause, False))[-1]
    beside_it = replay((cause, False), *[(HANDED_BACK, False)] * handed_back, (cause, False), (cause, False))[-1]
    for last in (before_the_row, beside_it):
        assert isinstance(last, GiveUp)
        assert last.error.code is OWN_CODES[cause]


def test_a_loss_after_new_tokens_begins_a_new_row() -> None:
    stalled = LossCause.STALLED
    decisions = replay((stalled, False), (stalled, False), (stalled, True), (stalled, False), (stalled, False))
    assert [type(decision) for decision in decisions] == [Continue] * 4 + [GiveUp]


def test_a_stream_that_moves_on_survives_any_number_of_losses() -> None:
    decisions = replay(*[(LossCause.WORKER_GONE, True)] * 100)
    assert len(decisions) == 100
    assert all(isinstance(decision, Continue) for decision in decisions)


@pytest.mark.parametrize("between", [[], [(LossCause.STALLED, False)], [(HANDED_BACK, False)] * 3])
@pytest.mark.parametrize("far", [False, True])
def test_the_second_crash_at_the_same_place_convicts(between: list[tuple[LossCause, bool]], far: bool) -> None:
    decisions = replay((CRASH, far), *between, (CRASH, False))
    last = decisions[-1]
    assert len(decisions) == len(between) + 2
    assert isinstance(last, GiveUp)
    assert last.error.code is ErrorCode.ENGINE_CRASHED
    assert last.error.traits.status == 500
    assert "(engine_crashes_max)" in last.error.message


@pytest.mark.parametrize("cause", [CRASH, LossCause.STALLED, HANDED_BACK])
def test_who_gets_past_the_place_of_a_crash_is_no_suspect_any_more(cause: LossCause) -> None:
    *_, last = replay((CRASH, True), (cause, True))
    assert isinstance(last, Continue)
    assert last.record.crashes == (cause is CRASH)


def test_crashes_at_ever_other_places_come_to_an_end() -> None:
    *first, last = replay(*[(CRASH, True)] * 100)
    assert len(first) == 7
    assert isinstance(last, GiveUp)
    assert last.error.code is ErrorCode.ENGINE_CRASHED
    assert "8 times while running this request (engine_crashes_in_all_max)" in last.error.message


def test_a_crash_counts_as_a_loss_too() -> None:
    assert isinstance(replay((LossCause.STALLED, False), (LossCause.STALLED, False), (CRASH, False))[-1], GiveUp)


def test_a_job_handed_back_is_no_loss() -> None:
    record = LossRecord(in_a_row=2, crashes=1)
    assert decide(record, HANDED_BACK) == Continue(record=LossRecord(in_a_row=2, handed_back=1, crashes=1))
    moved_on = decide(record, HANDED_BACK, new_tokens=True)
    assert moved_on == Continue(record=LossRecord(in_a_row=0, handed_back=1, crashes=0))


def test_a_job_that_is_handed_round_without_a_new_token_comes_to_an_end() -> None:
    moving = replay(*[(HANDED_BACK, True)] * 100)
    assert all(isinstance(decision, Continue) for decision in moving)
    *first, last = replay(*[(HANDED_BACK, False)] * 100)
    assert len(first) == 15
    assert isinstance(last, GiveUp)
    assert last.error.code is ErrorCode.WORKER_LOST
    assert "(handed_back_in_a_row_max)" in last.error.message


@given(st.lists(st.tuples(st.sampled_from(LossCause), st.booleans()), max_size=30))
def test_it_ends_exactly_where_a_bound_is_reached(
    losses: list[tuple[LossCause, bool]],
) -> None:
    in_a_row = handed_back = crashes = in_all = 0
    causes: frozenset[LossCause] = frozenset()
    for index, decision in enumerate(replay(*losses)):
        cause, new_tokens = losses[index]
        if new_tokens:
            in_a_row = handed_back = crashes = 0
            causes = frozenset()
        if cause is HANDED_BACK:
            handed_back += 1
        else:
            in_a_row += 1
            causes |= {cause}
        crashes += cause is CRASH
        in_all += cause is CRASH
        assert isinstance(decision, GiveUp) == (in_a_row >= 3 or handed_back >= 16 or crashes >= 2 or in_all >= 8)
        if isinstance(decision, Continue):
            assert decision.record == LossRecord(
                in_a_row=in_a_row, causes=causes, handed_back=handed_back, crashes=crashes, crashes_in_all=in_all
            )
