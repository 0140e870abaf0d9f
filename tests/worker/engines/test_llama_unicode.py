"""Characters of several tokens: whole in every piece of text, wherever an answer is cut, ends or is continued."""

from __future__ import annotations

from typing import Any

from schemas.frames import FinishReason
from schemas.sampling import GbnfGrammar
from tests.support.llama import Answer, resume, shared_engine, text

PROMPT = text("Characters:")
CHARACTERS = GbnfGrammar('root ::= ([ぁ-ゖ] | [一-龠] | "🙂" | "👩‍🚀" | "🇫🇷")+')
TOKENS = 30


def said(**asked: Any) -> Answer:
    drawn = {"temperature": 1.0, "seed": 5, "max_tokens": TOKENS, "grammar": CHARACTERS}
    return shared_engine().run(PROMPT, **{**drawn, **asked})


def pieces(answer: Answer) -> list[bytes]:
    return [shared_engine().adapter._model.pieces[token] for token in answer.ids]


def test_every_piece_is_of_whole_characters() -> None:
    answer = said()
    assert sum(event.text == "" for event in answer.tokens) >= 5, "characters are spread over tokens"
    assert all("\ufffd" not in event.text for event in answer.tokens)
    assert b"".join(pieces(answer)).decode(errors="ignore") == answer.text


def test_an_answer_that_ends_within_a_character_ends_before_it() -> None:
    whole, cut_within = said(), 0
    for tokens in range(1, TOKENS):
        cut = said(max_tokens=tokens)
        assert (cut.reason, cut.ids) == (FinishReason.LENGTH, whole.ids[:tokens])
        assert whole.text.startswith(cut.text)
        raw = b"".join(pieces(cut))
        assert cut.text == raw.decode(errors="ignore")
        assert cut.finished.usage.completion_tokens == tokens, "its tokens count"
        cut_within += cut.text.encode() != raw
    assert cut_within >= 5


def test_an_answer_continues_within_a_character() -> None:
    whole = said()
    for cut in range(1, TOKENS):
        sent = "".join(event.text for event in whole.tokens[:cut])
        rest = said(resume=resume(whole.ids[:cut], sent))
        assert whole.ids[:cut] + rest.ids == whole.ids
        assert sent + rest.text == whole.text


def test_the_likelihoods_of_parts_of_a_character_have_their_own_bytes() -> None:
    answer = said(logprobs=1)
    told = [logprob.chosen.raw for event in answer.tokens for logprob in event.logprobs]
    assert told == pieces(answer)
    assert any(raw.decode(errors="ignore").encode() != raw for raw in told)
