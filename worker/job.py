"""One delivery, from the queue to its end: claim, run, report."""

from __future__ import annotations

import enum
import secrets
from collections.abc import Callable

import structlog

from bus.claim_channel import ClaimClient, GatewayGone
from bus.connection import BusUnavailable
from bus.work_queue import Delivery
from schemas.errors import ErrorInfo, MeshError
from schemas.job import SHUNNED, Claim, Job, Refused
from worker.claims import ClaimEnd, Claims
from worker.engines.base import Submit
from worker.frame_writer import FrameWriter

log = structlog.get_logger("worker.job")


class Disposition(enum.StrEnum):
    """What became of a delivery: one of these, once. The first four never reached the engine."""

    GATEWAY_GONE = "gateway_gone"
    UNANSWERED = "unanswered"
    REFUSED = "refused"
    SHUNNED = "shunned"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    HANDED_BACK = "handed_back"


_DISPOSITIONS = {
    ClaimEnd.DONE: Disposition.DONE,
    ClaimEnd.FAILED: Disposition.FAILED,
    ClaimEnd.CANCELLED: Disposition.CANCELLED,
    ClaimEnd.HANDED_BACK: Disposition.HANDED_BACK,
    ClaimEnd.GATEWAY_GONE: Disposition.GATEWAY_GONE,
}


class JobRunner:
    """Runs deliveries on one engine. `submit` hands a request to it and raises `MeshError` when it cannot."""

    def __init__(
        self,
        *,
        instance: str,
        verdicts: ClaimClient,
        claims: Claims,
        writer: FrameWriter,
        submit: Callable[[Submit], None],
        on_shunned: Callable[[], None],
    ) -> None:
        """`on_shunned()`: a gateway refuses our claims for a while; the job is others' to take."""
        self._instance = instance
        self._verdicts = verdicts
        self._claims = claims
        self._writer = writer
        self._submit = submit
        self._on_shunned = on_shunned

    async def run(self, delivery: Delivery) -> Disposition:
        """See it through. The delivery is settled (ack, nak or term) and the claim, if granted, has ended on return.

        Raises `BusUnavailable` when a job that was not claimed could not be given back: JetStream hands it out again.
        """
        job = delivery.job
        claim = Claim(job=job.id, attempt=job.attempt, claim_id=secrets.token_hex(8), instance=self._instance)
        try:
            verdict = await self._verdicts.ask(job.gateway, claim)
        except GatewayGone:
            await delivery.term()
            return Disposition.GATEWAY_GONE
        except BusUnavailable:
            await delivery.nak()
            return Disposition.UNANSWERED
        if isinstance(verdict, Refused):
            if verdict.reason == SHUNNED:
                self._on_shunned()
                await delivery.nak()
                return Disposition.SHUNNED
            await delivery.term()
            return Disposition.REFUSED
        return await self._run_claimed(delivery, job, verdict.handle)

    async def _run_claimed(self, delivery: Delivery, job: Job, handle: int) -> Disposition:
        claim = self._claims.open(job, handle)
        try:
            self._submit(
                Submit(
                    key=claim.key,
                    prompt=job.prompt,
                    sampling=job.sampling,
                    created=job.created,
                    resume=job.resume,
                    prefix_hashes=job.prefix_hashes,
                )
            )
        except MeshError as error:
            info = ErrorInfo(code=error.code, message=error.message, param=error.param)
            self._writer.fail(claim, info, retryable=error.traits.retryable)
        try:
            await delivery.ack()
        except BusUnavailable as error:
            # The claim runs on. JetStream hands the job out again, and the gateway refuses whoever claims it.
            log.warning("job not acknowledged", job=job.id, reason=str(error))
        return _DISPOSITIONS[await claim.ended]
