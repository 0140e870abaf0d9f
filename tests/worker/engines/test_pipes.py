"""Messages on the pipe: whole however the bytes are cut, and bounded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from schemas.job import TextPrompt
from schemas.sampling import Sampling
from worker.engines.base import Abort, Command, Submit
from worker.engines.pipes import FrameReader, PipeError, encode_frame
from worker.engines.setup import LlamaSetup, Setup

COMMANDS: list[Command] = [
    Submit(1, TextPrompt("zwölf Boxkämpfer"), Sampling(max_tokens=3, seed=7, stop=("x",)), 12.5),
    Abort(1),
    Submit(2, TextPrompt(""), Sampling(max_tokens=1, seed=0), 0.0),
]


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 5, 17, 10_000])
def test_messages_survive_any_cut_of_the_stream(piece_bytes: int) -> None:
    stream = b"".join(map(encode_frame, COMMANDS))
    reader: FrameReader[Command] = FrameReader(Command)
    received: list[Command] = []
    for start in range(0, len(stream), piece_bytes):
        received += reader.feed(stream[start : start + piece_bytes])
    assert received == COMMANDS


def test_a_message_too_long_is_not_written() -> None:
    with pytest.raises(PipeError, match="limit of 10 bytes"):
        encode_frame(COMMANDS[0], bytes_max=10)


def test_a_message_too_long_is_refused_by_its_length_alone() -> None:
    reader: FrameReader[Command] = FrameReader(Command, bytes_max=10)
    with pytest.raises(PipeError, match="limit of 10 bytes"):
        reader.feed((11).to_bytes(4, "big"))


def test_bytes_that_are_no_message_are_refused_without_being_quoted() -> None:
    reader: FrameReader[Command] = FrameReader(Command)
    body = b"secret words"
    with pytest.raises(PipeError) as refusal:
        reader.feed(len(body).to_bytes(4, "big") + body)
    assert "secret" not in str(refusal.value)


def test_a_setup_carries_any_file_name() -> None:
    setup = LlamaSetup(Path(os.fsdecode(b"/models/\xff.gguf")), threads=3)
    reader: FrameReader[Setup] = FrameReader(Setup)
    assert reader.feed(encode_frame(setup)) == [setup]
