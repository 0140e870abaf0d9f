"""Ranges of the numbers that a server says. What is beyond them would not cross the pipe to the worker, or the bus."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

NUMBER_MAX: Final = 2**31 - 1
"""Of tokens, of requests, and of a token's id. A few of them may be added up."""

Count = Annotated[int, Meta(le=NUMBER_MAX)]
"""Some servers say -1 for what they do not know: whoever reads it takes 0."""
