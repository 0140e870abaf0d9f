"""LoRA adapters that a model is served with, as an operator names them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import msgspec

LORAS_MAX: Final = 8
"""Each is multiplied with at every step. It is the operator's own list, refused before `ready` with this number."""
SCALE_MAX: Final = 10.0
"""Of either sign. Ten times what an adapter was trained for leaves nothing of the model."""


class Lora(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter: its GGUF file, and how much of it is added to the weights (1: as it was trained, 0: nothing)."""

    file: Path
    scale: float = 1.0


def parse_lora(text: str) -> Lora:
    """The adapter that `FILE` or `FILE=SCALE` names. What follows the last `=` and is no number belongs to the file."""
    file, separator, scale = text.rpartition("=")
    try:
        number = float(scale)
    except ValueError:
        separator = ""
    return Lora(Path(file).expanduser(), number) if separator else Lora(Path(text).expanduser())


def is_usable_scale(scale: float) -> bool:
    """Whether weights may be scaled so."""
    return math.isfinite(scale) and abs(scale) <= SCALE_MAX
