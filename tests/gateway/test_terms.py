from __future__ import annotations

import math

import pytest

from gateway.settings import GatewaySettings
from gateway.terms import Terms, read_terms, tier_of
from schemas.errors import ErrorCode, MeshError
from schemas.job import Band

SETTINGS = GatewaySettings()


def terms(*headers: tuple[bytes, bytes], tier: str | None = None, settings: GatewaySettings = SETTINGS) -> Terms:
    return read_terms(headers, "192.0.2.7", service_tier=tier, settings=settings)


def refused(*headers: tuple[bytes, bytes], settings: GatewaySettings = SETTINGS) -> MeshError:
    with pytest.raises(MeshError) as caught:
        terms(*headers, settings=settings)
    assert caught.value.code is ErrorCode.INVALID_VALUE
    return caught.value


@pytest.mark.parametrize(
    "tier, band",
    [
        ("priority", Band.INTERACTIVE),
        ("flex", Band.BATCH),
        ("auto", Band.STANDARD),
        ("default", Band.STANDARD),
        (None, Band.STANDARD),
    ],
)
def test_the_service_tier_chooses_the_band(tier: str | None, band: Band) -> None:
    assert terms(tier=tier).band is band


@pytest.mark.parametrize("band", list(Band))
def test_a_tier_names_each_band_and_leads_back_to_it(band: Band) -> None:
    assert terms(tier=tier_of(band)).band is band


@pytest.mark.parametrize("text", [b"batch", b" Batch ", b"BATCH"])
def test_the_header_wins_over_the_tier(text: bytes) -> None:
    assert terms((b"x-mesh-band", text), tier="priority").band is Band.BATCH


@pytest.mark.parametrize("text", [b"", b"urgent", b"batch,interactive", b"\xff\xfe", b"x" * 10_000])
def test_a_band_that_does_not_exist_is_refused_by_name(text: bytes) -> None:
    error = refused((b"x-mesh-band", text))
    assert error.param == "x-mesh-band"
    assert "interactive, standard, batch" in error.message
    assert len(error.message) < 200


def test_a_band_that_is_not_open_is_refused_by_header_and_by_tier() -> None:
    closed = GatewaySettings(bands_open=frozenset({Band.STANDARD, Band.BATCH}))
    assert refused((b"x-mesh-band", b"interactive"), settings=closed).param == "x-mesh-band"
    with pytest.raises(MeshError) as caught:
        terms(tier="priority", settings=closed)
    assert caught.value.param == "service_tier"


def test_a_deadline_is_seconds_within_the_limit() -> None:
    assert terms().deadline_s == math.inf
    assert terms((b"x-mesh-deadline-s", b" 2.5 ")).deadline_s == 2.5
    assert terms((b"x-mesh-deadline-s", b"86400")).deadline_s == 86_400


@pytest.mark.parametrize("text", [b"", b"0", b"-1", b"nan", b"inf", b"1e9", b"86400.1", b"soon", b"\xff", b"1_0 s"])
def test_any_other_deadline_is_refused(text: bytes) -> None:
    error = refused((b"x-mesh-deadline-s", text))
    assert error.param == "x-mesh-deadline-s"
    assert "86400" in error.message


def test_callers_are_told_apart_by_key_or_else_by_address_and_no_key_is_kept() -> None:
    key = (b"authorization", b"Bearer sk-secret")
    assert terms(key).caller == terms(key).caller
    assert terms(key).caller != terms((b"authorization", b"Bearer sk-other")).caller
    assert "secret" not in repr(terms(key))
    assert terms().caller == "192.0.2.7"
