"""`infermesh bench engine`: our engine beside llama.cpp's own server core."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from tools.bench.engine import EngineSettings, measure_engine
from tools.bench.engine_peer import PeerFailed
from tools.bench.engine_report import BATCHING_GAIN_MIN, RATIO_MIN, EngineReport
from tools.bench.environment import describe_machine, usable_cores
from tools.cli.measuring import check_writable, end_with, json_option, measure, say, write_report
from tools.cli.process import fail
from worker.models import ModelFileMissing, default_model_file


@click.command()
@json_option
@click.option("--model", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="GGUF file for both.")
@click.option("--threads", type=click.IntRange(1, 512), help="Compute threads of both. [default: usable cores]")
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="Interleaved rounds.")
@click.option("--tokens", type=click.IntRange(8, 1_024), default=64, show_default=True, help="Of a chat request.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the prompts' words.")
def engine(json_file: Path, model: Path | None, threads: int | None, rounds: int, tokens: int, seed: int) -> None:
    """Compare the llama engine with llama.cpp's own server (package xllamacpp), in turns on the same requests.

    Starts both, and a mesh around ours. Exit code 1 when a request failed or a stream was incomplete.
    """
    try:
        file = model or default_model_file()
    except ModelFileMissing as error:
        fail(str(error))
    settings = EngineSettings(
        model=file.resolve(), threads=threads or usable_cores(), rounds=rounds, tokens=tokens, seed=seed
    )
    check_writable(json_file)
    try:
        report, problems = measure(measure_engine(settings, machine=describe_machine(), say=say))
    except PeerFailed as error:
        fail(str(error))
    write_report(json_file, report)
    for table in engine_tables(report):
        Console().print(table)
    end_with(problems)


def engine_tables(report: EngineReport) -> list[Table]:
    """The report for people."""
    rows = Table("workload", "clients", "ours, tokens/s", "peer", "ratio", "ours, first token ms", "peer")
    for row in report.rows:
        aim = RATIO_MIN.get(row.concurrency) if row.workload == "chat" else None
        rows.add_row(
            row.workload,
            str(row.concurrency),
            f"{row.ours_tokens_per_s:,.1f}",
            f"{row.peer_tokens_per_s:,.1f}",
            f"{row.ratio:.3f}" + (f" (aim {aim:.2f})" if aim is not None else ""),
            _figure(row.ours_ttft_ms_p50),
            _figure(row.peer_ttft_ms_p50),
        )
    batching, arrival = report.continuous_batching, report.long_prompt_arrival
    others = Table("", "ours", "peer")
    others.add_row(
        "gap p99 while a long prompt arrives, ms", _figure(arrival.ours_itl_ms_p99), _figure(arrival.peer_itl_ms_p99)
    )
    others.add_row("longest gap, ms", _figure(arrival.ours_itl_ms_max), _figure(arrival.peer_itl_ms_max))
    others.add_row("first token of the long prompt, ms", _figure(arrival.ours_ttft_ms), _figure(arrival.peer_ttft_ms))
    others.add_row(
        f"requests/s at 8 clients, by one at a time (aim {BATCHING_GAIN_MIN:.1f})", f"{batching.ratio:.2f}", ""
    )
    if batching.ratio_at_most is not None:
        others.add_row("the same, as much as arithmetic allows", f"{batching.ratio_at_most:.2f}", "")
    return [rows, others]


def _figure(value_ms: float | None) -> str:
    return "-" if value_ms is None else f"{value_ms:,.1f}"
