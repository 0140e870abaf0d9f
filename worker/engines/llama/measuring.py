"""The rates of a model on an idle engine, as its warm-up takes them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from worker.engines.llama import binding
from worker.engines.llama.compute import Compute
from worker.engines.llama.decode_threads import fewest_threads
from worker.engines.llama.layout import NARROW_CHUNK, WIDE_BATCH
from worker.engines.llama.settings import LlamaSettings
from worker.engines.llama.timing import undisturbed_rate

CHUNKS_MIN: Final = 2
"""Chunks of either kind that are timed; the first one also faults the weights in."""
DECODE_TOKENS: Final = 16


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Tokens per second of one request alone: of a prompt in narrow and in wide batches, and of the answer.

    `decode_threads_found`: see `Capabilities`.
    """

    narrow_per_s: float
    wide_per_s: float
    decode_per_s: float
    decode_threads_found: int

    @property
    def prefill_per_s(self) -> float:
        """Of a prompt, in batches of the faster kind."""
        return max(self.narrow_per_s, self.wide_per_s)


def measure(compute: Compute, settings: LlamaSettings, *, context: int) -> Measured:
    """Measure, and set `compute.decode_threads`, on the way. `context` bounds what is computed. Raises
    `DecodeFailed`."""
    some = max(1, context // 4)
    narrow_per_s = _prompt_rate(compute, settings, tokens=min(NARROW_CHUNK, some))
    wide_per_s = _prompt_rate(compute, settings, tokens=min(WIDE_BATCH, some))
    found = _choose_decode_threads(compute, settings)
    return Measured(
        narrow_per_s=narrow_per_s,
        wide_per_s=wide_per_s,
        decode_per_s=_decode_rate(compute, tokens=min(DECODE_TOKENS, some)),
        decode_threads_found=found,
    )


def _prompt_rate(compute: Compute, settings: LlamaSettings, *, tokens: int) -> float:
    return undisturbed_rate(
        lambda: compute.measure_prompt(tokens), threads=settings.threads, clock=time.monotonic, rounds_min=CHUNKS_MIN
    )


def _decode_rate(compute: Compute, *, tokens: int) -> float:
    threads = compute.decode_threads
    return undisturbed_rate(
        lambda: compute.measure_decoding(threads=threads, tokens=tokens), threads=threads, clock=time.monotonic
    )


def _choose_decode_threads(compute: Compute, settings: LlamaSettings) -> int:
    """Set the number of threads that compute a token alone; what was found by measuring, 0 where that is nothing to
    rely on."""
    given = settings.decode_threads
    if given is None and settings.threads > 1 and not (binding.offloads_to_gpu() and settings.gpu_layers != 0):
        found = fewest_threads(
            settings.threads,
            time=lambda threads, tokens: compute.measure_decoding(threads=threads, tokens=tokens),
            clock=time.monotonic,
        )
        compute.decode_threads = found.threads
        return found.threads if found.sure else 0
    compute.decode_threads = given or settings.threads
    return 0
