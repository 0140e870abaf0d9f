"""Frames in order and once; what is missing is asked for again, and who stays silent or stands still is given up."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.continuation import LossCause
from gateway.frame_stream import FrameRouter
from gateway.settings import GatewaySettings
from schemas.errors import ErrorCode, ErrorInfo
from schemas.frames import Alive, Delta, Done, Embedding, Failed, FinishReason, Frame, Started, Usage
from schemas.job import Cancel, Order, Resend
from tests.support.gateway import GATEWAY, ManualClock, Recorder

USAGE = Usage(prompt_tokens=1, completion_tokens=1)


class Table:
    """One stream of worker `w1`, and what the router orders."""

    def __init__(self, settings: GatewaySettings | None = None) -> None:
        self.clock = ManualClock()
        self.orders: list[tuple[str, Order]] = []
        self.router = FrameRouter(
            settings=settings or GatewaySettings(),
            clock=self.clock,
            give_order=lambda worker, order: self.orders.append((worker, order)),
            gateway=GATEWAY,
            first_handle=7,
        )
        self.sink = Recorder()
        self.handle = self.router.open(self.sink, "w1", instance="i1")

    def receive(self, *frames: Frame, worker: str = "w1") -> None:
        self.router.on_frames(worker, list(frames))

    def delta(self, seq: int) -> Delta:
        return Delta(handle=self.handle, seq=seq, text=f" {seq}", ids=(seq,))

    def deltas(self, *numbers: int) -> None:
        """Each in a message of its own."""
        for seq in numbers:
            self.receive(self.delta(seq))

    def alive(self, step: int, *, sent: int) -> None:
        self.receive(Alive(handle=self.handle, step=step, sent=sent))

    def sweep(self, seconds: float) -> None:
        """Let time pass in the sweeper's own steps."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.advance(min(0.1, end - self.clock.now))
            self.router.sweep(self.clock())

    @property
    def seen(self) -> list[int]:
        return [frame.seq for frame in self.sink.frames]

    def cancel(self) -> tuple[str, Order]:
        return "w1", Cancel(gateway=GATEWAY, handle=self.handle)

    def resend(self, from_seq: int) -> tuple[str, Order]:
        return "w1", Resend(gateway=GATEWAY, handle=self.handle, from_seq=from_seq)


def test_every_kind_of_frame_reaches_the_sink_in_order() -> None:
    table = Table()
    started = Started(handle=table.handle, seq=0, prompt_tokens=3)
    vector = Embedding(handle=table.handle, seq=2, index=0, vector=b"\0\0\x80?")
    done = Done(handle=table.handle, seq=3, finish_reasons=(FinishReason.STOP,), usage=USAGE)
    table.receive(started, table.delta(1), vector, done)
    assert table.sink.frames == [started, table.delta(1), vector, done]
    assert (len(table.router), table.orders) == (0, [])


def test_a_failure_ends_the_stream_without_a_cancel() -> None:
    table = Table()
    failed = Failed(handle=table.handle, seq=0, error=ErrorInfo(ErrorCode.ENGINE_ERROR, "x"), retryable=True)
    table.receive(failed)
    assert table.sink.frames == [failed]
    assert (len(table.router), table.orders, table.sink.losses) == (0, [], [])


def test_handles_are_never_used_twice() -> None:
    table = Table()
    handles = [table.handle]
    for _ in range(5):
        table.router.close(handles[-1], cancel=False)
        handles.append(table.router.open(Recorder(), "w1", instance="i1"))
    assert len(set(handles)) == 6


def test_duplicates_are_counted_and_dropped() -> None:
    table = Table()
    table.deltas(0, 1, 0, 1, 1, 2)
    assert table.seen == [0, 1, 2]
    assert (table.router.counters.duplicates, table.router.counters.gaps, table.orders) == (3, 0, [])


def test_a_gap_is_asked_for_once_and_nothing_behind_it_is_delivered() -> None:
    table = Table()
    table.deltas(0, 2, 3, 5)
    assert table.seen == [0]
    assert table.orders == [table.resend(1)]
    table.receive(*(table.delta(seq) for seq in range(1, 6)))
    assert table.seen == [0, 1, 2, 3, 4, 5]
    assert table.router.counters.gaps == 1
    table.sweep(0.9)
    assert table.orders == [table.resend(1)], "nothing is missing any more"


def test_two_frames_in_the_wrong_order_are_mended() -> None:
    table = Table()
    table.deltas(1, 0)
    assert table.seen == [0]
    table.receive(table.delta(0), table.delta(1))
    assert table.seen == [0, 1]


def test_a_second_gap_is_asked_for_again_after_the_first_was_mended() -> None:
    table = Table()
    table.deltas(1, 0, 2)
    assert table.orders == [table.resend(0), table.resend(1)]


