from __future__ import annotations

import pytest

from schemas.status import ReplicaState as State
from worker.state import check_transition

LIVES = {
    "loaded, drained, gone": [
        *(State.ABSENT, State.LOADING, State.WARMING, State.READY),
        *(State.DRAINING, State.STOPPING, State.ABSENT),
    ],
    "fetched first": [State.ABSENT, State.FETCHING, State.LOADING, State.WARMING, State.READY],
    "crashed and restarted": [State.READY, State.LOADING, State.WARMING, State.READY],
    "crashed for good": [State.READY, State.FAILED, State.STOPPING, State.ABSENT],
    "not loaded": [State.ABSENT, State.LOADING, State.FAILED],
    "not restarted": [State.READY, State.LOADING, State.FAILED],
    "stopped while loading": [State.ABSENT, State.LOADING, State.STOPPING, State.ABSENT],
    "tried again": [State.FAILED, State.LOADING],
}


@pytest.mark.parametrize("life", LIVES.values(), ids=LIVES.keys())
def test_lives_that_happen(life: list[State]) -> None:
    state = life[0]
    for following in life[1:]:
        state = check_transition(state, following)
    assert state is life[-1]


@pytest.mark.parametrize(
    "old, new",
    [
        (State.ABSENT, State.READY),
        (State.LOADING, State.READY),
        (State.DRAINING, State.READY),
        (State.STOPPING, State.READY),
        (State.FAILED, State.READY),
        (State.READY, State.READY),
        (State.READY, State.ABSENT),
    ],
)
def test_shortcuts_are_defects(old: State, new: State) -> None:
    with pytest.raises(AssertionError, match=f"from {old} to {new}"):
        check_transition(old, new)


@pytest.mark.parametrize("state", State)
def test_ready_is_reached_from_warming_alone(state: State) -> None:
    if state is State.WARMING:
        assert check_transition(state, State.READY) is State.READY
        return
    with pytest.raises(AssertionError):
        check_transition(state, State.READY)
