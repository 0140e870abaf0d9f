"""Who is there, judged by our own clock since the last beat."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from gateway.fleet import Fleet
from schemas.status import DisconnectEvent, ReplicaState
from tests.support.gateway import worker_status

KNOWN_MODELS_MAX = 20


class Watched:
    """A fleet and what it reported."""

    def __init__(self) -> None:
        self.new: list[str] = []
        self.gone: list[tuple[str, str]] = []
        self.suspects: list[str] = []
        self.models: list[str] = []
        self.fleet = Fleet(
            lost_after_s=3.5,
            known_models_max=KNOWN_MODELS_MAX,
            on_new=lambda status: self.new.append(status.instance),
            on_gone=lambda last, cause: self.gone.append((last.name, cause)),
            on_suspect=self.suspects.append,
            on_model=self.models.append,
        )

    def beat(self, now: float = 0.0, **fields: Any) -> None:
        self.fleet.on_beat(worker_status(**fields), now)

    def names(self) -> list[str]:
        return [status.name for status in self.fleet.workers]


def disconnect(
    *, user: str = "U-w1", client_id: int = 11, server: str = "S1", reason: str = "Client Closed"
) -> DisconnectEvent:
    client = DisconnectEvent.Client(id=client_id, user=user)
    return DisconnectEvent(client=client, server=DisconnectEvent.Server(id=server), reason=reason)


def test_a_worker_is_lost_when_its_beats_stop() -> None:
    watched = Watched()
    watched.beat(0.0)
    watched.beat(3.0, name="w2")
    watched.fleet.sweep(3.5)
    assert watched.gone == []
    watched.fleet.sweep(3.6)
    assert (watched.gone, watched.names()) == ([("w1", "beats stopped")], ["w2"])
    watched.fleet.sweep(3.7)
    assert watched.gone == [("w1", "beats stopped")]


def test_each_beat_begins_the_time_anew() -> None:
    watched = Watched()
    for second in range(100):
        watched.beat(float(second * 3))
        watched.fleet.sweep(second * 3 + 3.0)
    assert watched.gone == []


def test_silence_that_was_ours_condemns_nobody() -> None:
    watched = Watched()
    watched.beat(0.0)
    watched.fleet.restart_clocks(60.0)
    watched.fleet.sweep(63.5)
    assert watched.gone == []
    watched.fleet.sweep(63.6)
    assert watched.gone == [("w1", "beats stopped")]


def test_a_loop_that_stands_still_now_and_then_does_not_hide_that_beats_stopped() -> None:
    watched = Watched()
    watched.beat(0.0)
    watched.fleet.shift_clocks(2.0, 2.1)
    watched.fleet.sweep(5.4)
    assert watched.gone == []
    watched.fleet.sweep(5.6)
    assert watched.gone == [("w1", "beats stopped")]
    watched.beat(6.0)
    watched.fleet.shift_clocks(60.0, 7.0)
    watched.fleet.sweep(10.4)
    assert len(watched.gone) == 1, "never beyond now"
    watched.fleet.sweep(10.6)
    assert len(watched.gone) == 2


def test_a_new_process_under_an_old_name_means_that_the_old_one_is_gone() -> None:
    watched = Watched()
    watched.beat(instance="i1")
    watched.beat(instance="i2")
    watched.beat(instance="i2")
    assert (watched.gone, watched.names()) == ([("w1", "restarted")], ["w1"])
    assert watched.new == ["i1", "i2"], "each process once"


@pytest.mark.parametrize("reason", ["Client Closed", "Read Error", "Write Error"])
def test_a_connection_that_the_worker_ended_ends_it_at_once(reason: str) -> None:
    watched = Watched()
    watched.beat()
    watched.beat(name="w2")
    watched.fleet.on_disconnect(disconnect(reason=reason))
    assert (watched.gone, watched.names()) == ([("w1", "disconnected")], ["w2"])
    assert not watched.suspects


@pytest.mark.parametrize("reason", ["Server Shutdown", "Stale Connection", "Slow Consumer (Write Deadline)"])
def test_a_connection_that_the_server_ended_makes_a_suspect(reason: str) -> None:
    watched = Watched()
    watched.beat()
    watched.fleet.on_disconnect(disconnect(reason=reason))
    assert (watched.gone, watched.suspects, watched.names()) == ([], ["w1"], ["w1"])


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(disconnect(user="U-other"), id="another key"),
        pytest.param(disconnect(client_id=10), id="an older connection of the same worker"),
        pytest.param(disconnect(server="S2"), id="the same number on another server"),
    ],
)
def test_the_end_of_somebody_elses_connection_changes_nothing(event: DisconnectEvent) -> None:
    watched = Watched()
    watched.beat()
    watched.fleet.on_disconnect(event)
    assert (watched.gone, watched.suspects, watched.names()) == ([], [], ["w1"])


def test_a_worker_that_reconnected_is_not_hurt_by_the_late_word_on_its_old_connection() -> None:
    watched = Watched()
    watched.beat(client_id=11)
    watched.beat(client_id=12)
    watched.fleet.on_disconnect(disconnect(client_id=11))
    assert watched.gone == []


def test_only_ready_replicas_of_workers_that_take_jobs_serve() -> None:
    watched = Watched()
    for state in ReplicaState:
        watched.beat(state=state)
        assert watched.fleet.serves("sim") == (state is ReplicaState.READY)
        assert watched.fleet.knows("sim")
    watched.beat(draining=True)
    assert not watched.fleet.serves("sim")
    watched.beat(name="w2")
    assert watched.fleet.serves("sim")


def test_the_fastest_is_told_where_replicas_differ() -> None:
    watched = Watched()

    def beat(name: str, speed_class: int, **fields: Any) -> None:
        status = worker_status(name=name, **fields)
        replica = msgspec.structs.replace(status.replicas[0], speed_class=speed_class)
        watched.fleet.on_beat(msgspec.structs.replace(status, replicas=(replica,)), 0.0)

    beat("w1", 5)
    assert watched.fleet.fastest() == {}, "there is one speed"
    beat("w2", 2)
    assert watched.fleet.fastest() == {"sim": 2}
    beat("w2", 2, draining=True)
    assert watched.fleet.fastest() == {}


Beat = tuple[str, str, frozenset[str], bool]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["w1", "w2", "w3"]),
            st.sampled_from(["i1", "i2"]),
            st.frozensets(st.sampled_from("abc")),
            st.booleans(),
        )
    )
)
def test_who_serves_what_follows_from_the_last_beats(beats: list[Beat]) -> None:
    watched = Watched()
    last: dict[str, tuple[float, Beat]] = {}
    for number, beat in enumerate(beats):
        now = float(number)
        name, instance, models, draining = beat
        watched.beat(now, name=name, instance=instance, models=tuple(models), draining=draining)
        last[name] = (now, beat)
        watched.fleet.sweep(now)
        last = {each: said for each, said in last.items() if now - said[0] <= 3.5}
        serving = sorted((each, model) for each, (_, beat) in last.items() if not beat[3] for model in beat[2])
        assert watched.fleet.ready_models == tuple(sorted({model for _, model in serving}))
        for model in "abc":
            assert len(list(watched.fleet.replicas(model))) == sum(model == each for _, each in serving)
            assert watched.fleet.serves(model) == (model in watched.fleet.ready_models)


def test_a_model_stays_known_when_its_last_worker_is_gone() -> None:
    watched = Watched()
    watched.beat()
    watched.fleet.sweep(100.0)
    assert (watched.fleet.knows("sim"), watched.fleet.serves("sim"), watched.fleet.ready_models) == (True, False, ())


def test_a_model_is_reported_once() -> None:
    watched = Watched()
    watched.beat(models=("b", "a"))
    watched.beat(models=("b", "a"))
    watched.beat(name="w2", models=("a", "c"))
    assert watched.models == ["b", "a", "c"]
    assert watched.fleet.ready_models == ("a", "b", "c")


def test_the_memory_of_models_is_bounded_and_keeps_those_announced_last() -> None:
    watched = Watched()
    with capture_logs() as logs:
        for number in range(KNOWN_MODELS_MAX + 5):
            watched.beat(models=(f"m{number}",))
    told = [(line["event"], line["model"], line["known_models_max"]) for line in logs]
    assert told == [("a model is forgotten", "m0", KNOWN_MODELS_MAX)], "once, not with every beat"
    assert len(watched.fleet.known_models) == KNOWN_MODELS_MAX
    assert not watched.fleet.knows("m0")
    assert watched.fleet.knows(f"m{KNOWN_MODELS_MAX + 4}")


def test_a_model_that_is_still_announced_is_never_forgotten_for_one_that_is_not() -> None:
    watched = Watched()
    for number in range(KNOWN_MODELS_MAX + 5):
        watched.beat(models=("kept",), name="w2")
        watched.beat(models=(f"m{number}",))
    assert watched.fleet.knows("kept")
    assert watched.models.count("kept") == 1


def test_a_gateway_that_has_just_begun_to_listen_learns_until_it_has_heard_everybody() -> None:
    fleet = Fleet(
        lost_after_s=3.5,
        known_models_max=KNOWN_MODELS_MAX,
        on_gone=lambda last, cause: None,
        on_suspect=lambda worker: None,
        on_model=lambda model: None,
        learns_until=math.inf,
    )
    assert fleet.learns(11.4)
    fleet.learn_until(11.5)
    assert fleet.learns(11.4)
    assert not fleet.learns(11.5)
