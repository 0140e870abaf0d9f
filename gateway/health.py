"""Which workers are refused claims for a while: one that fails each job at once would empty the queue into errors."""

from __future__ import annotations

from dataclasses import dataclass

WORKERS_MAX = 10_000


@dataclass(slots=True)
class _Record:
    failures: int = 0
    shunned_until: float = float("-inf")


class WorkerHealth:
    """Failures in a row by worker, as this gateway sees them. Times are of its monotonic clock, in seconds."""

    def __init__(self, *, failures_max: int, shun_s: float) -> None:
        """A worker that fails `failures_max` claims in a row, without a token of any, is shunned for `shun_s`; the next
        failure after that shuns it again."""
        self._failures_max = failures_max
        self._shun_s = shun_s
        self._records: dict[str, _Record] = {}

    def failed(self, worker: str, now: float) -> bool:
        """A claim of `worker` ended in an error of its engine, without a token. Says whether it is shunned now."""
        record = self._records.setdefault(worker, _Record())
        if len(self._records) > WORKERS_MAX:
            del self._records[next(iter(self._records))]
        record.failures += 1
        if record.failures >= self._failures_max:
            record.shunned_until = now + self._shun_s
        return record.failures >= self._failures_max

    def worked(self, worker: str) -> None:
        """A claim of `worker` brought tokens: whatever was wrong is over."""
        self._records.pop(worker, None)

    def shuns(self, worker: str, now: float) -> bool:
        """Whether claims of `worker` are refused now."""
        record = self._records.get(worker)
        return record is not None and now < record.shunned_until
