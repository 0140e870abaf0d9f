"""The part of the grants that a band gets even while higher bands would take all of them. Pure.

Every grant, to whichever band, gives each band with a floor f the credit f; a grant of its own costs it 1. A band whose
credit has come to 1 is asked before all others, once. While all bands have work, so many grants as `floor` says go to
it, neither fewer nor (beyond one) more. Credit is no claim on the past: it is gone when nothing waits there.
"""

from __future__ import annotations

import math
from typing import Final

from schemas.bands import Band, Bands

CREDIT_MAX: Final = 2.0
"""A band that cannot be given its turn now, for its share of the slots is full, saves up no more than this."""
_DUE: Final = 1.0 - 1e-9
"""Twenty times 0.05 is a little less than 1."""


class Floors:
    """The credit of each band with a floor."""

    def __init__(self, bands: Bands) -> None:
        self._floors = {band: policy.floor for band, policy in bands.items() if policy.floor > 0}
        self._credit = dict.fromkeys(self._floors, 0.0)

    def due(self) -> Band | None:
        """The band that is to be asked first now: the one with the largest credit, of equals the higher one."""
        band = max(self._credit, key=self._credit.__getitem__, default=None)
        return band if band is not None and self._credit[band] >= _DUE else None

    def grants_until_due(self) -> int | None:
        """After how many grants to bands without a floor one will be due; None: never."""
        grants = [math.ceil((_DUE - self._credit[band]) / floor) for band, floor in self._floors.items()]
        return max(0, min(grants)) if grants else None

    def grant(self, band: Band) -> bool:
        """A job of `band` got a slot. Says whether the floor owed it."""
        owed = self._credit.get(band, 0.0) >= _DUE
        for other, floor in self._floors.items():
            cost = 1.0 if other == band else 0.0
            self._credit[other] = min(CREDIT_MAX, max(0.0, self._credit[other] + floor - cost))
        return owed

    def nothing_waits(self, band: Band) -> None:
        """`band` was asked and had nothing."""
        self._credit[band] = 0.0
