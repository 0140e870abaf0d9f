"""`infermesh chaos`: its schedule, its judgement of single streams and its gaps, from given facts."""

from __future__ import annotations

import json
from itertools import islice, pairwise
from typing import Any

import pytest
from msgspec import structs

from tools.bench.answer import Answer, Break
from tools.chaos.asks import TIERS, Mixed
from tools.chaos.faults import JITTER, Fault, parse_faults, pick, plan, plan_trials
from tools.chaos.flatness import Trend
from tools.chaos.gaps import Gap, Hit, Noticed, gaps_by_fault, noticed_by_fault
from tools.chaos.report import FLAWS, REBUILT_MS_MAX, SLOTS_FREE_MS_MAX, ChaosReport, flaws, tables
from tools.chaos.verdict import Fate, Verdict, verdict, wrong_tokens

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


def chunk(content: str = "", *, role: bool = False, finish: str | None = None) -> bytes:
    delta = {"content": content} | ({"role": "assistant"} if role else {})
    return b"data: " + json.dumps({"choices": [{"delta": delta, "finish_reason": finish}]}).encode() + b"\n\n"


def text(*numbers: int) -> str:
    return "".join(f" tok{number}" for number in numbers)


def answered(*parts: bytes, broken: Break | None = None) -> Answer:
    """A stream of these events, whole unless `broken`."""
    answer = Answer(events_max=100)
    answer.feed(STREAM_HEAD + b"".join(parts), 1.0)
    if broken is not None:
        answer.break_off(broken)
    else:
        answer.feed_eof()
    return answer


