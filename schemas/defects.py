"""How a defect of ours is told: where it happened, never what the exception says or its frames hold: both may be
content."""

from __future__ import annotations

import os
import traceback


def where(error: BaseException) -> str:
    """The innermost places that `error` passed, as ``file:line < file:line``, at most four."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    return " < ".join(f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in reversed(frames)) or "unknown"
