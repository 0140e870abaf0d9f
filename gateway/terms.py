"""What a request's headers say besides its body: band, deadline, and who calls. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from gateway.errors import quoted
from gateway.settings import GatewaySettings
from schemas.bands import Band, default_band
from schemas.errors import ErrorCode, MeshError

BAND_HEADER: Final = b"x-mesh-band"
DEADLINE_HEADER: Final = b"x-mesh-deadline-s"


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms of one request. `deadline_s` counts from when its body was read, infinite where none is set; `caller`
    tells one caller from another: a hash of the key where there is one, else the address."""

    band: Band
    deadline_s: float
    caller: str


def read_terms(
    headers: Iterable[tuple[bytes, bytes]], address: str, *, service_tier: str | None, settings: GatewaySettings
) -> Terms:
    """The terms in `headers` (names in lower case), with `service_tier` from the body.

    Raises `MeshError` naming the header or field that is wrong.
    """
    given = _given(headers)
    return Terms(
        band=_band(given.get(BAND_HEADER), service_tier, settings),
        deadline_s=_deadline_s(given.get(DEADLINE_HEADER), settings),
        caller=_caller(given, address),
    )


def _given(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """The headers by name. Of two that say a request's terms none is the right one: what stands between client and
    gateway may have read the other."""
    given: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in given and name in (BAND_HEADER, DEADLINE_HEADER):
            param = name.decode()
            raise MeshError(ErrorCode.INVALID_VALUE, f"the header '{param}' came more than once", param=param)
        given[name] = value
    return given


def tier_of(band: Band, settings: GatewaySettings) -> str:
    """OpenAI's name of a band, for the `service_tier` of a response: `default` is the one of requests that name none,
    those above it are `priority`, those below it `flex`."""
    names = tuple(settings.bands)
    distance = names.index(band) - names.index(_default(settings))
    if distance == 0:
        return "default"
    return "priority" if distance < 0 else "flex"


def _of_tier(service_tier: str | None, settings: GatewaySettings) -> Band:
    names = tuple(settings.bands)
    match service_tier:
        case "priority":
            return names[0]
        case "flex":
            return names[-1]
        case _:
            return _default(settings)


def _default(settings: GatewaySettings) -> Band:
    return default_band(settings.bands) if settings.default_band is None else settings.default_band


def _band(header: bytes | None, service_tier: str | None, settings: GatewaySettings) -> Band:
    """A band out of the settings, never the client's own text: it becomes part of a subject."""
    if header is None:
        param, band = "service_tier", _of_tier(service_tier, settings)
    else:
        param, text = BAND_HEADER.decode(), header.decode("latin-1").strip().lower()
        named = next((band for band in settings.bands if band == text), None)
        if named is None:
            raise MeshError(
                ErrorCode.INVALID_VALUE, f"there is no band {quoted(text)}: {_choice(settings)}", param=param
            )
        band = named
    if not _is_open(band, settings):
        message = f"the band '{band}' is not open here: {_choice(settings)}"
        raise MeshError(ErrorCode.INVALID_VALUE, message, param=param)
    return band


def _is_open(band: Band, settings: GatewaySettings) -> bool:
    return settings.bands_open is None or band in settings.bands_open


def _choice(settings: GatewaySettings) -> str:
    return f"choose one of {', '.join(band for band in settings.bands if _is_open(band, settings))}"


def _deadline_s(header: bytes | None, settings: GatewaySettings) -> float:
    if header is None:
        return math.inf if settings.deadline_s is None else settings.deadline_s
    longest_s = settings.deadline_s_max
    text = header.decode("latin-1").strip()
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= longest_s:
        reason = f"the deadline must be a number of seconds, more than 0 and at most {longest_s:g}"
        message = f"{reason} (deadline_s_max), not {quoted(text)}"
        raise MeshError(ErrorCode.INVALID_VALUE, message, param=DEADLINE_HEADER.decode())
    return seconds


def _caller(headers: Mapping[bytes, bytes], address: str) -> str:
    key = headers.get(b"authorization")
    return hashlib.blake2b(key, digest_size=12).hexdigest() if key else address
