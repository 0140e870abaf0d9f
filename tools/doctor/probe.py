"""What this machine can do at most: `python -m tools.doctor.probe THREADS COPY_BYTES` prints a `Ceiling` as JSON.

In a process of its own: a CPU that does not keep what it promises ends it, and nothing else.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

ROUNDS: Final = 10
PRODUCT_SIZE: Final = 1024
"""Rows and columns of the matrices: 4 MiB each, beyond the first caches and quick on any CPU."""
PROBE_TIMEOUT_S: Final = 60.0
_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


class Ceiling(msgspec.Struct, frozen=True):
    """`bytes_per_s`: of memory, read and written together, by a copy on all cores. `flops`: of float32 matrix products
    on all cores; None where numpy is not installed."""

    bytes_per_s: float
    flops: float | None


async def measure_ceiling(*, threads: int, copy_bytes: int) -> Ceiling | None:
    """Run the probe; None when it did not end well within `PROBE_TIMEOUT_S`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tools.doctor.probe", str(threads), str(copy_bytes)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, **dict.fromkeys(_THREAD_VARIABLES, str(threads))},
    )
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        return msgspec.json.decode(output, type=Ceiling)
    except msgspec.DecodeError:
        return None


def copy_rate(*, threads: int, copy_bytes: int) -> float:
    """Bytes per second, the best of some rounds: each thread copies a part of its own. ctypes lets go of the GIL."""
    size = copy_bytes // threads
    parts = [(ctypes.create_string_buffer(size), ctypes.create_string_buffer(size)) for _ in range(threads)]

    def copy(part: tuple[ctypes.Array[ctypes.c_char], ctypes.Array[ctypes.c_char]]) -> None:
        ctypes.memmove(part[0], part[1], size)

    with ThreadPoolExecutor(threads) as pool:
        seconds = best_of(lambda: list(pool.map(copy, parts)))
    return 2 * size * threads / seconds


def product_rate() -> float | None:
    """Floating-point operations per second of float32 matrix products; None without numpy."""
    try:
        import numpy as np
    except ImportError:
        return None
    left = np.ones((PRODUCT_SIZE, PRODUCT_SIZE), dtype=np.float32)
    return 2 * PRODUCT_SIZE**3 / best_of(lambda: left @ left)


def best_of(work: Callable[[], object]) -> float:
    """Seconds of the fastest of `ROUNDS` rounds: the others were disturbed."""
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return max(min(seconds), 1e-9)


def main() -> None:
    """Measure, print."""
    threads, copy_bytes = (int(argument) for argument in sys.argv[1:3])
    ceiling = Ceiling(copy_rate(threads=threads, copy_bytes=copy_bytes), product_rate())
    sys.stdout.buffer.write(msgspec.json.encode(ceiling) + b"\n")


if __name__ == "__main__":
    main()
