from __future__ import annotations

import msgspec
import pytest

from schemas.bands import (
    BANDS_MAX,
    BATCH,
    DEFAULT_BANDS,
    INTERACTIVE,
    STANDARD,
    Band,
    BandPolicy,
    bands_named,
    check_band,
    check_bands,
    default_band,
    parse_bands,
)
from schemas.job import Job
from schemas.names import InvalidName
from tests.support.bus import a_job

TOO_MANY = ",".join(f"b{number}" for number in range(BANDS_MAX + 1))
NO_NAMES = ["", "*", ">", "a.b", "a b", "A", "-a", "a_b", "a\n", "é", "$JS", "x" * 33, "x" * 100_000]


def test_the_defaults_fit_together() -> None:
    check_bands(DEFAULT_BANDS)
    assert tuple(DEFAULT_BANDS) == (INTERACTIVE, STANDARD, BATCH)


@pytest.mark.parametrize(
    "changes, word",
    [
        ({BATCH: BandPolicy(slot_share=0.95)}, "slot_share"),
        ({INTERACTIVE: BandPolicy(slot_share=0.5)}, "slot_share"),
        ({BATCH: BandPolicy(slot_share=0.5, floor=0.6), STANDARD: BandPolicy(floor=0.4)}, "floors"),
        ({Band("a.b"): BandPolicy(slot_share=0.1)}, "band name"),
    ],
)
def test_policies_that_contradict_each_other_are_refused(changes: dict[Band, BandPolicy], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        check_bands(dict(DEFAULT_BANDS) | changes)


def test_a_mesh_has_bands() -> None:
    with pytest.raises(ValueError, match="a mesh has 1 to 16 bands, not 0"):
        check_bands({})


@pytest.mark.parametrize("text", NO_NAMES)
def test_what_may_not_enter_a_subject_is_no_band(text: str) -> None:
    with pytest.raises(InvalidName, match="band name") as caught:
        check_band(text)
    assert len(str(caught.value)) < 220
    job = msgspec.to_builtins(a_job())
    with pytest.raises(msgspec.ValidationError, match=r"\$\.band"):
        msgspec.convert(job | {"band": text}, Job)


@pytest.mark.parametrize("text", ["a", "0", "x" * 32, "very-low", "interactive"])
def test_any_other_name_is_one(text: str) -> None:
    assert check_band(text) == text
    assert msgspec.convert(msgspec.to_builtins(a_job()) | {"band": text}, Job).band == text


def test_a_list_of_bands_keeps_its_order() -> None:
    assert parse_bands("urgent, normal ,bulk") == ("urgent", "normal", "bulk")
    assert parse_bands("one") == ("one",)


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "band name ''"),
        ("a,,b", "band name ''"),
        ("a,b,a", "'a' is named twice"),
        ("a,B", "band name 'B'"),
        (TOO_MANY, "1 to 16 bands, not 17"),
    ],
)
def test_a_list_that_no_mesh_can_have_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        parse_bands(text)
    assert "\n" not in str(caught.value)


def test_the_usual_names_have_the_usual_policies() -> None:
    bands = bands_named(parse_bands("interactive,standard,batch"))
    assert bands == DEFAULT_BANDS
    assert tuple(bands) == tuple(DEFAULT_BANDS)


def test_other_names_have_plain_policies() -> None:
    assert bands_named(parse_bands("urgent,normal")) == {"urgent": BandPolicy(), "normal": BandPolicy()}


@pytest.mark.parametrize(
    "text, shares",
    [
        ("interactive,standard,bulk", [1.0, 0.9, 0.9]),
        ("batch", [1.0]),
        ("batch,interactive", [1.0, 1.0]),
        ("urgent,batch,standard", [1.0, 0.75, 0.75]),
    ],
)
def test_whatever_the_order_shares_do_not_grow_and_the_highest_band_may_have_all(
    text: str, shares: list[float]
) -> None:
    bands = bands_named(parse_bands(text))
    check_bands(bands)
    assert [policy.slot_share for policy in bands.values()] == shares


@pytest.mark.parametrize(
    "text, expected",
    [
        ("interactive,standard,batch", "standard"),
        ("standard,other", "standard"),
        ("a,b,c,d,e", "b"),
        ("a,b", "b"),
        ("only", "only"),
    ],
)
def test_a_request_that_names_no_band_gets_a_usual_one(text: str, expected: str) -> None:
    assert default_band(bands_named(parse_bands(text))) == expected
