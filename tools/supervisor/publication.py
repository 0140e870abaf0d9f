"""`mesh.json` as a running mesh keeps it: others read it, so a disk that takes nothing is told and borne."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tools.mesh_file import MeshFile, mesh_file_path, remove_mesh_file, write_mesh_file


class Publication:
    """The file of one mesh. `outdated` while it says less than it was last told to."""

    def __init__(self, state_dir: Path, *, note: Callable[[str], None]) -> None:
        """`note(line)` tells people of a failure: one line, and none for those that follow until one write succeeds."""
        self._state_dir = state_dir
        self._note = note
        self.outdated = False

    def write(self, mesh: MeshFile) -> None:
        """Put `mesh` in the file's place; where that fails, the old one stays."""
        try:
            write_mesh_file(self._state_dir, mesh)
        except OSError as error:
            if not self.outdated:
                self._tell(error, "written", "the mesh goes on, the file is out of date")
            self.outdated = True
        else:
            self.outdated = False

    def remove(self) -> None:
        """The mesh has ended."""
        try:
            remove_mesh_file(self._state_dir)
        except OSError as error:
            self._tell(error, "removed", "no mesh runs here any more")

    def _tell(self, error: OSError, how: str, meaning: str) -> None:
        self._note(f"{mesh_file_path(self._state_dir)} cannot be {how} ({error.strerror}): {meaning}")
