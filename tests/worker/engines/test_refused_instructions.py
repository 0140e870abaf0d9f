"""What is remembered of a CPU that refuses the instructions it advertises."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from worker.engines import refused_instructions as module
from worker.engines.refused_instructions import ENTRIES_MAX, FILE_NAME, is_remembered, remember


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "infermesh" / FILE_NAME


def test_it_is_remembered_in_a_private_file(file: Path) -> None:
    assert not is_remembered()
    remember()
    remember()
    assert is_remembered()
    assert len(json.loads(file.read_bytes())) == 1
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("changed", ["_build", "host_and_build"])
def test_another_build_or_host_is_tried_anew(file: Path, monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    remember()
    monkeypatch.setattr(module, changed, lambda: "another")
    assert not is_remembered()


def test_the_file_is_bounded_and_keeps_the_newest(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(ENTRIES_MAX + 5):
        monkeypatch.setattr(module, "host_and_build", lambda number=number: f"host {number}")
        remember()
    assert json.loads(file.read_bytes()) == [f"host {number}" for number in range(5, ENTRIES_MAX + 5)]


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b"[" * 100_000])
def test_a_file_that_is_not_ours_is_replaced(file: Path, content: bytes) -> None:
    file.parent.mkdir()
    file.write_bytes(content)
    assert not is_remembered()
    remember()
    assert is_remembered()


def test_without_a_place_to_write_nothing_is_remembered_and_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    remember()
    assert not is_remembered()