def test_a_gap_that_is_not_answered_while_the_worker_talks_is_asked_for_twice_and_a_loss_after_a_second() -> None:
    table = Table()
    table.deltas(0, 2)
    for seq in range(3, 12):
        table.sweep(0.1)
        table.deltas(seq)
    assert table.sink.losses == []
    table.sweep(0.2)
    assert table.sink.losses == [LossCause.RESEND_UNANSWERED]
    assert table.orders == [table.resend(1), table.resend(1), table.cancel()]
    assert (table.seen, len(table.router), table.router.counters.gaps) == ([0], 0, 1)


def talks(table: Table, seconds: float) -> None:
    """The worker sends on, with a gap before it all."""
    for _ in range(round(seconds / 0.1)):
        table.sweep(0.1)
        table.deltas(50)


def test_what_we_dropped_ourselves_may_be_what_was_asked_for() -> None:
    """A gateway that lags drops the answers, too: each drop gives the worker its time again, and it is asked again."""
    table = Table()
    table.deltas(0, 2)
    for _ in range(4):
        talks(table, 0.8)
        table.router.on_dropped(table.clock())
    assert table.sink.losses == []
    talks(table, 0.4)
    assert len(table.orders) > 4
    table.receive(*(table.delta(seq) for seq in range(1, 4)))
    assert (table.seen, table.sink.losses) == ([0, 1, 2, 3], [])


def test_what_was_asked_for_around_a_lag_of_ours_is_waited_for_from_its_end_on() -> None:
    table = Table()
    table.deltas(0, 2)
    talks(table, 0.8)
    for _ in range(3):
        table.clock.advance(0.8)
        table.deltas(51)
        table.router.shift_clocks(0.7, table.clock())
        talks(table, 0.8)
    assert table.sink.losses == []
    talks(table, 0.3)
    assert table.sink.losses == [LossCause.RESEND_UNANSWERED]


def test_drops_without_end_do_not_keep_a_stream_that_gets_nowhere() -> None:
    table = Table()
    table.deltas(0, 2)
    for _ in range(51):
        talks(table, 0.1)
        table.router.on_dropped(table.clock())
    assert table.sink.losses == [LossCause.STALLED]
    assert len([order for order in table.orders if order == table.resend(1)]) <= 11, "twice a second, however many"


def test_a_question_put_to_a_silent_worker_is_not_held_against_it_when_it_is_back() -> None:
    table = Table()
    table.deltas(0)
    table.sweep(2.5)
    table.deltas(2)
    table.sweep(0.9)
    assert table.orders == [table.resend(1)] * 3
    assert table.sink.losses == []
    table.receive(table.delta(1), table.delta(2))
    table.sweep(0.9)
    assert (table.seen, table.sink.losses) == ([0, 1, 2], [])


def test_a_gap_followed_by_silence_is_asked_for_again() -> None:
    table = Table()
    table.deltas(0, 2)
    table.sweep(2.5)
    assert (table.orders, table.sink.losses) == ([table.resend(1)] * 2, [])
    table.deltas(3)
    table.sweep(0.5)
    assert table.sink.losses == []
    table.deltas(4)
    table.sweep(0.6)
    assert table.sink.losses == [LossCause.RESEND_UNANSWERED]
    assert table.orders == [*[table.resend(1)] * 4, table.cancel()]


def test_a_lost_last_frame_is_noticed_by_a_sign_of_life_that_is_ahead() -> None:
    table = Table()
    table.deltas(0)
    table.alive(5, sent=3)
    table.alive(6, sent=3)
    assert table.orders == [table.resend(1)]
    assert table.router.counters.gaps == 1
    table.receive(table.delta(1), table.delta(2))
    table.alive(7, sent=3)
    table.sweep(0.9)
    assert (table.seen, table.sink.losses) == ([0, 1, 2], [])


def test_silence_is_answered_with_a_question_and_a_sign_of_life_settles_it() -> None:
    table = Table()
    table.deltas(0)
    table.sweep(0.95)
    assert table.orders == []
    table.sweep(0.1)
    assert table.orders == [table.resend(1)]
    table.alive(5, sent=1)
    table.sweep(0.95)
    assert (table.orders, table.sink.losses) == ([table.resend(1)], [])


def test_silence_is_asked_about_once_and_becomes_a_loss_at_the_stall_limit() -> None:
    table = Table()
    table.deltas(0)
    table.sweep(4.9)
    assert (table.orders, table.sink.losses) == ([table.resend(1)], [])
    table.sweep(0.2)
    assert table.sink.losses == [LossCause.STALLED]
    assert table.orders == [table.resend(1), table.cancel()]


