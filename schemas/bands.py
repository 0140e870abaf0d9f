"""Priority bands: their names, their order, and what each is granted. All of it is settings.

A mesh's bands are an ordered mapping from name to policy, the highest first: its order is the order of pulling. Names
are minted with the mesh's keys, for the rights on the bus name each band's stream. Policies are settings of every
member; those of one mesh use the same ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Final, NewType, TypeAlias

import msgspec
from msgspec import Meta

from schemas.names import InvalidName

Band = NewType("Band", str)
"""The name of a band. It becomes a token of subjects and a part of stream names: only `check_band` makes one."""

BANDS_MAX: Final = 16
"""Each band costs two consumers and two open pulls per model and replica, and a stream with bytes of its own."""
_PATTERN: Final = r"^[a-z0-9][a-z0-9-]{0,31}\Z"
_NAME: Final = re.compile(_PATTERN)

CheckedBand = Annotated[Band, Meta(pattern=_PATTERN)]
"""A band as a field of a message: what is none is refused where the message is read."""

INTERACTIVE: Final = Band("interactive")
STANDARD: Final = Band("standard")
BATCH: Final = Band("batch")


class BandPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds and rights of one band.

    `queue_timeout_s`: how long a job may wait. `queued_jobs_max`: how many may, per model and lane (None: as many as
    `QueueBounds.queued_jobs_max` says for every band). `slot_share`: the part of a replica's slots that this band and
    all bands below it may hold together. `floor`: the part of the grants that it gets even while higher bands would
    take all. `preemptible`: its running jobs make way for higher bands, and continue later.
    """

    queue_timeout_s: Annotated[float, Meta(gt=0)] = 120.0
    queued_jobs_max: Annotated[int, Meta(ge=1)] | None = None
    slot_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    floor: Annotated[float, Meta(ge=0, le=1)] = 0.0
    preemptible: bool = False


Bands: TypeAlias = Mapping[Band, BandPolicy]
"""The bands of a mesh, the highest first."""

DEFAULT_BANDS: Final[Bands] = MappingProxyType(
    {
        INTERACTIVE: BandPolicy(queue_timeout_s=60.0),
        STANDARD: BandPolicy(slot_share=0.9, floor=0.1),
        BATCH: BandPolicy(queue_timeout_s=3_600.0, slot_share=0.75, floor=0.05, preemptible=True),
    }
)
DEFAULT_NAMES: Final = tuple(DEFAULT_BANDS)


def check_band(text: str) -> Band:
    """`text` as the name of a band. Raises `InvalidName` where it may not enter a subject."""
    if not _NAME.match(text):
        raise InvalidName(
            f"band name {text[:80]!r} is not valid: use 1 to 32 of a-z, 0-9 and '-', beginning with a letter or digit"
        )
    return Band(text)


def parse_bands(text: str) -> tuple[Band, ...]:
    """Names of bands, the highest first, separated by commas. Raises `InvalidName`, or ValueError for a list that no
    mesh can have."""
    return _checked(check_band(part.strip()) for part in text.split(","))


def bands_named(names: Iterable[Band]) -> Bands:
    """Bands of these names, in this order: those of a default's name have its policy, others that of the plain
    `BandPolicy`. A share is never larger than the one above it, and the highest band may hold every slot.

    Raises ValueError for a list that no mesh can have.
    """
    bands: dict[Band, BandPolicy] = {}
    share = 1.0
    for name in _checked(names):
        policy = DEFAULT_BANDS.get(name, BandPolicy())
        share = min(share, policy.slot_share) if bands else 1.0
        bands[name] = msgspec.structs.replace(policy, slot_share=share)
    return MappingProxyType(bands)


def default_band(bands: Bands) -> Band:
    """The band of a request that names none: `standard` where there is one, else the second, else the only one."""
    names = tuple(bands)
    return STANDARD if STANDARD in bands else names[min(1, len(names) - 1)]


def check_bands(bands: Bands) -> None:
    """Raise ValueError where there are too few or too many bands, or their policies contradict each other."""
    _checked(check_band(name) for name in bands)
    shares = [policy.slot_share for policy in bands.values()]
    if shares != sorted(shares, reverse=True):
        raise ValueError("band settings contradict each other: slot_share grows from a higher band to a lower one")
    if sum(policy.floor for policy in bands.values()) >= 1.0:
        raise ValueError("band settings contradict each other: the floors leave nothing for the others")


def _checked(names: Iterable[Band]) -> tuple[Band, ...]:
    bands = tuple(names)
    if not 1 <= len(bands) <= BANDS_MAX:
        raise ValueError(f"a mesh has 1 to {BANDS_MAX} bands, not {len(bands)}")
    twice = next((band for band in bands if bands.count(band) > 1), None)
    if twice is not None:
        raise ValueError(f"the band '{twice}' is named twice")
    return bands
