"""Likelihoods stay with the text of their tokens, however that is cut, held back or cut off."""

import codecs
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.dialects.events import encode
from gateway.dialects.likelihoods import (
    TOKENS_AT_ONCE,
    LikelihoodTrack,
    Placed,
    apart,
    chat_logprobs,
    chat_logprobs_pieces,
    placed,
    text_logprobs,
    text_logprobs_pieces,
    text_of,
)
from schemas.frames import Delta, Likelihood, TokenLogprob

TEXT = "h\u00e9 \u20ac\U0001f600!"


def token(raw: bytes, *, id_: int = 1, top: tuple[Likelihood, ...] = (), logprob: float = -1.0) -> TokenLogprob:
    return TokenLogprob(chosen=Likelihood(id=id_, raw=raw, logprob=logprob), top=top)


def delta(text: str, *tokens: TokenLogprob, choice: int = 0) -> Delta:
    return Delta(handle=1, seq=0, text=text, ids=(1,) * len(tokens), choice=choice, logprobs=tokens)


def raw_of(placed: list[Placed]) -> bytes:
    return b"".join(each.token.chosen.raw for each in placed)


@settings(deadline=None)
@given(st.data())
def test_the_bytes_of_the_tokens_shown_are_those_of_the_text_shown(data: st.DataObject) -> None:
    """Tokens may end in the middle of a character, and text may be held back for as long as an engine likes."""
    raw = TEXT.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, len(raw) - 1))))
    pieces = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    track, decoder, held, shown, sent = LikelihoodTrack(), codecs.getincrementaldecoder("utf-8")(), "", b"", ""
    for piece in pieces:
        held += decoder.decode(piece)
        free = data.draw(st.integers(0, len(held)))
        now, held = held[:free], held[free:]
        sent += now
        shown += raw_of(track.push(delta(now, token(piece))))
        assert shown.startswith(sent.encode())
        assert len(sent) == len(TEXT) or len(shown) < len(sent.encode()) + max(map(len, pieces))
    shown += raw_of(track.push(delta(held)))
    assert shown == raw


def test_tokens_of_a_stop_string_are_not_shown() -> None:
    track = LikelihoodTrack()
    assert raw_of(track.push(delta("a", token(b"a")))) == b"a"
    assert track.push(delta("", token(b" ST"))) == []
    assert track.push(delta("", token(b"OP"))) == []


def test_bytes_that_are_no_text_stay_raw() -> None:
    (placed,) = LikelihoodTrack().push(delta("\ufffd", token(b"\xff")))
    (shown,) = chat_logprobs([placed]).content
    assert (shown.token, shown.bytes) == ("\ufffd", (0xFF,))
    legacy = text_logprobs([placed])
    assert legacy.tokens == ("bytes:\\xff",)
    assert legacy.top_logprobs == ({"bytes:\\xff": -1.0},)


@pytest.mark.parametrize(
    "given, shown",
    [(-0.5, -0.5), (float("-inf"), -9999.0), (float("nan"), -9999.0), (-20_000.0, -9999.0), (1e-12, 0.0)],
)
def test_every_likelihood_is_a_number_that_json_has(given: float, shown: float) -> None:
    assert chat_logprobs([Placed(token(b"a", logprob=given), 0)]).content[0].logprob == shown


def test_the_shape_of_plain_completions() -> None:
    best = Likelihood(id=2, raw=b"b", logprob=-0.1)
    chosen = token(b"a", top=(best,))
    again = token(b"b", id_=2, top=(best,), logprob=-0.1)
    shown = text_logprobs(LikelihoodTrack().push(delta("ab", chosen, again)))
    assert (shown.tokens, shown.token_logprobs, shown.text_offset) == (("a", "b"), (-1.0, -0.1), (0, 1))
    assert shown.top_logprobs == ({"b": -0.1, "a": -1.0}, {"b": -0.1})


def test_choices_are_gathered_apart() -> None:
    frames = [delta("a", token(b"a")), delta("x", token(b"x"), choice=1), delta("b", token(b"b"))]
    first, second = apart(frames, choices=2)
    assert (text_of(first), text_of(second)) == ("ab", "x")
    assert [each.offset for each in placed(first)] == [0, 1]
    assert [each.offset for each in placed(second)] == [0]


@pytest.mark.parametrize("count", [0, 1, TOKENS_AT_ONCE, TOKENS_AT_ONCE + 1, 5 * TOKENS_AT_ONCE])
def test_in_pieces_they_are_the_same_and_few_tokens_are_shown_at_once(count: int) -> None:
    taken: list[int] = []

    def counted() -> Iterator[Placed]:
        for number in range(count):
            taken.append(number)
            yield Placed(token(b"%d" % number), number, blank=number == 0)

    for whole, pieces in ((chat_logprobs, chat_logprobs_pieces), (text_logprobs, text_logprobs_pieces)):
        taken.clear()
        shown, before = b"", 0
        for piece in pieces(counted()):
            assert len(taken) - before <= TOKENS_AT_ONCE
            shown, before = shown + piece, len(taken)
        assert shown == encode(whole(list(counted())))


def test_of_alternatives_that_are_spelt_alike_the_likeliest_is_shown() -> None:
    """Control tokens have no text at all."""
    top = tuple(Likelihood(id=number, raw=b"", logprob=-float(number)) for number in (1, 2))
    shown = text_logprobs([Placed(token(b"a", top=top, logprob=-3.0, id_=9), 0)])
    assert shown.top_logprobs == ({"": -1.0, "a": -3.0},)
