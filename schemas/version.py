"""The version of this copy of the mesh, as members tell it to each other."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final


def _read() -> str:
    try:
        return version("infermesh")
    except PackageNotFoundError:
        return "0.0.0+unpackaged"


VERSION: Final = _read()
