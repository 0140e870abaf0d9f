"""Tokens' bytes to text: the same however the bytes are cut, and never a part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from worker.engines.text import OutputText, StopMatcher, Utf8Decoder

ANY_TEXT = st.text(alphabet=st.sampled_from("ab\n:é漢🙂👩\u200d\ufe0f\u2028"), max_size=24).map(str.encode)
STOPS = st.lists(st.text(alphabet="ab\n:é", min_size=1, max_size=4), max_size=4)


@st.composite
def pieces_of(draw: st.DrawFn, values: st.SearchStrategy[bytes]) -> list[bytes]:
    """A value of `values`, cut at random places."""
    data = draw(values)
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def outcome(pieces: Sequence[bytes], *, stops: Sequence[str] = (), already_sent: int = 0) -> tuple[list[str], bool]:
    output = OutputText(stops=stops, already_sent=already_sent)
    sent = [output.push(piece) for piece in pieces]
    stopped = output.stopped
    if not stopped:
        sent.append(output.finish())
    return sent, stopped


@given(pieces_of(ANY_TEXT))
def test_characters_cut_anywhere_come_out_whole(pieces: list[bytes]) -> None:
    sent, _ = outcome(pieces)
    assert "".join(sent) == b"".join(pieces).decode()
    assert not any("\ufffd" in part for part in sent)


@given(pieces_of(st.binary(max_size=16)))
def test_broken_bytes_give_the_same_text_however_they_are_cut(pieces: list[bytes]) -> None:
    whole, cut = Utf8Decoder(), Utf8Decoder()
    assert "".join(map(cut.push, pieces)) == whole.push(b"".join(pieces))


@given(pieces_of(ANY_TEXT), STOPS)
def test_stop_strings_are_found_however_the_text_is_cut(pieces: list[bytes], stops: list[str]) -> None:
    whole, whole_stopped = outcome([b"".join(pieces)], stops=stops)
    cut, cut_stopped = outcome(pieces, stops=stops)
    assert ("".join(cut), cut_stopped) == ("".join(whole), whole_stopped)


@given(pieces_of(ANY_TEXT), STOPS)
def test_no_part_of_a_stop_string_is_sent_and_nothing_else_is_lost(pieces: list[bytes], stops: list[str]) -> None:
    text = b"".join(pieces).decode()
    sent, stopped = outcome(pieces, stops=stops)
    sent_text = "".join(sent)
    assert text.startswith(sent_text)
    assert not any(stop in sent_text for stop in stops)
    assert stopped == any(stop in text for stop in stops)
    if stopped:
        assert any(text[len(sent_text) :].startswith(stop) for stop in stops)
    else:
        assert sent_text == text


@given(pieces_of(ANY_TEXT), STOPS, st.data())
def test_a_continuation_sends_exactly_what_was_not_sent_yet(
    pieces: list[bytes], stops: list[str], data: st.DataObject
) -> None:
    undisturbed, _ = outcome(pieces, stops=stops)
    cut = data.draw(st.integers(0, len(pieces)))
    before = "".join(undisturbed[:cut])
    continued, _ = outcome(pieces, stops=stops, already_sent=len(before))
    assert before + "".join(continued) == "".join(undisturbed)
    assert "".join(continued[:cut]) == ""


def test_an_unfinished_character_at_the_end_is_dropped() -> None:
    sent, _ = outcome([b"ok \xf0\x9f\x99"])
    assert "".join(sent) == "ok "


def test_the_held_back_tail_is_released_exactly_once() -> None:
    matcher = StopMatcher(["\nUser:"])
    assert matcher.push("bye\nUs") == "bye"
    assert matcher.finish() == "\nUs"
    assert matcher.finish() == ""


def test_a_stop_string_over_several_tokens_leaves_nothing_behind() -> None:
    sent, stopped = outcome([b"abc DEF", b"G", b"HI", b"J and more"], stops=["DEFGHIJ"])
    assert ("".join(sent), stopped) == ("abc ", True)


def test_an_empty_stop_string_stops_nothing() -> None:
    assert outcome([b"text"], stops=[""]) == (["text", ""], False)


def test_of_overlapping_stop_strings_the_one_that_ends_first_wins() -> None:
    assert outcome([b"xabcd"], stops=["abcd", "bc"])[0] == ["xa"]
