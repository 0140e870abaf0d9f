"""What a request's headers say besides its body: band, deadline, and who calls. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from gateway.errors import quoted
from gateway.settings import GatewaySettings
from schemas.errors import ErrorCode, MeshError
from schemas.job import Band

BAND_HEADER: Final = b"x-mesh-band"
DEADLINE_HEADER: Final = b"x-mesh-deadline-s"
_TIERS: Final = {"priority": Band.INTERACTIVE, "default": Band.STANDARD, "auto": Band.STANDARD, "flex": Band.BATCH}
_TIER_OF: Final = {Band.INTERACTIVE: "priority", Band.STANDARD: "default", Band.BATCH: "flex"}


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms of one request. `deadline_s` counts from its arrival, infinite where none is set; `caller` tells one
    caller from another and is neither a key nor an address."""

    band: Band
    deadline_s: float
    caller: str


def read_terms(
    headers: Iterable[tuple[bytes, bytes]], address: str, *, service_tier: str | None, settings: GatewaySettings
) -> Terms:
    """The terms in `headers` (names in lower case), with `service_tier` from the body.

    Raises `MeshError` naming the header or field that is wrong.
    """
    given = dict(headers)
    return Terms(
        band=_band(given.get(BAND_HEADER), service_tier, open_bands=settings.bands_open),
        deadline_s=_deadline_s(given.get(DEADLINE_HEADER), settings.deadline_s_max),
        caller=_caller(given, address),
    )


def tier_of(band: Band) -> str:
    """OpenAI's name of a band, for the `service_tier` of a response."""
    return _TIER_OF[band]


def _band(header: bytes | None, service_tier: str | None, *, open_bands: frozenset[Band]) -> Band:
    if header is None:
        param, band = "service_tier", _TIERS[service_tier or "auto"]
    else:
        param, text = BAND_HEADER.decode(), header.decode("latin-1").strip().lower()
        try:
            band = Band(text)
        except ValueError:
            message = f"there is no band {quoted(text)}: choose one of {', '.join(Band)}"
            raise MeshError(ErrorCode.INVALID_VALUE, message, param=param) from None
    if band not in open_bands:
        message = f"the band '{band}' is not open here: choose one of {', '.join(sorted(open_bands))}"
        raise MeshError(ErrorCode.INVALID_VALUE, message, param=param)
    return band


def _deadline_s(header: bytes | None, longest_s: float) -> float:
    if header is None:
        return math.inf
    text = header.decode("latin-1").strip()
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= longest_s:
        message = f"the deadline must be a number of seconds, more than 0 and at most {longest_s:g}, not {quoted(text)}"
        raise MeshError(ErrorCode.INVALID_VALUE, message, param=DEADLINE_HEADER.decode())
    return seconds


def _caller(headers: Mapping[bytes, bytes], address: str) -> str:
    key = headers.get(b"authorization")
    return hashlib.blake2b(key, digest_size=12).hexdigest() if key else address
