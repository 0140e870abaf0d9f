"""Which workers are refused claims for a while: one that fails each job at once would empty the queue into errors."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

WORKERS_MAX: Final = 10_000
"""Workers whose failures are remembered. A bus lets in no more members by default (`server.connections_max`); with more
workers than that, the one that failed first is judged afresh. Nothing is refused for it: no setting."""


@dataclass(slots=True)
class _Record:
    failed: deque[str]
    shunned_until: float = float("-inf")


class WorkerHealth:
    """The jobs that each worker failed of late, as this gateway sees them. Times are of its monotonic clock, in
    seconds."""

    def __init__(self, *, failures_max: int, shun_s: float) -> None:
        """A worker that fails `failures_max` jobs in a row, without a token of any, is shunned for `shun_s`; the next
        one that it fails after that shuns it again. A job counts once, however often it comes back: perhaps it is the
        job that is bad."""
        self._failures_max = failures_max
        self._shun_s = shun_s
        self._records: dict[str, _Record] = {}

    def failed(self, worker: str, job: str, now: float) -> None:
        """A claim of `job` by `worker` ended in an error of its engine, without a token."""
        record = self._records.setdefault(worker, _Record(deque(maxlen=self._failures_max)))
        if len(self._records) > WORKERS_MAX:
            del self._records[next(iter(self._records))]
        if job in record.failed:
            return
        record.failed.append(job)
        if len(record.failed) == self._failures_max:
            record.shunned_until = now + self._shun_s

    def worked(self, worker: str) -> None:
        """A claim of `worker` brought tokens: whatever was wrong is over."""
        self._records.pop(worker, None)

    def shuns(self, worker: str, now: float) -> bool:
        """Whether claims of `worker` are refused now."""
        record = self._records.get(worker)
        return record is not None and now < record.shunned_until
