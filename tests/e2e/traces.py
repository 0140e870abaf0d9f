"""What people said to a mesh, searched for in everything that it leaves behind."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

from tests.support.mesh import Mesh


def expect_no_trace(mesh: Mesh, *words: str) -> None:
    """None of `words` stands in any file of the mesh's state, its temporary files or its output, plain or in Base64."""
    files = list(files_of(mesh))
    assert any(file.suffix == ".log" and file.stat().st_size for file in files), "there are logs to be searched"
    needles = [needle for word in words for needle in forms_of(word)]
    for file in files:
        content = file.read_bytes()
        for needle in needles:
            assert needle not in content, f"{file} holds {needle!r}"


def files_of(mesh: Mesh) -> Iterator[Path]:
    """Every file of the mesh."""
    for folder in (mesh.state_dir, mesh.up.scratch.parent):
        yield from (path for path in folder.rglob("*") if path.is_file())


def forms_of(word: str) -> Iterator[bytes]:
    """The bytes of `word`, and what of them is certain in Base64 at each of the three alignments."""
    plain = word.encode()
    assert len(plain) >= 6, "shorter words stand anywhere by chance"
    yield plain
    for shift in range(3):
        # The first and the last group of four depend on the neighbours.
        encoded = base64.b64encode(b"\0" * shift + plain)
        yield encoded[4 if shift else 0 : -4]
