"""What this machine can do at most: `python -m tools.doctor.probe THREADS COPY_BYTES` prints a `Ceiling` as JSON.

In a process of its own: a CPU that does not keep what it promises ends it, and nothing else. Memory is shared by the
cores, so it is measured with as many threads as will use it. Arithmetic is not, and is measured on one core: a product
on all of them waits at barriers, and says little as soon as another process has one. Time is CPU time, so that other
processes on the cores do not count.
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

COPIES: Final = 10
PRODUCTS: Final = 40
"""Rounds, of which the best counts: caches and memory are disturbed too."""
PRODUCT_SIZE: Final = 512
"""Rows and columns of the matrices: 1 MiB each, beyond the first caches."""
CHAIN_LENGTH: Final = 100_000
TIME_S_MIN: Final = 1e-9
PROBE_TIMEOUT_S: Final = 60.0
_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


class Ceiling(msgspec.Struct, frozen=True):
    """`bytes_per_s`: of memory, read and written together, by copying. `flops`: float32 operations per second of one
    core, in matrix products. `multiplication_s`: from one float64 multiplication to the next that needs its result,
    which is 3 to 5 clocks whatever the vector units are. None where numpy does not run."""

    bytes_per_s: float
    flops: float | None = None
    multiplication_s: float | None = None

    @property
    def width(self) -> float | None:
        """float32 operations of one core in the time of one multiplication: how wide the vector units are that show in
        arithmetic, without a clock that somebody would have to tell."""
        if self.flops is None or self.multiplication_s is None:
            return None
        return self.flops * self.multiplication_s


async def measure_ceiling(*, threads: int, copy_bytes: int) -> Ceiling | None:
    """Run the probe, with `threads` that copy; None when it did not end well within `PROBE_TIMEOUT_S`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tools.doctor.probe", str(threads), str(copy_bytes)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, **dict.fromkeys(_THREAD_VARIABLES, "1")},
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

    def copy(part: tuple[ctypes.Array[ctypes.c_char], ctypes.Array[ctypes.c_char]]) -> float:
        began = time.thread_time()
        ctypes.memmove(part[0], part[1], size)
        return time.thread_time() - began

    with ThreadPoolExecutor(threads) as pool:
        seconds = min(max(pool.map(copy, parts)) for _ in range(COPIES))
    return 2 * size * threads / max(seconds, TIME_S_MIN)


def arithmetic() -> tuple[float, float] | None:
    """`flops` and `multiplication_s` of a `Ceiling`. None without numpy, and on a CPU without the instructions that
    numpy itself needs (it raises a RuntimeError then)."""
    try:
        import numpy as np
    except (ImportError, RuntimeError):
        return None
    matrix, chain = np.ones((PRODUCT_SIZE, PRODUCT_SIZE), dtype=np.float32), np.ones(CHAIN_LENGTH)
    product_s = best_of(lambda: matrix @ matrix)
    # A product of floats is not reordered, so each multiplication waits for the one before.
    chain_s = best_of(lambda: np.multiply.reduce(chain))
    return 2 * PRODUCT_SIZE**3 / product_s, chain_s / CHAIN_LENGTH


def best_of(work: Callable[[], object]) -> float:
    """CPU seconds of the fastest of `PRODUCTS` rounds."""
    seconds = []
    for _ in range(PRODUCTS):
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
    return max(min(seconds), TIME_S_MIN)


def main() -> None:
    """Measure, print."""
    threads, copy_bytes = (int(argument) for argument in sys.argv[1:3])
    ceiling = Ceiling(copy_rate(threads=threads, copy_bytes=copy_bytes), *(arithmetic() or ()))
    sys.stdout.buffer.write(msgspec.json.encode(ceiling) + b"\n")


if __name__ == "__main__":
    main()
