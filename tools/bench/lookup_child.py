"""The measuring process of `infermesh bench lookup`: `python -m tools.bench.lookup_child SETTINGS`.

It says on stderr what it does, and writes its one report to stdout.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Final

import msgspec

from schemas.errors import MeshError
from tools.bench.lookup import LookupSettings
from tools.bench.lookup_decode import Decoder, NothingToDraft
from tools.bench.lookup_report import Generated, LookupRow, Measured, StepTime, row_of, step_times, together
from tools.bench.lookup_workloads import STREAMS_MAX, Workload, workloads
from worker.engines.base import LoadError
from worker.engines.llama import LlamaSettings, binding
from worker.engines.llama.build import describe_build
from worker.engines.llama.cache import NOTHING
from worker.engines.llama.compute import DecodeFailed
from worker.engines.llama.decode_threads import fewest_threads

WIDTHS: Final = (1, 2, 3, 4, 5, 8)
"""Tokens of the steps that are timed."""
BEHIND: Final = (100, 1_000)
CONTEXT: Final = BEHIND[-1] + WIDTHS[-1]
STREAMS: Final = (1, 2, STREAMS_MAX)


def measure(settings: LookupSettings) -> Measured:
    """Everything. Raises `LoadError`, `NothingToDraft`, `DecodeFailed`, and `MeshError` where a prompt is too long."""
    # A slot for each token of the largest step, among them those for the prompts and for the streams.
    slots = max(STREAMS_MAX * (settings.draft + 1), WIDTHS[-1])
    llama = LlamaSettings(model=Path(settings.model), threads=settings.threads, context=CONTEXT, slots=slots)
    decoder = Decoder(llama)
    compute = decoder.compute
    found = settings.decode_threads or _found_threads(decoder, settings.threads)
    steps = [each for behind in BEHIND for each in _step_times(decoder, settings, behind=behind)]
    compute.decode_threads = found
    rows = [row for workload in workloads() for row in _rows(decoder, settings, workload)]
    return Measured(decode_threads=found, build=describe_build(llama, decode_threads=found), steps=steps, rows=rows)


def _found_threads(decoder: Decoder, threads: int) -> int:
    """As the engine does at its start."""
    found = fewest_threads(
        threads,
        time=lambda count, tokens: decoder.compute.measure_decoding(threads=count, tokens=tokens),
        clock=time.monotonic,
    )
    return found.threads


def _step_times(decoder: Decoder, settings: LookupSettings, *, behind: int) -> list[StepTime]:
    say(f"steps behind {behind} tokens")
    text = itertools.cycle(decoder.encode(workloads()[1].prompts[0]))
    prompt = decoder.prefill(list(itertools.islice(text, behind)))
    ahead = list(itertools.islice(text, WIDTHS[-1]))
    samples: defaultdict[tuple[int, int, int], list[float]] = defaultdict(list)
    for _ in range(settings.repeats):
        for threads in dict.fromkeys((1, settings.threads)):
            binding.set_threads(decoder.compute.context, alone=threads, together=threads)
            for tokens in WIDTHS:
                # The first step of another width or number of threads has to build its graph and wake threads up.
                for counts in (False, True):
                    started = time.perf_counter()
                    decoder.step([(prompt.slot, behind, ahead[:tokens])])
                    if counts:
                        samples[behind, threads, tokens].append(time.perf_counter() - started)
                    decoder.cut(prompt.slot, keep=behind)
    decoder.compute.cells.discard(prompt.slot)
    return step_times(samples)


def _rows(decoder: Decoder, settings: LookupSettings, workload: Workload) -> list[LookupRow]:
    cells = decoder.compute.cells
    prompts = [decoder.prefill(decoder.encode(text)) for text in workload.prompts]
    slots = [cells.take(NOTHING) for _ in range(STREAMS_MAX)]

    def generate(streams: int, draft: int) -> Generated:
        groups = [prompts[start : start + streams] for start in range(0, len(prompts), streams)]
        return together([decoder.generate(group, slots, tokens=settings.tokens, draft=draft) for group in groups])

    runs: defaultdict[tuple[int, int], list[Generated]] = defaultdict(list)
    for number in range(settings.rounds):
        say(f"{workload.name}, round {number + 1} of {settings.rounds}")
        for streams in STREAMS:
            for draft in (0, settings.draft) if number % 2 == 0 else (settings.draft, 0):
                runs[streams, draft].append(generate(streams, draft))
    for slot in (*slots, *(prompt.slot for prompt in prompts)):
        cells.discard(slot)
    return [row_of(workload.name, each, runs[each, 0], runs[each, settings.draft]) for each in STREAMS]


def say(text: str) -> None:
    """A line for people."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, and report."""
    settings = msgspec.json.decode(sys.argv[1], type=LookupSettings)
    try:
        measured = measure(settings)
    except (LoadError, NothingToDraft, DecodeFailed, MeshError) as error:
        sys.exit(str(error))
    sys.stdout.buffer.write(msgspec.json.encode(measured))


if __name__ == "__main__":
    main()
