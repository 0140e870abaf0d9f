"""`infermesh chaos`: its schedule, its judgement of single streams and its gaps, from given facts."""

from __future__ import annotations

import json
from itertools import islice, pairwise

import pytest

from tools.bench.answer import Answer, Break
from tools.chaos.faults import JITTER, Fault, parse_faults, pick, plan
from tools.chaos.gaps import Gap, Hit, gaps_by_fault
from tools.chaos.report import FLAWS, ChaosReport, flaws, tables
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


def judged(answer: Answer, *, tokens: int = 3, left: bool = False, gateway_killed: bool = False) -> Verdict:
    return verdict(answer, tokens=tokens, left=left, gateway_killed=gateway_killed)


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
        assert gaps_by_fault(hits, streams) == {"kill-worker": Gap(p50=600.0, max=4_000.0)}

    def test_a_silence_before_the_hit_or_after_the_next_one_is_not_its_own(self) -> None:
        hits = [Hit(10.0, Fault.KILL_WORKER, "w1"), Hit(12.0, Fault.KILL_BUS, "bus")]
        gaps = gaps_by_fault(hits, [[1.0, 9.0, 10.1, 11.0, 12.1, 20.0]])
        assert gaps == {"kill-worker": Gap(p50=1_100.0, max=1_100.0), "kill-bus": Gap(p50=7_900.0, max=7_900.0)}

    def test_streams_that_did_not_run_then_say_nothing(self) -> None:
        hits = [Hit(10.0, Fault.KILL_BUS, "bus")]
        assert gaps_by_fault(hits, [[1.0, 2.0], [11.0, 12.0], []]) == {"kill-bus": Gap(p50=None, max=None)}

    def test_arrivals_and_hits_in_order_are_all_it_takes(self) -> None:
        arrivals = [number / 10 for number in range(100)]
        hits = [Hit(at, Fault.KILL_WORKER, "w1") for at in (1.05, 5.05, 9.05)]
        longest = max(later - earlier for earlier, later in pairwise(arrivals)) * 1e3
        assert gaps_by_fault(hits, [arrivals])["kill-worker"] == Gap(p50=100.0, max=round(longest, 1))


def report(**counts: int) -> ChaosReport:
    fields = dict.fromkeys(("requests", "completed", *FLAWS), 0) | counts
    gaps = {"kill-bus": Gap(p50=1.0, max=None)}
    settings: dict[str, object] = {"run": {"faults": {"kill-bus": 2}}}
    return ChaosReport(**fields, client_gap_ms=gaps, environment={}, settings=settings)


@pytest.mark.parametrize("flaw", FLAWS)
def test_whatever_is_wrong_or_left_over_is_a_flaw(flaw: str) -> None:
    assert flaws(report(requests=5, completed=5)) == []
    assert flaws(report(**{flaw: 2})) == [f"{flaw}: 2"]


def test_the_tables_have_a_row_per_figure_and_per_fault() -> None:
    counts, gaps = tables(report())
    assert (counts.row_count, gaps.row_count) == (2 + len(FLAWS), 1)
