"""The worker's side of an engine process: start it, pass commands, deliver its reports, notice its end, end it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import structlog

from schemas.status import ServerLoad
from worker.engines import refused_instructions
from worker.engines.base import Abort, Capabilities, LoadError, LoadProgress, Step, Submit
from worker.engines.conversation import Conversation, EngineDied, Exit
from worker.engines.found_threads import note_found_threads, with_found_threads
from worker.engines.setup import OpenAISetup, Setup, without_extra_instructions
from worker.memory import anonymous_bytes
from worker.settings import WorkerSettings

PLAINER: Final = "without repacked weights (this CPU refused their instructions)"
"""What an engine's build says when it was started without extra instructions."""
KILL_GRACE_S: Final = 5.0
"""After SIGKILL only the kernel stands between a process and its end: nobody can give it less time, or needs more."""

_ENVIRONMENT_NAMES: Final = frozenset({"HOME", "LANG", "LANGUAGE", "PATH", "TMPDIR", "TZ", "VIRTUAL_ENV"})
BARRIER_SPINS: Final = 300
"""Turns that a compute thread waits at a barrier before it sleeps."""
_WAIT_POLICY_NAMES: Final = frozenset({"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"})
_ENVIRONMENT_PREFIXES: Final = (
    *("LC_", "PYTHON", "LD_LIBRARY_", "DYLD_", "LLAMA_CPP_LIB"),
    *("OMP_", "GOMP_", "KMP_", "GGML_", "CUDA_", "NVIDIA_", "HIP_", "ROCR_"),
)

log = structlog.get_logger("engine")


class EngineProcess:
    """A loaded engine in a process of its own. Made by `EngineProcess.start`; belongs to one event loop.

    It ends exactly once; every `Step` has been delivered when `wait` returns. After the end `submit` raises and `abort`
    does nothing.
    """

    def __init__(self, conversation: Conversation, *, capabilities: Capabilities) -> None:
        self._conversation = conversation
        self.capabilities = capabilities
        self.pid = conversation.transport.get_pid()

    @classmethod
    async def start(
        cls,
        setup: Setup,
        *,
        on_step: Callable[[Step], None],
        on_progress: Callable[[LoadProgress], None] = lambda progress: None,
        on_load: Callable[[ServerLoad], None] = lambda load: None,
        load_timeout_s: float = WorkerSettings.engine_load_timeout_s,
        backlog_bytes_max: int = WorkerSettings.engine_backlog_bytes_max,
    ) -> EngineProcess:
        """Start a process and load `setup` in it. `backlog_bytes_max`: of commands that the engine may leave unread
        before `submit` refuses more.

        The callbacks run in the event loop and must not raise: an engine whose report was not taken is killed. Raises
        `LoadError` with the engine's reason, `EngineDied` when it ended without one. Cancelled or failed, it leaves no
        process behind. On Linux the engine dies with the *thread* that calls this: call it from one that lasts.
        """
        _, conversation = await asyncio.get_running_loop().subprocess_exec(
            lambda: Conversation(on_step, on_progress, on_load, backlog_bytes_max=backlog_bytes_max),
            *(sys.executable, "-P", "-m", "worker.engines.process"),
            env=_environment(),
            # A signal to the worker's process group, from a terminal or a service manager, is the worker's to answer.
            start_new_session=True,
        )
        try:
            if not conversation.closing:
                conversation.send(setup)
            async with asyncio.timeout(load_timeout_s):
                capabilities = await conversation.loaded
        except BaseException as error:
            await conversation.end([(conversation.transport.kill, KILL_GRACE_S)])
            if isinstance(error, TimeoutError):
                limit = f"{load_timeout_s:g} s (engine_load_timeout_s)"
                raise LoadError(f"the engine was not ready within {limit}") from None
            raise
        return cls(conversation, capabilities=capabilities)

    def submit(self, command: Submit) -> None:
        """Pass a request on; its events follow by `on_step`.

        Raises `MeshError`, and has passed nothing on then: `overloaded` when the engine leaves too much unread,
        `body_too_large` for a request beyond the pipe's limit, `invalid_value` for one with an integer beyond 64 bits,
        `draining` when the process has ended or is closing.
        """
        # From here on the engine's stderr may quote prompts.
        self._conversation.stderr.forget()
        self._conversation.send(command, bounded=True)

    def abort(self, key: int) -> None:
        """Have the engine forget `key`. Events already under way may still come; a caller aborts a key once."""
        if not self._conversation.closing:
            # Beyond the backlog's limit too: there is at most one small abort for each request it let through.
            self._conversation.send(Abort(key))

    async def wait(self) -> Exit:
        """How the process ended, once it has. Cancelling the wait changes nothing."""
        return await asyncio.shield(self._conversation.ended)

    def kill(self) -> None:
        """End the process at once, as a crash would; `wait` tells."""
        with contextlib.suppress(ProcessLookupError):
            self._conversation.transport.kill()

    @property
    def last_words(self) -> tuple[str, ...]:
        """The last lines of its stderr, as far as they can hold no prompt."""
        return self._conversation.stderr.lines()

    @property
    def memory_bytes(self) -> int | None:
        """Memory that is its own; None where the system does not tell. See `worker.memory.anonymous_bytes`."""
        return anonymous_bytes(self.pid)

    async def close(
        self,
        *,
        grace_s: float = WorkerSettings.engine_close_s,
        terminate_s: float = WorkerSettings.engine_terminate_s,
    ) -> None:
        """End the process: end of input, after `grace_s` SIGTERM, after `terminate_s` SIGKILL. What runs in it is lost.

        Returns when it is gone; cancelled, it kills at once.
        """
        transport = self._conversation.transport
        await self._conversation.end(
            [
                (self._conversation.end_input, grace_s),
                (transport.terminate, terminate_s),
                (transport.kill, KILL_GRACE_S),
            ]
        )


