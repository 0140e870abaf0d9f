"""The depth of a JSON text, told from its bytes."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.dialects.nesting import deeper_than

BRACKETS_AND_ESCAPES = st.text(alphabet='[]{}"\\ nu,:é\u2028', max_size=8)
VALUES = st.recursive(
    st.none() | st.integers() | BRACKETS_AND_ESCAPES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(BRACKETS_AND_ESCAPES, inner, max_size=3),
    max_leaves=30,
)


def depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


@given(VALUES, st.booleans(), st.sampled_from([None, 2]))
@example(["\\", "[", "\\\\", "{", '\\"[[['], True, None)
@example([[], {}, [[]]], True, 2)
def test_it_is_the_number_of_levels_whatever_strings_hold(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    levels = depth(value)
    assert not deeper_than(text, levels)
    assert levels == 0 or deeper_than(text, levels - 1)


@pytest.mark.parametrize("opening, closing", [(b"[", b"]"), (b'{"a":', b"}")])
def test_many_shallow_values_are_no_deep_one(opening: bytes, closing: bytes) -> None:
    level = opening * 3 + b"0" + closing * 3
    text = b"[" + b",".join([level] * 1_000) + b"]"
    assert not deeper_than(text, 4)
    assert deeper_than(text, 3)
