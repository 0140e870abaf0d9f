"""One model on this worker: its engine process through loading, serving, crashing and ending."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import structlog

from schemas.errors import ErrorCode, ErrorInfo, MeshError
from schemas.events import Event, EventKind
from schemas.job import Job
from schemas.status import PREFIXES_MAX, ReplicaState, ReplicaStatus, ServerLoad
from worker.claims import ClaimEnd, Claims
from worker.engines.base import Capabilities, Held, LoadError, LoadProgress, Step, Submit
from worker.engines.host import EngineProcess, start_engine
from worker.engines.setup import Setup, as_it_was
from worker.frame_writer import FrameWriter
from worker.settings import WorkerSettings
from worker.slots import Slots
from worker.speed import speed_class
from worker.state import check_transition
from worker.watchdog import Watchdog, memory_limit

log = structlog.get_logger("worker.replica")


class Replica:
    """`load` it, `watch` it while it serves, `close` it. `on_change()` is called whenever its status changes."""

    def __init__(
        self,
        model: str,
        setup: Setup,
        *,
        settings: WorkerSettings,
        clock: Callable[[], float],
        on_change: Callable[[], None],
        on_progress: Callable[[LoadProgress], None],
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.model = model
        self.claims = Claims(retained_for_s=settings.retained_for_s, retained_bytes_max=settings.retained_bytes_max)
        self.writer = FrameWriter(self.claims, clock=clock, abort=self._abort, backlog_max=settings.step_backlog_max)
        self._setup = setup
        self._settings = settings
        self._clock = clock
        self._on_change = on_change
        self._on_progress = on_progress
        self._on_event = on_event
        self._state = ReplicaState.ABSENT
        self._reason: str | None = None
        self._engine: EngineProcess | None = None
        self._capabilities: Capabilities | None = None
        self._slots: Slots | None = None
        self._crashes: deque[float] = deque()
        self._load: ServerLoad | None = None
        self._steps = 0
        self._unanswered = False
        self._watchdog: Watchdog | None = None
        self._prefixes: tuple[str, ...] = ()

    @property
    def slots(self) -> Slots:
        """The slots of the loaded engine. Not to be asked before `load` returned."""
        assert self._slots is not None, "slots are known once the engine is loaded"
        return self._slots

    @property
    def capabilities(self) -> Capabilities:
        """What the engine said of itself when it was last loaded. Not to be asked before `load` returned."""
        assert self._capabilities is not None, "capabilities are known once the engine is loaded"
        return self._capabilities

    @property
    def state(self) -> ReplicaState:
        """Where this replica is in its life."""
        return self._state

    @property
    def stands_still(self) -> bool:
        """Whether the engine owes a step for `engine_still_s`: a job given to it now would lose an attempt."""
        return self._watchdog is not None and self._watchdog.still_for_s >= self._settings.engine_still_s

    @property
    def reason(self) -> str | None:
        """Why it failed, where it did."""
        return self._reason

    async def load(self) -> None:
        """Start the engine and have it generate for real; after a crash, with the slots and context that it had. Raises
        `LoadError` with one line for people."""
        if self._state is not ReplicaState.LOADING:
            self._enter(ReplicaState.LOADING)
        try:
            engine = await start_engine(
                self._setup,
                on_step=self._note_step,
                on_progress=self._progress,
                on_load=self._note_load,
                load_timeout_s=self._settings.engine_load_timeout_s,
                backlog_bytes_max=self._settings.engine_backlog_bytes_max,
            )
        except LoadError as error:
            self._enter(ReplicaState.FAILED, reason=str(error), stderr=getattr(error, "stderr", ()))
            raise
        self._engine = engine
        self._capabilities = engine.capabilities
        self._setup = as_it_was(self._setup, engine.capabilities)
        if self._slots is None:
            self._slots = Slots(engine.capabilities.slots, self._settings.bands)
        if self._state is ReplicaState.LOADING:
            self._enter(ReplicaState.WARMING)
        self._enter(ReplicaState.READY)

    async def watch(self) -> None:
        """Restart the engine whenever it dies; returns when it has died too often, or was closed."""
        while self._engine is not None:
            engine = self._engine
            how = await self._guard(engine)
            if self._is(ReplicaState.STOPPING):
                return
            log.error("engine ended", model=self.model, how=how, stderr=engine.last_words)
            self._on_event(
                Event(EventKind.ENGINE, state="ended", model=self.model, reason=how, stderr=engine.last_words)
            )
            self._lose_claims()
            if self._is(ReplicaState.DRAINING) or not await self._restart(how, stderr=engine.last_words):
                return

    def submit(self, command: Submit) -> None:
        """Hand a request to the engine. Raises `MeshError` when it cannot take it."""
        if self._engine is None:
            raise MeshError(ErrorCode.DRAINING, "the engine is not running")
        self._engine.submit(command)
        self._unanswered = True

    def drain(self) -> None:
        """Take no more jobs."""
        if self._state is ReplicaState.READY:
            self._enter(ReplicaState.DRAINING)

    def hand_back(self) -> None:
        """End all running claims so that they continue elsewhere."""
        for claim in self.claims:
            self._abort(claim.key)
            error = ErrorInfo(ErrorCode.DRAINING, "the worker is stopping")
            self.writer.fail(claim, error, retryable=True, how=ClaimEnd.HANDED_BACK)

    def ahead_since(self, job: Job) -> float | None:
        """When this attempt got ahead here for the first time; None while it has not, or when it is over.

        Never of an engine that does not resume: what it has begun would be lost if it made way.
        """
        if not self.capabilities.resumes:
            return None
        claim = self.claims.of(job)
        return claim.ahead_since if claim is not None else None

    def preempt(self, job: Job) -> None:
        """Stop this attempt, so that another job has its place, and hand it back: it continues later. No effect when it
        is over."""
        claim = self.claims.of(job)
        if claim is not None:
            self._abort(claim.key)
            error = ErrorInfo(ErrorCode.PREEMPTED, "a request of a higher band took the slot")
            self.writer.fail(claim, error, retryable=True, how=ClaimEnd.HANDED_BACK)

    async def close(self) -> None:
        """End the engine process, within its grace time."""
        if self._state is not ReplicaState.ABSENT:
            self._enter(ReplicaState.STOPPING)
        if self._engine is not None:
            settings = self._settings
            await self._engine.close(grace_s=settings.engine_close_s, terminate_s=settings.engine_terminate_s)
            self._engine = None
        if self._state is ReplicaState.STOPPING:
            self._enter(ReplicaState.ABSENT)

    def status(self) -> ReplicaStatus:
        """What to tell the mesh. Before the first load the slots and context are not known and given as 1."""
        capabilities, slots = self._capabilities, self._slots
        if capabilities is None or slots is None:
            return ReplicaStatus(
                model=self.model, state=self._state, engine="", slots=1, busy=0, context=1, reason=self._reason
            )
        return ReplicaStatus(
            model=self.model,
            state=self._state,
            engine=capabilities.engine,
            slots=slots.total,
            busy=slots.busy,
            shares=slots.shares,
            context=capabilities.context,
            speed_class=speed_class(capabilities.decode_tokens_per_s),
            decode_tokens_per_s=round(capabilities.decode_tokens_per_s, 1),
            build=capabilities.build,
            engine_pid=self._engine.pid if self._engine is not None else None,
            reason=self._reason,
            load=self._load,
            prefixes=self._prefixes,
        )

    async def _guard(self, engine: EngineProcess) -> str:
        """How the engine ended; one that hangs or swells is killed."""
        settings = self._settings
        limit = memory_limit(
            engine.memory_bytes or 0,
            growth_bytes=engine.capabilities.growth_bytes,
            growth_bytes_max=settings.engine_growth_bytes_max,
            given=settings.engine_memory_bytes_max,
        )
        watchdog = self._watchdog = Watchdog(
            interval_s=settings.engine_look_interval_s,
            step_limit_s=settings.engine_step_limit_s,
            memory_bytes_max=limit,
        )
        reason = ""
        while True:
            try:
                async with asyncio.timeout(settings.engine_look_interval_s):
                    ended = await engine.wait()
            except TimeoutError:
                reason = reason or self._look(engine, watchdog)
                continue
            return f"{ended}: killed, for {reason}" if reason else str(ended)

    def _look(self, engine: EngineProcess, watchdog: Watchdog) -> str:
        # From an engine that hangs, gateways take their requests away sooner than it is killed.
        running, stood_still = len(self.claims) > 0 or self._unanswered, self.stands_still
        reason = watchdog.look(self._clock(), steps=self._steps, running=running, memory_bytes=engine.memory_bytes)
        if stood_still and not self.stands_still:
            # Jobs were left to others meanwhile.
            self._on_change()
        if reason is None:
            return ""
        log.error("engine killed", model=self.model, reason=reason)
        self._on_event(Event(EventKind.ENGINE, state="killed", model=self.model, reason=reason))
        engine.kill()
        return reason

    async def _restart(self, ended: str, *, stderr: tuple[str, ...]) -> bool:
        now = self._clock()
        self._crashes.append(now)
        while now - self._crashes[0] > self._settings.engine_restart_window_s:
            self._crashes.popleft()
        self._engine = self._watchdog = None
        self._unanswered = False
        self._prefixes = ()
        self._load = None
        if len(self._crashes) >= self._settings.engine_restarts_max:
            window_s = self._settings.engine_restart_window_s
            times = f"{len(self._crashes)} times in {window_s:g} s (engine_restarts_max)"
            reason = f"the engine ended {times}, the last time with {ended}"
            self._enter(ReplicaState.FAILED, reason=reason, stderr=stderr)
            return False
        # From now on no job is taken: it would fail at once, and with it one of the few attempts that it has.
        self._enter(ReplicaState.LOADING)
        await asyncio.sleep(self._settings.engine_restart_delay_s * 2 ** (len(self._crashes) - 1))
        try:
            await self.load()
        except LoadError as error:
            log.error("engine cannot be restarted", model=self.model, reason=str(error))
            return False
        return True

    def _is(self, state: ReplicaState) -> bool:
        return self._state is state

    def _lose_claims(self) -> None:
        error = ErrorInfo(ErrorCode.ENGINE_CRASHED, "the engine crashed")
        for claim in self.claims:
            self.writer.fail(claim, error, retryable=True)

    def _abort(self, key: int) -> None:
        if self._engine is not None:
            self._engine.abort(key)
            self._unanswered = True

    def _progress(self, progress: LoadProgress) -> None:
        if progress.stage.startswith("warm") and self._state is ReplicaState.LOADING:
            self._enter(ReplicaState.WARMING)
        self._on_progress(progress)

    def _note_step(self, step: Step) -> None:
        self._steps = step.number
        self._unanswered = False
        if step.events and isinstance(held := step.events[-1], Held):
            self._prefixes = held.prefixes[:PREFIXES_MAX]
        self.writer.on_step(step)

    def _note_load(self, load: ServerLoad) -> None:
        # Told with the next beat: it changes all the time.
        self._load = load

    def _enter(self, state: ReplicaState, *, reason: str | None = None, stderr: tuple[str, ...] = ()) -> None:
        self._state = check_transition(self._state, state)
        self._reason = reason
        log.info("replica", model=self.model, state=state, reason=reason)
        self._on_event(Event(EventKind.REPLICA, state=state, model=self.model, reason=reason or "", stderr=stderr))
        self._on_change()
