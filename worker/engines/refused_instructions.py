"""Hosts whose CPU refused llama.cpp's extra instructions, remembered between starts of a worker.

Without this every start would crash once before it runs. Another CPU, kernel or build is tried anew.
"""

from __future__ import annotations

from typing import Final

from worker.engines import host_facts

FILE_NAME: Final = "refused-instructions.json"


def is_remembered() -> bool:
    """Whether the extra instructions of this build failed on this host before."""
    return host_facts.recall(FILE_NAME, host_facts.host_and_build()) is not None


def remember() -> None:
    """From now on `is_remembered` is true here."""
    host_facts.remember(FILE_NAME, host_facts.host_and_build(), 1)
