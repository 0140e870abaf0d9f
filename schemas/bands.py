"""What each priority band is granted. The numbers are settings; members of one mesh use the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from schemas.job import Band


class BandPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds and rights of one band.

    `queue_timeout_s`: how long a job may wait. `slot_share`: the part of a replica's slots that this band and all bands
    below it may hold together. `floor`: the part of the grants that it gets even while higher bands would take all.
    `preemptible`: its running jobs make way for higher bands, and continue later.
    """

    queue_timeout_s: Annotated[float, Meta(gt=0)] = 120.0
    slot_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    floor: Annotated[float, Meta(ge=0, le=1)] = 0.0
    preemptible: bool = False


DEFAULT_BANDS: Final[Mapping[Band, BandPolicy]] = MappingProxyType(
    {
        Band.INTERACTIVE: BandPolicy(queue_timeout_s=60.0),
        Band.STANDARD: BandPolicy(slot_share=0.9),
        Band.BATCH: BandPolicy(queue_timeout_s=3_600.0, slot_share=0.75, floor=0.05, preemptible=True),
    }
)


def check_bands(bands: Mapping[Band, BandPolicy]) -> None:
    """Raise ValueError where policies contradict each other. Every band has one."""
    missing = [band for band in Band if band not in bands]
    if missing:
        raise ValueError(f"band settings contradict each other: {', '.join(missing)} has no policy")
    shares = [bands[band].slot_share for band in Band]
    if shares != sorted(shares, reverse=True):
        raise ValueError("band settings contradict each other: slot_share grows from a higher band to a lower one")
    if sum(policy.floor for policy in bands.values()) >= 1.0:
        raise ValueError("band settings contradict each other: the floors leave nothing for the others")
