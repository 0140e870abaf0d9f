"""The jobs in the slots of a replica: who got which slot, and which of them makes way for a higher band."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

from bus.work_queue import Delivery
from schemas.bands import Band
from schemas.job import Job
from worker.preemption import Resident, Rules, choose_victim, next_look_at
from worker.settings import WorkerSettings
from worker.slots import Slots

log = structlog.get_logger("worker.residents")


class Running(Protocol):
    """What is asked of the jobs that run."""

    def ahead_since(self, job: Job) -> float | None:
        """When the first new token of this attempt was made, by our clock; None while there is none, or it is over."""

    def preempt(self, job: Job) -> None:
        """Stop this attempt at once and hand it back: the engine has room for another."""


@dataclass(eq=False, slots=True)
class _Occupant:
    """A job in a slot; without `has_slot` it made way and is about to end."""

    delivery: Delivery
    began: float
    floor: bool
    has_slot: bool = True

    @property
    def band(self) -> Band:
        return self.delivery.address.band

    @property
    def slots(self) -> int:
        return self.delivery.job.sampling.choices


class Residents:
    """Every job that entered leaves once; its slots are free from then on, or from the moment in which it makes way."""

    def __init__(self, slots: Slots, *, running: Running, settings: WorkerSettings, clock: Callable[[], float]) -> None:
        self._slots = slots
        self._running = running
        self._rules = Rules(bands=settings.bands, preempt_after_s=settings.preempt_after_s)
        self._clock = clock
        self._occupants: dict[int, _Occupant] = {}
        self._numbers = itertools.count()

    def room(self, band: Band) -> int:
        """How many jobs of `band` could start now, with nobody making way."""
        return self._slots.room(band)

    @property
    def suspect(self) -> bool:
        """Whether a job with an engine's crash to its name runs here that has not got past the place of the crash."""
        return any(
            occupant.delivery.job.suspect and self._running.ahead_since(occupant.delivery.job) is None
            for occupant in self._occupants.values()
        )

    def enter(self, delivery: Delivery, *, floor: bool) -> int:
        """Take a slot for each choice of a job, for which there is room; returns its key. `floor`: it was owed, and
        stays."""
        key = next(self._numbers)
        occupant = self._occupants[key] = _Occupant(delivery, self._clock(), floor)
        self._slots.take(occupant.band, occupant.slots)
        return key

    def leave(self, key: int) -> None:
        """The job is over."""
        occupant = self._occupants.pop(key)
        if occupant.has_slot:
            self._slots.release(occupant.band, occupant.slots)

    def would_make_room(self, band: Band) -> bool:
        """Whether a job may be stopped now whose slot would be room for one of `band`, which has none."""
        return self._victim(band) is not None

    def make_room(self, delivery: Delivery) -> None:
        """Stop a job for this one, if one may be stopped, and free its slot in the same breath."""
        victim = self._victim(delivery.address.band)
        if victim is None:
            return
        occupant = self._occupants[victim.key]
        job, since_s = occupant.delivery.job, round(self._clock() - occupant.began, 3)
        self._running.preempt(job)
        occupant.has_slot = False
        self._slots.release(occupant.band, occupant.slots)
        log.info("preempted", job=job.id, attempt=job.attempt, band=job.band, after_s=since_s, by=delivery.job.id)

    def next_look_at(self) -> float | None:
        """When to ask again who may be stopped for a band without room; None where time alone changes nothing."""
        full = [band for band in self._rules.bands if not self.room(band)]
        present = self._present() if full else []
        now = self._clock()
        looks = [look for band in full if (look := next_look_at(band, present, self._rules, now=now)) is not None]
        return min((look for look in looks if look > now), default=None)

    def _victim(self, band: Band) -> Resident | None:
        victim = choose_victim(band, self._present(), self._rules, now=self._clock())
        if victim is None:
            return None
        slots = self._occupants[victim.key].slots
        return victim if self._slots.room_without(victim.band, band=band, slots=slots) else None

    def _present(self) -> list[Resident]:
        """Those that may have to make way some time."""
        return [
            Resident(
                key=key,
                band=occupant.band,
                began=occupant.began,
                ahead_since=self._running.ahead_since(occupant.delivery.job),
                floor=occupant.floor,
            )
            for key, occupant in self._occupants.items()
            if occupant.has_slot and not occupant.floor and self._rules.bands[occupant.band].preemptible
        ]