def whole(*numbers: int) -> Answer:
    head = STREAM_HEAD.replace(b"\r\n\r\n", b"\r\ntransfer-encoding: chunked\r\n\r\n")
    body = chunk(role=True) + chunk(text(*numbers)) + chunk(finish="length") + b"data: [DONE]\n\n"
    answer = Answer(events_max=100)
    answer.feed(head + f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n", 1.0)
    return answer


def refused(status: int) -> Answer:
    body = b'{"error": {"message": "later", "code": "no_replica"}}'
    answer = Answer(events_max=100)
    answer.feed(f"HTTP/1.1 {status} No\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body, 1.0)
    return answer


def in_one_piece(*numbers: int, finish: str | None = "length") -> Answer:
    choice = {"message": {"role": "assistant", "content": text(*numbers)}, "finish_reason": finish}
    body = json.dumps({"choices": [choice]}).encode()
    answer = Answer(events_max=100)
    answer.feed(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body, 1.0)
    return answer


def judged(answer: Answer, *, stream: bool = True, left: bool = False, gateway_killed: bool = False) -> Verdict:
    return verdict(answer, tokens=3, stream=stream, left=left, gateway_killed=gateway_killed)


class TestVerdict:
    def test_the_exact_text_and_a_whole_stream_complete(self) -> None:
        assert judged(whole(1, 2, 3)) == Verdict(fate=Fate.COMPLETED, duplicated=0, missing=0)

    def test_a_token_twice_fails_and_is_counted(self) -> None:
        found = judged(whole(1, 2, 2, 3))
        assert (found.fate, found.duplicated, found.missing) == (Fate.FAILED, 1, 0)
        assert found.reason == "tok2 again where tok3 belongs"

    def test_a_token_left_out_fails_and_is_counted(self) -> None:
        found = judged(whole(1, 3))
        assert (found.fate, found.duplicated, found.missing) == (Fate.FAILED, 0, 1)

    def test_an_early_clean_end_misses_what_should_have_come(self) -> None:
        assert judged(whole(1)).missing == 2

    def test_an_error_event_is_a_failure_without_missing_tokens(self) -> None:
        error = b'data: {"error": {"message": "gone", "code": "worker_lost"}}\n\ndata: [DONE]\n\n'
        found = judged(answered(chunk(role=True), chunk(text(1)), error))
        assert found == Verdict(fate=Fate.FAILED, duplicated=0, missing=0, reason="stream worker_lost")

    def test_no_end_in_time_is_a_hang_also_with_half_the_text(self) -> None:
        stalled = answered(chunk(role=True), chunk(text(1)), broken=Break.TIMEOUT)
        assert judged(stalled).fate is Fate.HUNG

    @pytest.mark.parametrize("status, fate", [(503, Fate.REFUSED), (429, Fate.REFUSED), (500, Fate.FAILED)])
    def test_not_now_is_told_from_never(self, status: int, fate: Fate) -> None:
        found = judged(refused(status))
        assert (found.fate, found.reason) == (fate, f"{status} no_replica")

    def test_a_broken_connection_is_excused_only_by_what_was_done_on_purpose(self) -> None:
        broken = answered(chunk(role=True), chunk(text(1)), broken=Break.CLOSED)
        assert judged(broken).fate is Fate.FAILED
        assert judged(broken, left=True).fate is Fate.LEFT
        assert judged(broken, gateway_killed=True).fate is Fate.BROKEN

    def test_wrong_tokens_are_not_excused_by_what_was_done_on_purpose(self) -> None:
        broken = answered(chunk(role=True), chunk(text(1, 1)), broken=Break.CLOSED)
        assert judged(broken, left=True).duplicated == 1

    def test_an_answer_in_one_piece_completes_with_exactly_its_text(self) -> None:
        assert judged(in_one_piece(1, 2, 3), stream=False) == Verdict(fate=Fate.COMPLETED, duplicated=0, missing=0)

    @pytest.mark.parametrize(
        "numbers, duplicated, missing, reason",
        [
            ((1, 2, 2, 3), 1, 0, "tok2 again where tok3 belongs"),
            ((1, 3), 0, 1, "tok2 missing: tok3 is in its place"),
            ((1, 2), 0, 1, "the text ends too early"),
            ((), 0, 3, "the text ends too early"),
        ],
    )
    def test_a_wrong_text_in_one_piece_fails(
        self, numbers: tuple[int, ...], duplicated: int, missing: int, reason: str
    ) -> None:
        found = judged(in_one_piece(*numbers), stream=False)
        assert found == Verdict(fate=Fate.FAILED, duplicated=duplicated, missing=missing, reason=reason)

    def test_an_answer_in_one_piece_without_an_end_fails(self) -> None:
        assert judged(in_one_piece(1, 2, 3, finish=None), stream=False).fate is Fate.FAILED

    def test_an_answer_in_one_piece_is_refused_broken_and_failed_as_a_stream_is(self) -> None:
        assert judged(refused(503), stream=False).fate is Fate.REFUSED
        assert judged(refused(500), stream=False).reason == "500 no_replica"
        cut = Answer(events_max=100)
        cut.break_off(Break.CLOSED)
        assert judged(cut, stream=False).reason == "connection_closed"
        assert judged(cut, stream=False, gateway_killed=True).fate is Fate.BROKEN

    def test_tokens_past_the_last_one_are_too_many(self) -> None:
        assert wrong_tokens(text(1, 2, 3), tokens=2, finished=True) == (1, 0)

    def test_holes_count_also_in_a_stream_that_did_not_finish(self) -> None:
        assert wrong_tokens(text(1, 4), tokens=10, finished=False) == (0, 2)


class TestPlan:
    def test_the_same_seed_gives_the_same_faults(self) -> None:
        first, again, other = (list(islice(plan(tuple(Fault), every_s=2, seed=seed), 50)) for seed in (1, 1, 2))
        assert first == again != other

    def test_all_faults_come_equally_often_at_the_given_pace(self) -> None:
        planned = list(islice(plan(tuple(Fault), every_s=2, seed=1), 10 * len(Fault)))
        assert all(sum(each.fault is fault for each in planned) == 10 for fault in Fault)
        assert all(2 * (1 - JITTER) <= each.after_s <= 2 * (1 + JITTER) for each in planned)
        assert len({each.after_s for each in planned}) == len(planned)

    def test_trials_go_through_one_fault_after_the_other(self) -> None:
        faults = (Fault.KILL_BUS, Fault.DROP_FRAME)
        planned = list(plan_trials(faults, trials=3, every_s=2, seed=1))
        assert [each.fault for each in planned] == [Fault.KILL_BUS] * 3 + [Fault.DROP_FRAME] * 3
        assert planned == list(plan_trials(faults, trials=3, every_s=2, seed=1))

    def test_every_candidate_can_be_hit(self) -> None:
        draws = [each.draw for each in islice(plan((Fault.KILL_WORKER,), every_s=2, seed=1), 100)]
        assert {pick("abc", draw) for draw in draws} == set("abc")

    def test_faults_are_read_from_a_list(self) -> None:
        assert parse_faults("kill-bus, freeze-worker,kill-bus") == (Fault.KILL_BUS, Fault.FREEZE_WORKER)

    @pytest.mark.parametrize("text", ["", "kill-bus,unplug"])
    def test_an_unknown_fault_is_told_with_the_known_ones(self, text: str) -> None:
        with pytest.raises(ValueError, match="known faults are kill-worker, kill-engine"):
            parse_faults(text)


class TestGaps:
    def test_each_hit_counts_once_with_its_longest_silence(self) -> None:
        hits = [Hit(10.0, Fault.KILL_WORKER, "w1"), Hit(20.0, Fault.KILL_WORKER, "w2")]
        streams = [[9.0, 9.9, 10.5, 10.6], [9.5, 9.95, 10.05], [19.0, 23.0]]
        assert gaps_by_fault(hits, streams) == {"kill-worker": Gap(p50=600.0, max=4_000.0, hits=2)}

    def test_a_silence_before_the_hit_or_after_the_next_one_is_not_its_own(self) -> None:
        hits = [Hit(10.0, Fault.KILL_WORKER, "w1"), Hit(12.0, Fault.KILL_BUS, "bus")]
        gaps = gaps_by_fault(hits, [[1.0, 9.0, 10.1, 11.0, 12.1, 20.0]])
        assert gaps == {
            "kill-worker": Gap(p50=1_100.0, max=1_100.0, hits=1),
            "kill-bus": Gap(p50=7_900.0, max=7_900.0, hits=1),
        }

    def test_a_silence_that_begins_when_the_hit_was_over_is_the_next_one_s_alone(self) -> None:
        hits = [Hit(10.0, Fault.KILL_WORKER, "w1", over_at=11.0), Hit(12.0, Fault.KILL_BUS, "bus")]
        gaps = gaps_by_fault(hits, [[9.9, 10.1, 10.2, 11.9, 15.0]])
        assert gaps == {
            "kill-worker": Gap(p50=1_700.0, max=1_700.0, hits=1),
            "kill-bus": Gap(p50=3_100.0, max=3_100.0, hits=1),
        }

    def test_streams_that_did_not_run_then_say_nothing(self) -> None:
        hits = [Hit(10.0, Fault.KILL_BUS, "bus")]
        assert gaps_by_fault(hits, [[1.0, 2.0], [11.0, 12.0], []]) == {"kill-bus": Gap(p50=None, max=None)}

    def test_arrivals_and_hits_in_order_are_all_it_takes(self) -> None:
        arrivals = [number / 10 for number in range(100)]
        hits = [Hit(at, Fault.KILL_WORKER, "w1") for at in (1.05, 5.05, 9.05)]
        longest = max(later - earlier for earlier, later in pairwise(arrivals)) * 1e3
        assert gaps_by_fault(hits, [arrivals])["kill-worker"] == Gap(p50=100.0, max=round(longest, 1), hits=3)

    def test_what_was_noticed_stands_beside_what_is_promised(self) -> None:
        noticed = noticed_by_fault(
            {Fault.KILL_WORKER: [0.03, 0.01, 0.02], Fault.KILL_BUS: [0.5]}, within_ms={Fault.KILL_WORKER: 100.0}
        )
        assert noticed == {
            "kill-worker": Noticed(trials=3, p50=20.0, max=30.0, within=100.0),
            "kill-bus": Noticed(trials=1, p50=500.0, max=500.0, within=None),
        }


def report(**counts: int) -> ChaosReport:
    fields: dict[str, Any] = dict.fromkeys(("requests", "completed", *FLAWS), 0) | counts
    gaps = {"kill-bus": Gap(p50=1.0, max=None)}
    settings: dict[str, object] = {"run": {"faults": {"kill-bus": 2}}}
    return ChaosReport(**fields, client_gap_ms=gaps, environment={}, settings=settings)


@pytest.mark.parametrize("flaw", FLAWS)
def test_whatever_is_wrong_or_left_over_is_a_flaw(flaw: str) -> None:
    assert flaws(report(requests=5, completed=5)) == []
    assert flaws(report(**{flaw: 2})) == [f"{flaw}: 2"]


def test_slots_that_a_dead_gateway_held_too_long_are_a_flaw() -> None:
    found = flaws(structs.replace(report(), slots_free_ms=(900.0, SLOTS_FREE_MS_MAX, SLOTS_FREE_MS_MAX + 1)))
    assert found == ["slots were free only 3,001 ms after the gateway was killed"]


def test_what_was_noticed_later_than_promised_is_a_flaw() -> None:
    noticed = {
        "kill-worker": Noticed(trials=20, p50=20.0, max=100.0, within=100.0),
        "kill-bus": Noticed(trials=20, p50=20.0, max=9_000.0, within=None),
        "freeze-engine": Noticed(trials=20, p50=5_000.0, max=6_001.0, within=6_000.0),
    }
    found = flaws(structs.replace(report(), noticed_ms=noticed))
    assert found == ["freeze-engine was noticed only 6,001 ms after it (promised: 6,000 ms)"]


def test_what_was_deleted_and_is_missed_too_long_is_a_flaw() -> None:
    found = flaws(structs.replace(report(), rebuilt_ms=(30.0, REBUILT_MS_MAX, REBUILT_MS_MAX + 1)))
    assert found == ["what was deleted by hand was there again only after 20,001 ms"]


def test_what_grows_is_a_flaw_and_has_its_row() -> None:
    flat = Trend(process="worker w1", figure="tasks", samples=60, first=9, mean=9, max=9, growth=8.0, growth_max=8.0)
    grown = structs.replace(report(), resources=(flat, structs.replace(flat, process="gateway g1", growth=9.0)))
    assert flaws(grown) == ["gateway g1: tasks grew by 9.0 (at most 8.0) in the second half"]
    assert tables(grown)[-1].row_count == 2


def test_a_mixed_load_has_all_kinds_of_requests_and_the_same_for_the_same_seed() -> None:
    asks = [Mixed(1)(number) for number in range(400)]
    assert asks == [Mixed(1)(number) for number in range(400)]
    assert {ask.tier for ask in asks} == set(TIERS)
    assert 0.15 < sum(not ask.stream for ask in asks) / len(asks) < 0.35
    assert 0.05 < sum(ask.leaves_after_s is not None for ask in asks) / len(asks) < 0.2


def test_the_tables_have_a_row_per_figure_and_per_fault() -> None:
    counts, gaps = tables(report())
    assert (counts.row_count, gaps.row_count) == (2 + len(FLAWS), 1)
