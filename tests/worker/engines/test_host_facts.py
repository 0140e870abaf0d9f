"""What is remembered of a host: instructions that its CPU refuses, and how many threads suit a model."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import msgspec
import pytest

from worker.engines import found_threads, host_facts, refused_instructions
from worker.engines.base import Capabilities
from worker.engines.found_threads import note_found_threads, with_found_threads
from worker.engines.host_facts import ENTRIES_MAX, recall, remember
from worker.engines.setup import LlamaSetup, SimSetup
from worker.engines.sim import SimSettings

NAME = "facts.json"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "infermesh" / NAME


def test_a_fact_is_remembered_in_a_private_file(file: Path) -> None:
    assert recall(NAME, "a") is None
    remember(NAME, "a", 1)
    remember(NAME, "b", 2)
    remember(NAME, "a", 3)
    assert (recall(NAME, "a"), recall(NAME, "b"), recall("other.json", "a")) == (3, 2, None)
    assert json.loads(file.read_bytes()) == {"b": 2, "a": 3}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(file.parent.iterdir()) == [file]


def test_the_file_is_bounded_and_keeps_the_newest(file: Path) -> None:
    for number in range(ENTRIES_MAX + 5):
        remember(NAME, f"key {number}", number)
    assert list(json.loads(file.read_bytes()).values()) == list(range(5, ENTRIES_MAX + 5))


@pytest.mark.parametrize("content", [b"", b"[]", b'{"a": "b"}', b"\xff", b"[" * 100_000])
def test_a_file_that_is_not_ours_is_replaced(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    assert recall(NAME, "a") is None
    remember(NAME, "a", 1)
    assert recall(NAME, "a") == 1


def test_without_a_place_to_write_nothing_is_remembered_and_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    remember(NAME, "a", 1)
    assert recall(NAME, "a") is None


@pytest.mark.parametrize("changed", ["_build", "host_and_build"])
def test_refused_instructions_are_tried_anew_by_another_build_or_host(
    file: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    assert not refused_instructions.is_remembered()
    refused_instructions.remember()
    assert refused_instructions.is_remembered()
    monkeypatch.setattr(host_facts, changed, lambda: "another")
    assert not refused_instructions.is_remembered()


def found(threads: int) -> Capabilities:
    return Capabilities("llama", 1, 512, 100.0, True, "build", 0.0, threads)


@pytest.fixture
def setup(file: Path, tmp_path: Path) -> LlamaSetup:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    return LlamaSetup(model, threads=4)


def test_the_next_engine_like_this_one_is_told_what_was_found(setup: LlamaSetup) -> None:
    assert with_found_threads(setup) == setup
    note_found_threads(setup, found(2))
    assert with_found_threads(setup) == msgspec.structs.replace(setup, decode_threads=2)
    # Neither of these changes how fast a token alone is computed.
    like_it = msgspec.structs.replace(setup, slots=7, context=64, prefix_cache="off")
    assert with_found_threads(like_it).decode_threads == 2  # type: ignore[union-attr]


def test_an_engine_that_is_not_sure_leaves_nothing(setup: LlamaSetup) -> None:
    note_found_threads(setup, found(0))
    assert with_found_threads(setup) == setup


def test_a_number_that_is_given_stays(setup: LlamaSetup) -> None:
    note_found_threads(setup, found(2))
    given = msgspec.structs.replace(setup, decode_threads=3)
    assert with_found_threads(given) == given
    sim = SimSetup(SimSettings())
    assert with_found_threads(sim) == sim


@pytest.mark.parametrize(
    "other", [{"threads": 3}, {"kv_type": "q8_0"}, {"flash_attention": True}, {"use_extra_bufts": False}], ids=str
)
def test_other_circumstances_are_measured_anew(setup: LlamaSetup, other: dict[str, object]) -> None:
    note_found_threads(setup, found(2))
    differs = msgspec.structs.replace(setup, **other)
    assert with_found_threads(differs) == differs


def test_another_file_under_the_same_name_is_measured_anew(setup: LlamaSetup) -> None:
    note_found_threads(setup, found(2))
    setup.model.write_bytes(b"GGUF and more")
    assert with_found_threads(setup) == setup
    setup.model.unlink()
    assert with_found_threads(setup) == setup


def test_a_number_that_cannot_be_is_not_believed(setup: LlamaSetup) -> None:
    for number in (0, -1, 5):
        host_facts.remember(found_threads.FILE_NAME, found_threads._circumstances(setup), number)
        assert with_found_threads(setup) == setup
