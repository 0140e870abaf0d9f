from __future__ import annotations

import math
from typing import Any

import pytest

from gateway.settings import GatewaySettings
from gateway.terms import Terms, read_terms, tier_of
from schemas.bands import BATCH, DEFAULT_BANDS, INTERACTIVE, STANDARD, Band, bands_named, parse_bands
from schemas.errors import ErrorCode, MeshError

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
        ("priority", INTERACTIVE),
        ("flex", BATCH),
        ("auto", STANDARD),
        ("default", STANDARD),
        (None, STANDARD),
    ],
)
def test_the_service_tier_chooses_the_band(tier: str | None, band: Band) -> None:
    assert terms(tier=tier).band is band


@pytest.mark.parametrize("band", list(DEFAULT_BANDS))
def test_a_tier_names_each_band_and_leads_back_to_it(band: Band) -> None:
    assert terms(tier=tier_of(band, SETTINGS)).band is band


@pytest.mark.parametrize("text", [b"batch", b" Batch ", b"BATCH"])
def test_the_header_wins_over_the_tier(text: bytes) -> None:
    assert terms((b"x-mesh-band", text), tier="priority").band == BATCH


@pytest.mark.parametrize("text", [b"", b"urgent", b"batch,interactive", b"\xff\xfe", b"x" * 10_000])
def test_a_band_that_does_not_exist_is_refused_by_name(text: bytes) -> None:
    error = refused((b"x-mesh-band", text))
    assert error.param == "x-mesh-band"
    assert "interactive, standard, batch" in error.message
    assert len(error.message) < 200


def test_a_band_that_is_not_open_is_refused_by_header_and_by_tier() -> None:
    closed = GatewaySettings(bands_open=frozenset({STANDARD, BATCH}))
    assert refused((b"x-mesh-band", b"interactive"), settings=closed).param == "x-mesh-band"
    with pytest.raises(MeshError) as caught:
        terms(tier="priority", settings=closed)
    assert caught.value.param == "service_tier"


def test_a_deadline_is_seconds_within_the_limit() -> None:
    assert terms().deadline_s == math.inf
    assert terms((b"x-mesh-deadline-s", b" 2.5 ")).deadline_s == 2.5
    assert terms((b"x-mesh-deadline-s", b"86400")).deadline_s == 86_400


def test_a_request_that_sets_no_deadline_gets_the_settings() -> None:
    settings = GatewaySettings(deadline_s=30.0)
    assert read_terms([], "a", service_tier=None, settings=settings).deadline_s == 30.0
    longer = [(b"x-mesh-deadline-s", b"60")]
    assert read_terms(longer, "a", service_tier=None, settings=settings).deadline_s == 60.0
    with pytest.raises(ValueError, match="deadline_s <= deadline_s_max"):
        GatewaySettings(deadline_s=30.0, deadline_s_max=20.0)


@pytest.mark.parametrize("text", [b"", b"0", b"-1", b"nan", b"inf", b"1e9", b"86400.1", b"soon", b"\xff", b"1_0 s"])
def test_any_other_deadline_is_refused(text: bytes) -> None:
    error = refused((b"x-mesh-deadline-s", text))
    assert error.param == "x-mesh-deadline-s"
    assert "86400" in error.message


@pytest.mark.parametrize("name", [b"x-mesh-band", b"x-mesh-deadline-s"])
@pytest.mark.parametrize("second", [b"5", b"6"])
def test_a_header_that_came_twice_is_refused_by_name_also_with_one_value(name: bytes, second: bytes) -> None:
    error = refused((name, b"5"), (b"x-other", b"1"), (b"x-other", b"2"), (name, second))
    assert error.param == name.decode()
    assert "more than once" in error.message


def test_callers_are_told_apart_by_key_or_else_by_address_and_no_key_is_kept() -> None:
    key = (b"authorization", b"Bearer sk-secret")
    assert terms(key).caller == terms(key).caller
    assert terms(key).caller != terms((b"authorization", b"Bearer sk-other")).caller
    assert "secret" not in repr(terms(key))
    assert terms().caller == "192.0.2.7"


def with_bands(text: str, **fields: Any) -> GatewaySettings:
    return GatewaySettings(bands=bands_named(parse_bands(text)), **fields)


@pytest.mark.parametrize(
    "names, priority, default, flex",
    [
        ("only", "only", "only", "only"),
        ("high,low", "high", "low", "low"),
        ("urgent,normal,bulk", "urgent", "normal", "bulk"),
        ("a,b,standard,d,e", "a", "standard", "e"),
    ],
)
def test_tiers_are_places_in_the_order_of_the_bands(names: str, priority: str, default: str, flex: str) -> None:
    settings = with_bands(names)
    chosen = {tier: terms(tier=tier, settings=settings).band for tier in ("priority", "default", "auto", "flex")}
    assert chosen == {"priority": priority, "default": default, "auto": default, "flex": flex}
    assert terms(settings=settings).band == default


def test_the_band_of_requests_that_name_none_is_a_setting() -> None:
    settings = with_bands("a,b,c", default_band=Band("c"))
    assert terms(settings=settings).band == "c"
    assert terms(tier="priority", settings=settings).band == "a"


def test_every_band_has_a_tier() -> None:
    settings = with_bands("a,b,c,d,e", default_band=Band("c"))
    tiers = [tier_of(band, settings) for band in settings.bands]
    assert tiers == ["priority", "priority", "default", "flex", "flex"]


@pytest.mark.parametrize("names, tier, reported", [("high,low", "flex", "default"), ("only", "priority", "default")])
def test_where_two_tiers_are_one_band_the_usual_one_is_reported(names: str, tier: str, reported: str) -> None:
    settings = with_bands(names)
    assert tier_of(terms(tier=tier, settings=settings).band, settings) == reported


def test_the_header_takes_a_band_of_this_mesh_and_no_other() -> None:
    settings = with_bands("urgent,normal,bulk", bands_open=frozenset({Band("urgent"), Band("bulk")}))
    assert terms((b"x-mesh-band", b"bulk"), settings=settings).band == "bulk"
    for text in (b"interactive", b"normal", b"*", b"urgent.>"):
        assert refused((b"x-mesh-band", text), settings=settings).message.endswith("choose one of urgent, bulk")


@pytest.mark.parametrize("field", [{"default_band": Band("x")}, {"bands_open": frozenset({Band("x")})}])
def test_settings_that_name_a_band_there_is_not_are_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(field))} names 'x', which is none of the bands a, b"):
        with_bands("a,b", **field)
