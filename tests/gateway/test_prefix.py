"""Names of prompts' beginnings: shared exactly as far as the texts are, and only under the same salt."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.prefix import BLOCK_BYTES, caller_salt, prefix_hashes
from schemas.job import PREFIX_HASHES_MAX, ChatPrompt, EmbeddingPrompt, TextPrompt, TokenPrompt

SALT = b"tenant"


def shared(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    return sum(a == b for a, b in zip(one, other, strict=False))


@given(st.integers(0, 2000), st.integers(0, 1000), st.integers(0, 1000))
def test_names_are_shared_as_far_as_whole_blocks_are(common: int, one: int, other: int) -> None:
    first = prefix_hashes(TextPrompt("a" * common + "b" * one), salt=SALT)
    second = prefix_hashes(TextPrompt("a" * common + "c" * other), salt=SALT)
    assert len(first) == (len("text:") + common + one) // BLOCK_BYTES
    expected = (len("text:") + common) // BLOCK_BYTES
    assert shared(first, second) == expected
    assert first[:expected] == second[:expected]


def test_a_conversation_keeps_the_names_of_its_earlier_turns() -> None:
    turns = [{"role": "user", "content": "x" * 300}, {"role": "assistant", "content": "y" * 300}]
    before = prefix_hashes(ChatPrompt(messages=tuple(turns)), salt=SALT)
    after = prefix_hashes(ChatPrompt(messages=(*turns, {"role": "user", "content": "z" * 300})), salt=SALT)
    assert len(before) >= 2
    assert after[: len(before)] == before
    assert len(after) > len(before)


def test_another_salt_shares_no_name() -> None:
    prompt = TextPrompt("a" * 5000)
    assert not set(prefix_hashes(prompt, salt=b"one")) & set(prefix_hashes(prompt, salt=b"two"))


def test_a_callers_salt_is_its_own_and_its_gateways() -> None:
    salts = {caller_salt(caller, secret=secret) for caller in ("one", "two", "") for secret in (b"s" * 32, b"t" * 32)}
    assert len(salts) == 6
    prompt = TextPrompt("a" * 5000)
    assert len({prefix_hashes(prompt, salt=salt) for salt in salts}) == 6


def test_names_are_short_and_few() -> None:
    hashes = prefix_hashes(TextPrompt("a" * 10**6), salt=SALT)
    assert len(hashes) == PREFIX_HASHES_MAX
    assert all(len(name) == 16 and int(name, 16) >= 0 for name in hashes)


def test_every_kind_of_prompt_has_its_names() -> None:
    assert prefix_hashes(TokenPrompt(ids=tuple(range(500))), salt=SALT)
    for prompt in (
        TextPrompt("lone \ud800 surrogate" * 100),
        ChatPrompt(messages=({"role": "user", "content": "\ud800" * 900},)),
    ):
        assert prefix_hashes(prompt, salt=SALT) == ()
    assert prefix_hashes(EmbeddingPrompt(inputs=("a" * 10_000,)), salt=SALT) == ()
    assert prefix_hashes(TextPrompt("short"), salt=SALT) == ()
