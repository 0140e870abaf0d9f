"""What every process of the mesh does around its work: logs, limits, signals, and errors as one line."""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn

import click
import orjson
import structlog
import uvloop

from bus.connection import BusRefused, BusUnavailable
from bus.credentials import IdentityError
from bus.name import NameTaken
from bus.server_child import ServerError
from bus.topology import TopologyRefused
from gateway.listening import PortUnavailable
from schemas.names import InvalidName
from tools.supervisor.mesh import MeshFailed
from tools.supervisor.reports import Failed, Reporter
from worker.engines.base import LoadError
from worker.models import ModelFileMissing
from worker.service import WorkerFailed

FOR_PEOPLE: Final = (
    BusRefused,
    BusUnavailable,
    IdentityError,
    InvalidName,
    LoadError,
    ModelFileMissing,
    NameTaken,
    PortUnavailable,
    MeshFailed,
    ServerError,
    TopologyRefused,
    WorkerFailed,
)
"""Errors whose text is one line that says what to do."""

OPEN_FILES_MIN: Final = 65_536
GC_THRESHOLDS: Final = (50_000, 20, 20)

log_level = click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", help="What to log."
)


def configure_logs(level: str) -> None:
    """Structured log lines on stderr: JSON, or coloured text on a terminal."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if sys.stderr.isatty():
        renderer: list[Any] = [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
        factory: Any = structlog.PrintLoggerFactory(sys.stderr)
    else:
        renderer = [structlog.processors.JSONRenderer(_to_json)]
        factory = structlog.BytesLoggerFactory(sys.stderr.buffer)
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=factory,
        cache_logger_on_first_use=True,
    )


def raise_file_limit() -> None:
    """Thousands of streams need as many descriptors; the usual soft limit of 1,024 is a leftover."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_MIN if hard == resource.RLIM_INFINITY else min(OPEN_FILES_MIN, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def forbid_core_dumps() -> None:
    """No core of this process or its children: prompts and answers are in their memory."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def relax_garbage_collection() -> None:
    """Leave what exists now out of collections for good, and collect rarely: what a request leaves behind is freed by
    reference counts, and a collection every 700 allocations would look at all open streams again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def run_until_signal(work: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run `work(stop)` on uvloop; SIGINT and SIGTERM set `stop`, a second one cancels the work. Errors for people end
    the process with one line."""
    raise_file_limit()
    forbid_core_dumps()
    relax_garbage_collection()
    try:
        uvloop.run(_with_signals(work))
    except BaseException as error:
        line = one_line(error)
        if line is None:
            raise
        fail(line)


def one_line(error: BaseException) -> str | None:
    """The text for people in `error` or in the group of errors it is; None if there is none."""
    return next((str(leaf) for leaf in _leaves(error) if isinstance(leaf, FOR_PEOPLE)), None)


@contextmanager
def failure_reported(reporter: Reporter) -> Iterator[None]:
    """Tell the supervisor, if there is one, the error for people that ends this process."""
    try:
        yield
    except BaseException as error:
        if line := one_line(error):
            reporter.send(Failed(reason=line))
        raise


def fail(message: str) -> NoReturn:
    """End the process with one line on stderr and exit code 1."""
    click.echo(f"infermesh: {message}", err=True)
    sys.exit(1)


async def _with_signals(work: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    running = asyncio.current_task()
    assert running is not None, "a coroutine runs in a task"

    def on_signal() -> None:
        if stop.is_set():
            running.cancel()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        await work(stop)
    except asyncio.CancelledError:
        fail("ended at once, as asked twice")


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _to_json(event: dict[str, Any], **_: Any) -> bytes:
    return orjson.dumps(event, default=str)
