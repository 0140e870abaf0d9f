"""What may be kept of a process's output."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engines.last_words import LINE_CHARS_MAX, LINES_MAX, LastWords


def kept(*lines: str) -> tuple[str, ...]:
    words = LastWords()
    words.forget()
    words.feed("".join(f"{line}\n" for line in lines).encode())
    return words.lines()


@pytest.mark.parametrize(
    "line",
    [
        "engine failed: ValueError at adapter.py:4 < process.py:120",
        "/tmp/llama.cpp/ggml/src/ggml.c:1783: GGML_ASSERT(view_src == NULL || data_size == 0) failed",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "free(): double free detected in tcache 2",
        "CUDA error: out of memory",
        "Fatal Python error: Segmentation fault",
    ],
)
def test_fixed_words_stay_after_the_first_request(line: str) -> None:
    assert kept("what is my password", line, "Traceback: hello") == (line,)


@pytest.mark.parametrize(
    "line",
    [
        "what():  vector::_M_range_check: secret",
        "engine failed: ValueError: secret",
        'x.c:1: GGML_ASSERT("secret") failed',
        "Fatal Python error: 'secret'",
        "terminate called after throwing an instance of 'std::bad_alloc' secret",
        "engine failed: " + "x" * 1000 + " at a.py:1",
    ],
)
def test_anything_else_goes(line: str) -> None:
    assert kept(line) == ()


def test_an_unfinished_line_is_judged_as_it_stands() -> None:
    words = LastWords()
    words.forget()
    words.feed(b"engine failed: ValueError at adapt")
    assert words.lines() == ()
    words.feed(b"er.py:4")
    assert words.lines() == ("engine failed: ValueError at adapter.py:4",)


@given(st.lists(st.binary(max_size=2000), max_size=40), st.integers(0, 40))
def test_it_is_bounded_whatever_comes(pieces: list[bytes], forget_at: int) -> None:
    words = LastWords()
    for number, piece in enumerate(pieces):
        if number == forget_at:
            words.forget()
            assert words.lines() == ()
        words.feed(piece)
    assert len(words.lines()) <= LINES_MAX + 1
    assert all(len(line) <= LINE_CHARS_MAX for line in words.lines())
