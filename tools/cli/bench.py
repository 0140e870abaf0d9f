"""`infermesh bench`: what the mesh costs and how fast it answers, measured from outside."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import click
import uvloop
from rich.console import Console
from rich.live import Live
from rich.text import Text

from tools.bench.arrivals import ClosedLoop, OpenLoop, Shape
from tools.bench.environment import describe_machine
from tools.bench.load import Progress, RunImpossible, RunResult, RunSettings, run_load
from tools.bench.progress import Spoken, so_far
from tools.bench.report import Report, build_report, encode_report, render_report
from tools.bench.tally import Tally
from tools.bench.target import REQUESTS_MAX, Prompting, parse_target
from tools.cli.bench_engine import engine
from tools.cli.bench_lookup import lookup
from tools.cli.bench_own_mesh import bands, fleet
from tools.cli.measuring import check_writable, say, write_bytes
from tools.cli.process import fail
from tools.mesh_file import MeshFile, read_mesh_file

PROGRESS_AFTER_S: Final = 2.0
"""Runs shorter than this show no progress line."""


@click.group()
def bench() -> None:
    """Measure a running mesh, or one started for the measurement."""


bench.add_command(bands)
bench.add_command(engine)
bench.add_command(fleet)
bench.add_command(lookup)


@bench.command()
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    help="State directory of a mesh on this machine; tells the CPU time of its processes too.",
)
@click.option(
    "--url",
    help="OpenAI base URL, such as http://127.0.0.1:8000/v1; only the client's own CPU time is known.",
)
@click.option(
    "--model", required=True, help="Logical model id. With `sim` every stream's text is checked to the letter."
)
@click.option("--clients", type=click.IntRange(1, 60_000), help="Closed loop: clients, each with one connection.")
@click.option("--requests", type=click.IntRange(1, REQUESTS_MAX - 1), help="Closed loop: requests in all.")
@click.option("--rate", type=click.FloatRange(0.001, 100_000), help="Open loop: mean arrivals per second (Poisson).")
@click.option("--seconds", type=click.FloatRange(0.001, 86_400), help="Open loop: how long requests arrive.")
@click.option(
    "--tokens", type=click.IntRange(1, 1_000_000), required=True, help="Completion tokens per request (max_tokens)."
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="File the report is written to.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Of arrival times and prompt words.")
@click.option("--prompt-words", type=click.IntRange(0, 1_000_000), default=16, show_default=True)
@click.option(
    "--warmup",
    type=click.IntRange(0, 10_000),
    default=8,
    show_default=True,
    help="Requests sent first and not counted.",
)
@click.option("--timeout-s", type=click.FloatRange(0.1, 86_400), default=120.0, show_default=True, help="Per request.")
@click.option(
    "--connections-max",
    type=click.IntRange(1, 60_000),
    default=4096,
    show_default=True,
    help="Open loop: requests under way; arrivals beyond it fail.",
)
@click.option("--api-key", default="bench", envvar="INFERMESH_API_KEY", show_default=True)
@click.option("--allow-failures", is_flag=True, help="Exit 0 although requests failed or were incomplete.")
def load(
    *,
    state_dir: Path | None,
    url: str | None,
    model: str,
    clients: int | None,
    requests: int | None,
    rate: float | None,
    seconds: float | None,
    tokens: int,
    json_file: Path,
    seed: int,
    prompt_words: int,
    warmup: int,
    timeout_s: float,
    connections_max: int,
    api_key: str,
    allow_failures: bool,
) -> None:
    """Stream chat completions and report latencies, throughput, wholeness of every stream and CPU time per token.

    Exit code 1 when a request failed or a stream was incomplete, 2 for wrong usage.
    """
    shape = _shape(clients=clients, requests=requests, rate=rate, seconds=seconds, connections_max=connections_max)
    mesh = _mesh(state_dir=state_dir, url=url)
    try:
        target = parse_target(mesh.url)
    except ValueError as error:
        fail(str(error))
    settings = RunSettings(
        target=target,
        shape=shape,
        prompting=Prompting(model=model, tokens=tokens, prompt_words=prompt_words, seed=seed),
        warmup=warmup,
        timeout_s=timeout_s,
        api_key=api_key,
        processes=mesh.processes,
    )
    check_writable(json_file)
    try:
        result = _run(settings)
    except RunImpossible as error:
        fail(str(error))
    report = build_report(result, machine=describe_machine(), settings=_settings_shown(settings, url=mesh.url))
    write_bytes(json_file, encode_report(report))
    _print(report, result)
    if report.completed < report.requests and not allow_failures:
        raise SystemExit(1)


def _shape(
    *, clients: int | None, requests: int | None, rate: float | None, seconds: float | None, connections_max: int
) -> Shape:
    match (clients, requests, rate, seconds):
        case (int(), int(), None, None):
            return ClosedLoop(clients=clients, requests=requests)
        case (None, None, float(), float()):
            return OpenLoop(rate_per_s=rate, seconds=seconds, connections_max=connections_max)
        case _:
            raise click.UsageError("give either --clients and --requests, or --rate and --seconds")


def _mesh(*, state_dir: Path | None, url: str | None) -> MeshFile:
    match (state_dir, url):
        case (Path(), None):
            try:
                return read_mesh_file(state_dir)
            except ValueError as error:
                fail(str(error))
        case (None, str()):
            return MeshFile(url=url, processes=())
        case _:
            raise click.UsageError("give either --state-dir or --url")


def _run(settings: RunSettings) -> RunResult:
    """Carry the run out on uvloop, with one line of progress on a terminal, lines now and then elsewhere."""
    console = Console(stderr=True)
    of = settings.shape.requests if isinstance(settings.shape, ClosedLoop) else None
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, ExitStack() as stack:
        if not console.is_terminal:
            return runner.run(run_load(settings, on_progress=Spoken(say, of=of)))
        # Without a refresh thread: it would take processor time from what is measured.
        line = stack.enter_context(Live(console=console, auto_refresh=False, transient=True))
        return runner.run(run_load(settings, on_progress=_progress_on(line, of=of)))


def _progress_on(line: Live, *, of: int | None) -> Progress:
    def show(tally: Tally, elapsed_s: float) -> None:
        if elapsed_s >= PROGRESS_AFTER_S:
            line.update(Text(so_far(tally, elapsed_s=elapsed_s, of=of)), refresh=True)

    return show


def _settings_shown(settings: RunSettings, *, url: str) -> dict[str, object]:
    """All settings of the run but the API key, which belongs in no file."""
    shape = settings.shape
    if isinstance(shape, ClosedLoop):
        shown: dict[str, object] = {"loop": "closed", "clients": shape.clients, "requests": shape.requests}
    else:
        shown = {
            "loop": "open",
            "rate_per_s": shape.rate_per_s,
            "seconds": shape.seconds,
            "connections_max": shape.connections_max,
        }
    prompting = settings.prompting
    return shown | {
        "url": url,
        "model": prompting.model,
        "tokens": prompting.tokens,
        "prompt_words": prompting.prompt_words,
        "seed": prompting.seed,
        "warmup": settings.warmup,
        "timeout_s": settings.timeout_s,
        "processes": [f"{process.role} {process.name}" for process in settings.processes],
    }


def _print(report: Report, result: RunResult) -> None:
    console = Console()
    for table in render_report(report):
        console.print(table)
    for code, count in result.tally.failures.most_common():
        console.print(Text(f"failed: {count:,} x {code}"))
    for example in result.tally.examples:
        console.print(Text(f"incomplete: {example}"))
    for process in result.cpu.vanished:
        console.print(Text(f"vanished during the run, its CPU time is unknown: {process}"))
