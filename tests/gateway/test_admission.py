"""May this request in? Each refusal names the limit that it met."""

from dataclasses import replace

import pytest

from bus.topology import QueueBounds
from gateway.admission import Load, caller_refusal, model_refusal, prompts_refusal, refusal, smoothed_lag
from gateway.settings import GatewaySettings
from gateway.waiting import NOTHING, Held
from schemas.bands import STANDARD, BandPolicy
from schemas.errors import ErrorCode

SETTINGS = GatewaySettings(open_requests_max=10, open_bytes_max=1_000, body_bytes_max=500, loop_lag_max_s=0.5)
CALM = Load(open_requests=9, open_bytes=900, loop_lag_s=0.5, bus_up=True, draining=False)


def test_a_request_that_fits_exactly_enters() -> None:
    assert refusal(CALM, body_bytes=100, settings=SETTINGS) is None


@pytest.mark.parametrize(
    "load, code, named",
    [
        (replace(CALM, draining=True), ErrorCode.SHUTTING_DOWN, "shutting down"),
        (replace(CALM, bus_up=False), ErrorCode.BUS_UNAVAILABLE, "bus"),
        (replace(CALM, loop_lag_s=0.51), ErrorCode.OVERLOADED, "loop_lag_max_s"),
        (replace(CALM, open_requests=10), ErrorCode.OVERLOADED, "open_requests_max"),
        (replace(CALM, open_bytes=901), ErrorCode.OVERLOADED, "open_bytes_max"),
    ],
)
def test_a_refusal_is_a_503_that_passes_and_names_its_limit(load: Load, code: ErrorCode, named: str) -> None:
    error = refusal(load, body_bytes=100, settings=SETTINGS)
    assert error is not None
    assert (error.code, error.traits.status) == (code, 503)
    assert named in error.message
    assert error.retry_after_s is not None


def test_shutting_down_is_what_a_client_hears_first() -> None:
    error = refusal(replace(CALM, draining=True, bus_up=False, loop_lag_s=9), body_bytes=1, settings=SETTINGS)
    assert error is not None
    assert error.code is ErrorCode.SHUTTING_DOWN


@pytest.mark.parametrize("known", [True, False])
def test_a_model_with_a_replica_enters(known: bool) -> None:
    assert model_refusal("m", served=True, known=known) is None


def test_a_known_model_without_a_replica_is_a_503_that_passes() -> None:
    error = model_refusal("m", served=False, known=True)
    assert error is not None
    assert (error.code, error.traits.status, error.param) == (ErrorCode.NO_REPLICA, 503, "model")
    assert error.retry_after_s


def test_an_unknown_model_is_a_404_that_shows_its_name_soundly() -> None:
    error = model_refusal("x\r\ny" + "z" * 500, served=False, known=False)
    assert error is not None
    assert (error.code, error.traits.status, error.param) == (ErrorCode.MODEL_NOT_FOUND, 404, "model")
    assert "'x??y" in error.message
    assert len(error.message) < 120


def test_a_short_burst_is_no_overload_but_lag_that_stays_is() -> None:
    lag = 0.0
    for _ in range(3):
        lag = smoothed_lag(lag, 0.6, elapsed_s=0.7)
    assert lag < 0.5
    for _ in range(5):
        lag = smoothed_lag(lag, 1.0, elapsed_s=1.1)
    assert lag > 0.5
    for _ in range(150):
        lag = smoothed_lag(lag, 0.0, elapsed_s=0.1)
    assert lag < 0.05


def shared(*, share: float, jobs_max: int = 10, band_jobs_max: int = 100) -> GatewaySettings:
    return GatewaySettings(
        caller_share_max=share,
        queued_per_caller_max=jobs_max,
        queue=QueueBounds(stream_bytes_max=10_000),
        bands={STANDARD: BandPolicy(queued_jobs_max=band_jobs_max)},
    )


@pytest.mark.parametrize(
    "settings, held, jobs, size_bytes, named",
    [
        (shared(share=0.5), Held(9, 900), 1, 100, None),
        (shared(share=0.5), Held(10, 900), 1, 100, "queued_per_caller_max"),
        (shared(share=0.5), Held(8, 900), 3, 100, "queued_per_caller_max"),
        (shared(share=0.5, band_jobs_max=8), Held(3, 900), 1, 100, None),
        (shared(share=0.5, band_jobs_max=8), Held(4, 900), 1, 100, "caller_share_max"),
        (shared(share=0.5, band_jobs_max=1), NOTHING, 1, 100, None),
        (shared(share=0.5, band_jobs_max=1), Held(1, 100), 1, 100, "caller_share_max"),
        (shared(share=0.5), Held(1, 4_000), 1, 1_000, None),
        (shared(share=0.5), Held(1, 4_000), 1, 1_001, "caller_share_max"),
        (shared(share=0.5), NOTHING, 1, 9_000, None),
        (shared(share=0.5, band_jobs_max=8), NOTHING, 8, 9_000, None),
        (shared(share=0.5, band_jobs_max=8), Held(1, 1), 4, 1, "caller_share_max"),
        (shared(share=1.0, band_jobs_max=4), Held(4, 9_999), 1, 5_000, None),
        (shared(share=1.0, band_jobs_max=4), Held(10, 0), 1, 1, "queued_per_caller_max"),
    ],
)
def test_a_caller_alone_has_its_share_of_a_band_and_no_more(
    settings: GatewaySettings, held: Held, jobs: int, size_bytes: int, named: str | None
) -> None:
    """Whoever may have all of it is refused by the band's own bounds. The largest request fits where nothing waits."""
    error = caller_refusal(held, band=STANDARD, jobs=jobs, size_bytes=size_bytes, settings=settings)
    if named is None:
        assert error is None
    else:
        assert error is not None
        assert (error.code, error.traits.status, f"({named})" in error.message) == (
            ErrorCode.CALLER_QUEUE_FULL,
            429,
            True,
        )


@pytest.mark.parametrize(
    "settings, most, named",
    [
        (shared(share=0.5, jobs_max=10, band_jobs_max=8), 8, "bands.standard.queued_jobs_max"),
        (shared(share=0.5, jobs_max=7, band_jobs_max=8), 7, "queued_per_caller_max"),
        (replace(shared(share=0.5), open_requests_max=6), 6, "open_requests_max"),
        (GatewaySettings(queue=QueueBounds(queued_jobs_max=5)), 5, "queue.queued_jobs_max"),
    ],
)
def test_prompts_that_can_never_wait_together_are_a_400_and_fewer_fit_where_nothing_waits(
    settings: GatewaySettings, most: int, named: str
) -> None:
    assert prompts_refusal(most, band=STANDARD, settings=settings) is None
    assert caller_refusal(NOTHING, band=STANDARD, jobs=most, size_bytes=1, settings=settings) is None
    error = prompts_refusal(most + 1, band=STANDARD, settings=settings)
    assert error is not None
    assert (error.code, error.traits.status, error.param) == (ErrorCode.INVALID_VALUE, 400, "prompt")
    assert f"at most {most} prompts" in error.message
    assert f"({named})" in error.message


def test_a_caller_alone_has_as_many_jobs_of_a_usual_mesh_as_its_own_bound_says() -> None:
    settings = GatewaySettings()
    for jobs, refused in ((2_047, False), (2_048, True)):
        error = caller_refusal(Held(jobs, 0), band=STANDARD, jobs=1, size_bytes=1, settings=settings)
        assert (error is not None and "queued_per_caller_max" in error.message) is refused
