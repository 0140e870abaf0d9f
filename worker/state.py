"""The legal states of a replica and the ways between them."""

from __future__ import annotations

from typing import Final

from schemas.status import ReplicaState as State

_NEXT: Final[dict[State, frozenset[State]]] = {
    State.ABSENT: frozenset({State.FETCHING, State.LOADING}),
    State.FETCHING: frozenset({State.LOADING, State.FAILED, State.STOPPING}),
    State.LOADING: frozenset({State.WARMING, State.FAILED, State.STOPPING}),
    State.WARMING: frozenset({State.READY, State.FAILED, State.STOPPING}),
    State.READY: frozenset({State.DRAINING, State.LOADING, State.FAILED, State.STOPPING}),
    State.DRAINING: frozenset({State.STOPPING, State.FAILED}),
    State.STOPPING: frozenset({State.ABSENT}),
    State.FAILED: frozenset({State.LOADING, State.STOPPING}),
}


def check_transition(old: State, new: State) -> State:
    """`new`, if a replica may go there from `old`; anything else is a defect of ours."""
    assert new in _NEXT[old], f"a replica does not go from {old} to {new}"
    return new
