"""What an engine process is told first: which engine to be, with which settings. Stays between worker and engine.

The worker knows engines by these alone: it never imports what may load a native library into its own process.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from worker.engines.base import Capabilities
from worker.engines.llama_limits import LlamaLimits
from worker.engines.lora import Lora
from worker.engines.openai.settings import OpenAISettings
from worker.engines.sim import SimSettings


class SimSetup(msgspec.Struct, frozen=True, tag="sim", array_like=True):
    """Be the simulated engine."""

    settings: SimSettings


class LlamaSetup(msgspec.Struct, frozen=True, tag="llama", array_like=True):
    """Run the GGUF file `model` with llama.cpp; None leaves a choice to the engine (see its `LlamaSettings`)."""

    model: Path
    context: int | None = None
    slots: int | None = None
    threads: int | None = None
    gpu_layers: int | None = None
    use_extra_bufts: bool = True
    flash_attention: bool | None = None
    kv_type: str | None = None
    prefix_cache: str | None = None
    loras: tuple[Lora, ...] = ()
    decode_threads: int | None = None
    waiting_per_slot: int | None = None
    prefill_chunk: int | None = None
    prefill_chunk_ms: float | None = None
    prefill_alone_ms: float | None = None
    resume_chunk: int | None = None
    prompt_lookup: int | None = None
    mmap: bool | None = None
    limits: LlamaLimits = LlamaLimits()


class OpenAISetup(msgspec.Struct, frozen=True, tag="openai", array_like=True):
    """Have a server that speaks the OpenAI API do the work."""

    settings: OpenAISettings


Setup = SimSetup | LlamaSetup | OpenAISetup


def as_it_was(setup: Setup, loaded: Capabilities) -> Setup:
    """The same engine, with the slots and context that it had when `loaded` was said of it, whatever the memory of the
    moment: its worker has jobs, and told the mesh, by these numbers."""
    match setup:
        case LlamaSetup():
            return msgspec.structs.replace(setup, slots=loaded.slots, context=loaded.context)
        case _:
            return setup


def without_extra_instructions(setup: Setup) -> Setup | None:
    """The same engine on the instructions that every CPU of its kind has; None when there is no plainer one.

    A CPU may advertise instructions (AMX tiles, in a virtual machine) that the kernel then refuses: the first matrix
    product of llama.cpp's repacked weights ends the process with SIGILL.
    """
    match setup:
        case LlamaSetup(use_extra_bufts=True):
            return msgspec.structs.replace(setup, use_extra_bufts=False)
        case _:
            return None