def test_a_claim_that_never_brings_a_frame_is_lost_too() -> None:
    table = Table()
    table.sweep(5.1)
    assert table.sink.losses == [LossCause.STALLED]
    assert table.orders == [table.resend(0), table.cancel()]


def test_signs_of_life_without_progress_of_the_engine_are_a_stall() -> None:
    table = Table()
    table.alive(5, sent=0)
    for _ in range(9):
        table.sweep(0.5)
        table.alive(5, sent=0)
    assert table.sink.losses == []
    table.sweep(0.6)
    assert table.sink.losses == [LossCause.STALLED]


def test_the_first_sign_of_life_after_a_token_is_no_progress() -> None:
    """Its step may be the one that made the token: 5 s are 5 s, not 5 and the time until then."""
    table = Table()
    table.alive(4, sent=0)
    table.deltas(0)
    for _ in range(9):
        table.sweep(0.5)
        table.alive(5, sent=1)
    assert table.sink.losses == []
    table.sweep(0.6)
    assert table.sink.losses == [LossCause.STALLED]


@pytest.mark.parametrize("said", [0, 1])
def test_a_step_that_takes_seconds_is_no_stall(said: int) -> None:
    """A slow prefill tells of every step: as long as one ends in time, nothing is lost."""
    table = Table()
    table.deltas(*range(said))
    for step in range(5):
        for _ in range(8):
            table.sweep(0.5)
            table.alive(step, sent=said)
    assert table.sink.losses == []


def test_an_engine_that_moves_may_take_for_ever() -> None:
    table = Table()
    for step in range(100):
        table.sweep(0.9)
        table.alive(step, sent=0)
    assert (table.sink.losses, table.orders) == ([], [])


def test_duplicates_are_no_progress() -> None:
    table = Table()
    table.deltas(0)
    for _ in range(11):
        table.sweep(0.5)
        table.deltas(0)
    assert table.sink.losses == [LossCause.STALLED]


def test_clocks_begin_anew_after_our_own_absence() -> None:
    table = Table()
    table.deltas(0)
    table.sweep(1.1)
    table.clock.advance(60)
    table.router.restart_clocks(table.clock())
    table.sweep(0.9)
    assert table.sink.losses == []
    table.sweep(0.2)
    assert table.orders == [table.resend(1)] * 2
    table.sweep(4.0)
    assert table.sink.losses == [LossCause.STALLED]


def test_a_gap_seen_before_our_absence_is_asked_for_again_after_it() -> None:
    table = Table()
    table.deltas(0, 2)
    table.clock.advance(60)
    table.router.restart_clocks(table.clock())
    table.deltas(3)
    table.sweep(0.4)
    assert table.sink.losses == []
    assert table.orders == [table.resend(1)] * 2


def test_a_stall_of_ours_is_taken_off_what_is_waited_for() -> None:
    table = Table()
    table.deltas(0)
    table.sweep(4.5)
    table.clock.advance(60)
    table.router.shift_clocks(60.0, table.clock())
    table.sweep(0.4)
    assert table.sink.losses == []
    table.sweep(0.2)
    assert table.sink.losses == [LossCause.STALLED]
    assert table.orders == [table.resend(1), table.cancel()], "asked once"


def test_a_stall_of_ours_neither_hastens_nor_revives_a_suspicion() -> None:
    table = Table()
    table.router.on_worker_suspect("w1")
    table.sweep(0.5)
    table.clock.advance(2)
    table.router.shift_clocks(2.0, table.clock())
    table.sweep(0.4)
    assert table.sink.losses == []
    table.alive(3, sent=0)
    table.router.shift_clocks(2.0, table.clock())
    table.sweep(0.9)
    assert table.sink.losses == []


def test_frames_nobody_waits_for_meet_a_cancel_at_most_once_a_second() -> None:
    table = Table()
    for _ in range(25):
        table.receive(Delta(handle=999, seq=0, text="x"))
        table.clock.advance(0.1)
    assert table.orders == [("w1", Cancel(gateway=GATEWAY, handle=999))] * 3
    assert table.router.counters.unknown == 25


def test_the_memory_of_refused_handles_is_bounded() -> None:
    table = Table(GatewaySettings(open_requests_max=10))
    for handle in range(1_000, 2_000):
        table.receive(Delta(handle=handle, seq=0, text="x"))
    assert len(table.router._refused_at) <= 10


def test_another_worker_cannot_speak_for_a_handle() -> None:
    table = Table()
    table.receive(table.delta(0), worker="w2")
    assert table.seen == []
    assert table.orders == [("w2", Cancel(gateway=GATEWAY, handle=table.handle))]
    table.sweep(0.9)
    table.receive(Alive(handle=table.handle, step=1), worker="w2")
    table.sweep(0.2)
    assert table.resend(0) in table.orders, "frames of others are no sign of life"
    table.deltas(0)
    assert (table.seen, len(table.router)) == ([0], 1)


