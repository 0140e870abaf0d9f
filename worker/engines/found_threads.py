"""How many threads were found best for a token alone, remembered for each host, build, model and setting.

Without this every start would measure again, and where the numbers are close it would not always find the same:
floating-point results of a token that is computed alone may depend on it.
"""

from __future__ import annotations

from typing import Final

import msgspec
import structlog

from worker.cores import usable_physical_cores
from worker.engines import host_facts
from worker.engines.base import Capabilities
from worker.engines.setup import LlamaSetup, Setup

FILE_NAME: Final = "decode-threads.json"

log = structlog.get_logger("engine")


def with_found_threads(setup: Setup) -> Setup:
    """`setup` with the number that an engine like this one found here before; unchanged where there is none, or where
    the setup names its own."""
    if not isinstance(setup, LlamaSetup) or setup.decode_threads is not None:
        return setup
    found = host_facts.recall(FILE_NAME, _circumstances(setup))
    if found is None or not 1 <= found <= _threads(setup):
        return setup
    return msgspec.structs.replace(setup, decode_threads=found)


def note_found_threads(setup: Setup, capabilities: Capabilities) -> None:
    """Remember what an engine with this setup found, if it found something."""
    if isinstance(setup, LlamaSetup) and (found := capabilities.decode_threads_found):
        host_facts.remember(FILE_NAME, _circumstances(setup), found)
        log.info("decode_threads_found", model=setup.model.name, threads=found)


def _threads(setup: LlamaSetup) -> int:
    return setup.threads or usable_physical_cores()


def _circumstances(setup: LlamaSetup) -> str:
    """Whatever the rates of few and of many threads depend on, as a key. A file that cannot be read has one too."""
    try:
        stat = setup.model.stat()
        file = (stat.st_size, stat.st_mtime_ns)
    except OSError:
        file = (0, 0)
    return host_facts.hash_of(
        host_facts.host_and_build(),
        setup.model,
        *file,
        _threads(setup),
        *(setup.gpu_layers, setup.kv_type, setup.flash_attention, setup.use_extra_bufts, setup.loras),
    )
