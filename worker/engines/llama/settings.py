"""How a model is loaded and run, with defaults that fit the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from worker.cores import usable_physical_cores
from worker.engines.llama.cache import PrefixCache
from worker.engines.llama.layout import TOLD_ROWS_MAX, WIDE_BATCH
from worker.engines.llama_limits import LlamaLimits
from worker.engines.lora import LORAS_MAX, SCALE_MAX, Lora, is_usable_scale

PREFILL_CHUNK_MIN: Final = 32
PREFILL_CHUNK_MAX: Final = 512
"""Bounds of a prefill chunk in tokens. The upper one is also llama.cpp's usual physical batch."""

PREFILL_ALONE_MS_MAX: Final = 1000.0
"""A step that takes much longer than expected must not look like an engine that hangs."""

RESUME_CHUNK_MAX: Final = WIDE_BATCH - 1
RESUME_CHUNK_DEFAULT: Final = 32
"""Tokens per chunk of a completion that is computed again. Below 64, llama.cpp's CPU attention takes the kernel that
also computes single tokens, and none of 75 continuations of the default model differed from the undisturbed answer;
with 64 it takes another one, and 12 of 75 differed (all of them with more than 64 tokens to compute again)."""

PROMPT_LOOKUP_MAX: Final = 16
"""Long guesses are rarely right to their end, and all of them must fit a narrow batch."""

KV_TYPE_BYTES: Final = {
    "f32": 4.0,
    "f16": 2.0,
    "q8_0": 34 / 32,
    "q5_1": 24 / 32,
    "q5_0": 22 / 32,
    "q4_1": 20 / 32,
    "q4_0": 18 / 32,
}
"""What keys and values may be stored as, by llama.cpp's names, with the bytes that one number takes."""

CONTEXT_DEFAULT_MAX: Final = 2048
"""Tokens of context per sequence where none is asked for: what a CPU can fill in bearable time."""


@dataclass(frozen=True, kw_only=True)
class LlamaSettings:
    """Settings of one loaded model.

    `context`: tokens of prompt plus completion per sequence (None: the trained context, at most 2,048). `slots`:
    sequences decoded together; the KV memory holds a full context for each. `waiting_per_slot`: requests that may wait
    for each slot. `threads`: compute threads. `decode_threads`: those of a token that is alone in its step (None: as
    few as are about as fast as all, measured at the start). `prefill_chunk`: tokens of a prompt per step (None: so many
    that a chunk takes `prefill_chunk_ms` beside running streams, `prefill_alone_ms` where nobody waits for a token).
    `resume_chunk`: resumed tokens per step. `prompt_lookup`: tokens that are guessed at most per step of a stream that
    decodes alone (see `lookup`). `prefix_cache`: what the cells of finished sequences are reused for.
    `gpu_layers`: layers on a GPU (None: all, where llama.cpp has a GPU backend). `flash_attention`: None leaves it
    to llama.cpp. `kv_type`: what keys and values are stored as; the quantized ones need flash attention. `loras`:
    adapters that everything is computed with. `mmap`: map the file instead of reading it. `use_extra_bufts`: let
    llama.cpp repack weights for the CPU at hand (off where its instructions fail in a VM). `limits`: what one request
    may ask for.
    """

    model: Path
    context: int | None = None
    slots: int = 10
    waiting_per_slot: int = 4
    threads: int = field(default_factory=usable_physical_cores)
    decode_threads: int | None = None
    prefill_chunk: int | None = None
    prefill_chunk_ms: float = 250.0
    prefill_alone_ms: float = 500.0
    resume_chunk: int = RESUME_CHUNK_DEFAULT
    prompt_lookup: int = 0
    prefix_cache: PrefixCache = PrefixCache.EXACT
    gpu_layers: int | None = None
    flash_attention: bool | None = None
    kv_type: str = "f16"
    loras: tuple[Lora, ...] = ()
    mmap: bool = True
    use_extra_bufts: bool = True
    limits: LlamaLimits = field(default_factory=LlamaLimits)

    def __post_init__(self) -> None:
        _require(self.prefix_cache in tuple(PrefixCache), f"prefix_cache must be one of {', '.join(PrefixCache)}")
        _require(self.context is None or self.context >= 16, "context must be at least 16 tokens")
        _require(1 <= self.slots <= 64, "slots must be 1 to 64")
        _require(0 <= self.waiting_per_slot <= 64, "waiting_per_slot must be 0 to 64")
        _require(1 <= self.threads <= 512, "threads must be 1 to 512")
        _require(
            self.decode_threads is None or 1 <= self.decode_threads <= self.threads,
            f"decode_threads must be 1 to {self.threads}, the number of threads",
        )
        _require(
            self.prefill_chunk is None or 1 <= self.prefill_chunk <= PREFILL_CHUNK_MAX,
            f"prefill_chunk must be 1 to {PREFILL_CHUNK_MAX} tokens",
        )
        _require(self.prefill_chunk_ms > 0, "prefill_chunk_ms must be positive")
        _require(
            self.prefill_chunk_ms <= self.prefill_alone_ms <= PREFILL_ALONE_MS_MAX,
            f"prefill_alone_ms must be prefill_chunk_ms to {PREFILL_ALONE_MS_MAX:g}",
        )
        _require(len(self.loras) <= LORAS_MAX, f"at most {LORAS_MAX} loras are allowed")
        scales = [lora.scale for lora in self.loras]
        _require(all(map(is_usable_scale, scales)), f"the scale of a lora must be -{SCALE_MAX:g} to {SCALE_MAX:g}")
        _require(self.kv_type in KV_TYPE_BYTES, f"kv_type must be one of {', '.join(KV_TYPE_BYTES)}")
        _require(
            self.flash_attention is not False or not self.kv_type.startswith("q"),
            f"flash attention must not be off with kv_type {self.kv_type}",
        )
        _require(0 <= self.prompt_lookup <= PROMPT_LOOKUP_MAX, f"prompt_lookup must be 0 to {PROMPT_LOOKUP_MAX} tokens")
        _require(1 <= self.resume_chunk <= RESUME_CHUNK_MAX, f"resume_chunk must be 1 to {RESUME_CHUNK_MAX} tokens")

    @property
    def waiting_max(self) -> int:
        """Requests that may wait for a slot; one more is refused as overloaded."""
        return self.slots * self.waiting_per_slot

    @property
    def batch_tokens_max(self) -> int:
        """Tokens of the largest batch: one prefill chunk, one token of every slot, or one with what is guessed."""
        return max(PREFILL_CHUNK_MAX, self.slots, 1 + self.prompt_lookup)

    @property
    def logits_rows_max(self) -> int:
        """Rows of logits of a batch at most: one for every slot, those of a chunk whose tokens are told, or of a token
        with what is guessed."""
        return max(TOLD_ROWS_MAX, self.slots, 1 + self.prompt_lookup)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
