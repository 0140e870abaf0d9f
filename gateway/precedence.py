"""Who gets the next room in a full stream: what was admitted once, before what comes anew."""

from __future__ import annotations

from schemas.bands import Band
from schemas.errors import ErrorCode, MeshError
from schemas.job import Job


class Precedence:
    """The requests of this gateway whose continuation found no room in the bytes of its band's stream, which the lanes
    share. While one of them waits, the gateway admits nothing new into that band: whoever comes first to the room that
    a worker makes would have it, and a continuation asks only now and then."""

    def __init__(self) -> None:
        self._waiting: dict[Band, set[str]] = {}

    def wait(self, job: Job) -> None:
        """A continuation of `job` found no room."""
        self._waiting.setdefault(job.band, set()).add(job.id)

    def settle(self, job: Job) -> None:
        """It has found some, or is over."""
        waiting = self._waiting.get(job.band)
        if waiting is not None:
            waiting.discard(job.id)

    def refusal(self, band: Band) -> MeshError | None:
        """Why nothing new may enter `band` now, or None if it may."""
        waiting = len(self._waiting.get(band, ()))
        if not waiting:
            return None
        message = f"the band '{band}' is full (queue.stream_bytes_max), and {waiting} requests continue first"
        return MeshError(ErrorCode.QUEUE_FULL, message, retry_after_s=5)
