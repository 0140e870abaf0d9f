"""What was seen of a run, and the report made of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

from tools.chaos.faults import Fault
from tools.chaos.flatness import Trend
from tools.chaos.gaps import Hit, gaps_by_fault, noticed_by_fault
from tools.chaos.load import REFUSALS_MAX, Results
from tools.chaos.report import ChaosReport
from tools.chaos.rest import Rest
from tools.chaos.settings import ChaosSettings, Trials
from tools.chaos.verdict import Fate


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Everything that was seen. `processes_left` is known last."""

    results: Results
    hits: Sequence[Hit]
    left_out: int
    noticed_s: Mapping[Fault, Sequence[float]]
    claims_lost: Mapping[Fault, int]
    slots_free_s: Sequence[float]
    rebuilt_s: Sequence[float]
    trends: Sequence[Trend]
    began: datetime
    began_at: float
    wall_s: float
    rest: Rest
    processes_left: int = 0


def report_of(outcome: Outcome, settings: ChaosSettings, *, machine: Mapping[str, object]) -> ChaosReport:
    """The report."""
    results = outcome.results
    fates = results.fates
    run: dict[str, object] = {
        "faults": dict(Counter(str(hit.fault) for hit in outcome.hits)),
        "faults_left_out": outcome.left_out,
        "began": outcome.began.isoformat(timespec="milliseconds"),
        "timeline": [f"{hit.at - outcome.began_at:.3f} s {hit.fault} {hit.target}" for hit in outcome.hits],
        "sent_again": dict(results.sent_again.most_common()),
        "tokens": results.tokens,
        "wall_s": round(outcome.wall_s, 3),
        "problems": results.examples,
    }
    if isinstance(settings.extent, Trials):
        run["claims_lost"] = {str(fault): count for fault, count in outcome.claims_lost.items()}
    return ChaosReport(
        requests=fates.total(),
        completed=fates[Fate.COMPLETED],
        failed=fates[Fate.FAILED],
        hung=fates[Fate.HUNG],
        duplicated_tokens=results.duplicated_tokens,
        missing_tokens=results.missing_tokens,
        workers_missing=outcome.rest.workers_missing,
        slots_leaked=outcome.rest.slots_leaked,
        jobs_left=outcome.rest.jobs_left,
        processes_left=outcome.processes_left,
        client_gap_ms=gaps_by_fault(outcome.hits, results.streams),
        noticed_ms=noticed_by_fault(outcome.noticed_s, within_ms=settings.noticed_within_ms),
        slots_free_ms=tuple(round(free_s * 1e3, 1) for free_s in outcome.slots_free_s),
        rebuilt_ms=tuple(round(rebuilt_s * 1e3, 1) for rebuilt_s in outcome.rebuilt_s),
        resources=tuple(outcome.trends),
        environment=dict(machine),
        settings={**asdict(settings), "refusals_max": REFUSALS_MAX, "run": run},
    )
