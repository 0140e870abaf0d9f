"""`mesh.json` on a disk that takes nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tools.mesh_file import MeshFile, mesh_file_path, read_mesh_file
from tools.supervisor.publication import Publication


def mesh(number: int) -> MeshFile:
    return MeshFile(url=f"http://h:{number}/v1", processes=())


class Disk:
    """Where nothing fits once it is `full`; what was begun stays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        write = Path.write_bytes

        def write_some(path: Path, data: bytes) -> int:
            written = write(path, data[:7] if self.full else data)
            if self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return written

        monkeypatch.setattr(Path, "write_bytes", write_some)


def test_a_full_disk_is_told_once_until_it_has_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, notes = Disk(monkeypatch), list[str]()
    publication = Publication(tmp_path, note=notes.append)
    publication.write(mesh(1))
    disk.full = True
    for number in (2, 3):
        publication.write(mesh(number))
        assert publication.outdated
    file = mesh_file_path(tmp_path)
    line = f"{file} cannot be written (No space left on device): the mesh goes on, the file is out of date"
    assert notes == [line]
    assert list(tmp_path.iterdir()) == [file], "nothing half written is left"
    assert read_mesh_file(tmp_path) == mesh(1)
    disk.full = False
    publication.write(mesh(4))
    assert not publication.outdated
    assert read_mesh_file(tmp_path) == mesh(4)
    disk.full = True
    publication.write(mesh(5))
    assert notes == [line] * 2


def test_a_file_that_cannot_be_removed_is_told(tmp_path: Path) -> None:
    notes = list[str]()
    mesh_file_path(tmp_path).mkdir()
    Publication(tmp_path, note=notes.append).remove()
    (line,) = notes
    assert line.startswith(f"{mesh_file_path(tmp_path)} cannot be removed (")
