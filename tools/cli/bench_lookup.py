"""`infermesh bench lookup`: what prompt lookup would bring the llama engine."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from tools.bench.environment import describe_machine
from tools.bench.lookup import LookupFailed, LookupSettings, measure_lookup
from tools.bench.lookup_report import LookupReport
from tools.cli.measuring import check_writable, json_option, measure, write_report
from tools.cli.process import fail
from worker.cores import usable_physical_cores
from worker.models import ModelFileMissing, default_model_file


@click.command()
@json_option
@click.option("--model", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="GGUF file.")
@click.option("--threads", type=click.IntRange(1, 512), help="Compute threads. [default: physical cores]")
@click.option(
    "--decode-threads", type=click.IntRange(1, 512), help="For a token alone. [default: as the engine finds it]"
)
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="Interleaved rounds.")
@click.option("--repeats", type=click.IntRange(1, 1_000), default=15, show_default=True, help="Of each timed step.")
@click.option("--tokens", type=click.IntRange(8, 512), default=96, show_default=True, help="Of a completion at most.")
@click.option("--draft", type=click.IntRange(1, 15), default=4, show_default=True, help="Tokens per step at most.")
def lookup(
    *,
    json_file: Path,
    model: Path | None,
    threads: int | None,
    decode_threads: int | None,
    rounds: int,
    repeats: int,
    tokens: int,
    draft: int,
) -> None:
    """Compare plain greedy decoding with prompt lookup (speculative decoding without a second model), in turns.

    No mesh is started: the model runs in a process of its own, as in an engine.
    """
    try:
        file = model or default_model_file()
    except ModelFileMissing as error:
        fail(str(error))
    cores = threads or usable_physical_cores()
    if decode_threads is not None and decode_threads > cores:
        raise click.UsageError(f"--decode-threads must be 1 to {cores}, the number of threads")
    settings = LookupSettings(
        model=str(file.resolve()),
        threads=cores,
        decode_threads=decode_threads,
        rounds=rounds,
        repeats=repeats,
        tokens=tokens,
        draft=draft,
    )
    check_writable(json_file)
    try:
        report = measure(measure_lookup(settings, machine=describe_machine()))
    except LookupFailed as error:
        fail(str(error))
    write_report(json_file, report)
    for table in lookup_tables(report):
        Console().print(table)


def lookup_tables(report: LookupReport) -> list[Table]:
    """The report for people."""
    widths = sorted({step.tokens for step in report.steps})
    steps = Table("behind", "threads", *map(str, widths), title="milliseconds of a step by its tokens")
    times = {(step.behind, step.threads, step.tokens): step.ms for step in report.steps}
    for behind, threads in dict.fromkeys((step.behind, step.threads) for step in report.steps):
        steps.add_row(f"{behind:,}", str(threads), *(f"{times[behind, threads, width]:.2f}" for width in widths))
    rows = Table("workload", "streams", "tokens/s", "ratio", "CPU ms", "per step", "right", "equal")
    rows.title = "tokens/s and CPU per token: plain, with lookup"
    for row in report.rows:
        rows.add_row(
            row.workload,
            str(row.streams),
            f"{row.plain_tokens_per_s:,.1f}, {row.lookup_tokens_per_s:,.1f}",
            f"{row.ratio:.3f}",
            f"{row.plain_cpu_ms:.1f}, {row.lookup_cpu_ms:.1f}",
            f"{row.tokens_per_step:.2f}",
            f"{row.right:.0%}",
            f"{row.equal} of {row.completions}",
        )
    return [steps, rows]
