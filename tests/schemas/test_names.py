"""Names of members and model ids: what may enter a subject."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.names import InvalidName, check_model_id, check_name


@pytest.mark.parametrize("name", ["a", "0", "w1", "gpu-node-7", "a" * 63, "a-"])
def test_names_that_are_allowed(name: str) -> None:
    assert check_name(name, kind="worker") == name


@pytest.mark.parametrize(
    "name", ["", "*", ">", "a.b", "A", "-a", "a b", "a_b", "a\n", "a" * 64, "\u00e9", "\u0661", "any", "resume"]
)
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(InvalidName, match=r"^gateway name "):
        check_name(name, kind="gateway")


@given(st.text(alphabet="*>. \n\t/:$_\u00e9AZ", min_size=1, max_size=5), st.text(alphabet="az09-", max_size=5))
def test_no_name_holds_a_character_with_a_meaning_on_the_bus(bad: str, good: str) -> None:
    for name in (bad + good, good + bad):
        with pytest.raises(InvalidName):
            check_name(name, kind="worker")


@pytest.mark.parametrize("model_id", ["m", "org/Model-7B:q4.gguf", "*", "a b", "\u6a21\u578b", "x" * 128])
def test_model_ids_that_are_allowed(model_id: str) -> None:
    assert check_model_id(model_id) == model_id


@pytest.mark.parametrize("model_id", ["", "x" * 129, "\u00e9" * 65, "a\nb", "a\x00", "\u2028", "\ud800", "\x7f"])
def test_model_ids_that_are_refused(model_id: str) -> None:
    with pytest.raises(InvalidName, match=r"^model id is not valid: "):
        check_model_id(model_id)


@pytest.mark.parametrize("check", [lambda text: check_name(text, kind="worker"), check_model_id])
def test_long_input_is_not_quoted_in_full(check: Callable[[str], str]) -> None:
    with pytest.raises(InvalidName) as caught:
        check("x" * 10_000)
    assert len(str(caught.value)) < 300
