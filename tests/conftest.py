"""How many processes `-n auto` runs tests in, and how their threads wait. A test that bears no neighbour is marked
`alone`."""

from __future__ import annotations

import gc
import os
from typing import Final

from worker.cores import usable_physical_cores
from worker.engines.host import BARRIER_SPINS

# As in an engine's process, and read when llama.cpp is loaded: else a test whose model computes with several threads
# takes minutes where anything else uses a core.
os.environ.setdefault("GOMP_SPINCOUNT", str(BARRIER_SPINS))

PROCESSES_MAX: Final = 8
"""Each process may hold a model, and has imported everything."""


def pytest_xdist_auto_num_workers() -> int:
    """One per core that this process may use, as the engine counts them; on a single one pytest's own process alone."""
    cores = usable_physical_cores()
    return min(cores, PROCESSES_MAX) if cores > 1 else 0


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: the garbage collector need not look at it again and again."""
    gc.collect()
    gc.freeze()