async def start_engine(
    setup: Setup,
    *,
    on_step: Callable[[Step], None],
    on_progress: Callable[[LoadProgress], None] = lambda progress: None,
    on_load: Callable[[ServerLoad], None] = lambda load: None,
    load_timeout_s: float = WorkerSettings.engine_load_timeout_s,
    backlog_bytes_max: int = WorkerSettings.engine_backlog_bytes_max,
) -> EngineProcess:
    """`EngineProcess.start`, and after an illegal instruction once more on plainer ones; where those worked before, on
    them at once. The engine's `capabilities.build` says so then. What it found out about threads is remembered.

    `load_timeout_s` holds for each start, and is more than the time that the engine itself gives a server.
    """
    _check_time(setup, load_timeout_s)

    async def start(chosen: Setup) -> EngineProcess:
        engine = await EngineProcess.start(
            with_found_threads(chosen),
            on_step=on_step,
            on_progress=on_progress,
            on_load=on_load,
            load_timeout_s=load_timeout_s,
            backlog_bytes_max=backlog_bytes_max,
        )
        note_found_threads(chosen, engine.capabilities)
        return engine

    plainer = without_extra_instructions(setup)
    known = plainer is not None and refused_instructions.is_remembered()
    if not known:
        try:
            return await start(setup)
        except EngineDied as died:
            log.error("engine_died_while_loading", exit=str(died.exit), stderr=died.stderr)
            if plainer is None or died.exit.returncode != -signal.SIGILL:
                raise
        log.warning("engine_restart_without_extra_instructions")
    assert plainer is not None, "only a setup that has a plainer one is known to need it"
    engine = await start(plainer)
    if not known:
        refused_instructions.remember()
    build = f"{engine.capabilities.build}, {PLAINER}"
    engine.capabilities = msgspec.structs.replace(engine.capabilities, build=build)
    return engine


def _check_time(setup: Setup, load_timeout_s: float) -> None:
    """Raise `LoadError` where the engine would be given up before it has given up its server, and said why."""
    if isinstance(setup, OpenAISetup) and setup.settings.ready_within_s >= load_timeout_s:
        within = f"engine.ready_within_s ({setup.settings.ready_within_s:g})"
        raise LoadError(f"{within} must be less than engine_load_timeout_s ({load_timeout_s:g})")


def _environment() -> dict[str, str]:
    """What an engine needs of our environment, and nothing that could be a credential."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in _ENVIRONMENT_NAMES or name.startswith(_ENVIRONMENT_PREFIXES)
    }
    if not _WAIT_POLICY_NAMES & environment.keys():
        # Compute threads meet at hundreds of barriers per token. Spinning there without end, as libgomp does by
        # itself, they take everybody's time slices, also each other's, as soon as more threads want to run than there
        # are cores; sleeping at once costs an idle machine more than half of its speed. docs/benchmarks.md has the
        # figures.
        environment["GOMP_SPINCOUNT"] = str(BARRIER_SPINS)
    # Else llama.cpp starts a debugger on itself when it fails: its end is noticed a second later, and whatever it held,
    # prompts too, has been in that one's hands.
    environment["GGML_NO_BACKTRACE"] = "1"
    # The same packages that we run from, wherever that is.
    root = str(Path(__file__).resolve().parents[2])
    inherited = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([root, inherited]) if inherited else root
    return environment
