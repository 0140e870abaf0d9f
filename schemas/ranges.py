"""Numbers with a range, for what crosses the bus and for settings: whoever reads one outside it gets an error."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

NonNegative = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
"""At least 1: a bound of 0 would refuse everything, or mean "without end" to whoever is told it."""
Port = Annotated[int, Meta(ge=0, le=65_535)]
Interval = Annotated[float, Meta(gt=0)]
"""Seconds that cannot be none: a wait that would end before it began, or a loop without a pause."""
Share = Annotated[float, Meta(gt=0, le=1)]
"""A part of something, up to all of it."""