def test_each_worker_that_speaks_for_a_dead_handle_is_told() -> None:
    table = Table()
    table.receive(Delta(handle=999, seq=0, text="x"), worker="w1")
    table.receive(Delta(handle=999, seq=0, text="x"), worker="w2")
    assert [worker for worker, _ in table.orders] == ["w1", "w2"]


def test_frames_after_the_end_or_after_a_loss_meet_a_cancel() -> None:
    table = Table()
    table.router.on_worker_gone("w1", instance="i1")
    assert table.orders == [table.cancel()]
    table.deltas(0)
    assert (table.seen, table.orders) == ([], [table.cancel()] * 2)


def test_only_the_claims_of_a_worker_that_is_gone_are_lost() -> None:
    table = Table()
    other = Recorder()
    table.router.open(other, "w2", instance="i1")
    table.router.on_worker_gone("w1", instance="i1")
    assert (table.sink.losses, other.losses, len(table.router)) == ([LossCause.WORKER_GONE], [], 1)


def test_a_worker_whose_connection_broke_has_a_moment_to_come_back() -> None:
    table = Table()
    other = Recorder()
    table.router.open(other, "w2", instance="i1")
    table.router.on_worker_suspect("w1")
    table.sweep(0.9)
    assert table.sink.losses == []
    table.sweep(0.2)
    assert (table.sink.losses, other.losses) == ([LossCause.WORKER_GONE], [])


def test_the_moment_to_come_back_begins_anew_after_our_own_absence() -> None:
    table = Table()
    table.router.on_worker_suspect("w1")
    table.clock.advance(60)
    table.router.restart_clocks(table.clock())
    table.sweep(0.9)
    assert table.sink.losses == []
    table.sweep(0.2)
    assert table.sink.losses == [LossCause.WORKER_GONE]


def test_our_own_absence_does_not_revive_a_suspicion_that_was_over() -> None:
    table = Table()
    table.router.on_worker_suspect("w1")
    table.clock.advance(0.05)
    table.alive(3, sent=0)
    table.router.restart_clocks(table.clock())
    table.sweep(2.0)
    assert table.sink.losses == []


def comes_back_with_text(table: Table) -> None:
    table.deltas(0)


def comes_back_with_a_sign_of_life(table: Table) -> None:
    table.alive(3, sent=0)


@pytest.mark.parametrize("comes_back", [comes_back_with_text, comes_back_with_a_sign_of_life])
def test_a_frame_clears_the_suspicion(comes_back: Callable[[Table], None]) -> None:
    table = Table()
    table.router.on_worker_suspect("w1")
    table.sweep(0.9)
    comes_back(table)
    table.sweep(0.9)
    assert table.sink.losses == []


def test_a_closed_stream_hears_nothing_more() -> None:
    table = Table()
    table.router.close(table.handle, cancel=True)
    table.router.close(table.handle, cancel=True)
    table.deltas(0)
    table.router.on_worker_gone("w1", instance="i1")
    table.sweep(10)
    assert (table.seen, table.sink.losses) == ([], [])
    assert table.orders == [table.cancel(), table.cancel()], "one for the close, one for the frame that came after it"


def test_a_sink_that_closes_its_stream_hears_nothing_more_of_the_same_message() -> None:
    table = Table()

    class Closing(Recorder):
        def on_delta(self, frame: Delta) -> None:
            super().on_delta(frame)
            table.router.close(handle, cancel=True)

    sink = Closing()
    handle = table.router.open(sink, "w1", instance="i1")
    table.receive(*(Delta(handle=handle, seq=seq, text="x") for seq in range(3)))
    assert [frame.seq for frame in sink.frames] == [0]


Message = list[int]


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=30), st.booleans())
def test_any_traffic_gives_each_number_once_and_in_order(messages: list[Message], in_one: bool) -> None:
    table = Table()
    for message in messages:
        table.clock.advance(0.05)
        if in_one:
            table.receive(*(table.delta(seq) for seq in message))
        else:
            table.deltas(*message)
        table.router.sweep(table.clock())
    assert table.seen == list(range(len(table.seen)))
    if table.sink.losses:
        assert (len(table.sink.losses), len(table.router)) == (1, 0)


def test_the_claims_of_a_successor_are_not_lost_with_its_predecessor() -> None:
    table = Table()
    successor = Recorder()
    table.router.open(successor, "w1", instance="i2")
    table.router.on_worker_gone("w1", instance="i1")
    assert (table.sink.losses, successor.losses) == ([LossCause.WORKER_GONE], [])
