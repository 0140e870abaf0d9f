from __future__ import annotations

import pytest

from schemas.bands import DEFAULT_BANDS, BandPolicy, check_bands
from schemas.job import Band


def test_the_defaults_fit_together() -> None:
    check_bands(DEFAULT_BANDS)
    assert DEFAULT_BANDS.keys() == set(Band)


@pytest.mark.parametrize(
    "changes, word",
    [
        ({Band.BATCH: BandPolicy(slot_share=0.95)}, "slot_share"),
        ({Band.INTERACTIVE: BandPolicy(slot_share=0.5)}, "slot_share"),
        ({Band.BATCH: BandPolicy(slot_share=0.5, floor=0.6), Band.STANDARD: BandPolicy(floor=0.4)}, "floors"),
    ],
)
def test_policies_that_contradict_each_other_are_refused(changes: dict[Band, BandPolicy], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        check_bands(dict(DEFAULT_BANDS) | changes)


def test_every_band_needs_a_policy() -> None:
    with pytest.raises(ValueError, match="standard has no policy"):
        check_bands({band: policy for band, policy in DEFAULT_BANDS.items() if band is not Band.STANDARD})
