"""The terms of a request that nobody cares about, and band policies with another patience."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from gateway.terms import Terms
from schemas.bands import DEFAULT_BANDS, STANDARD, Band, BandPolicy

TERMS: Final = Terms(band=STANDARD, deadline_s=math.inf, caller="somebody")


def patient(queue_timeout_s: float) -> Mapping[Band, BandPolicy]:
    """The usual bands, in each of which a job may wait that long."""
    return {
        band: msgspec.structs.replace(policy, queue_timeout_s=queue_timeout_s) for band, policy in DEFAULT_BANDS.items()
    }
