"""May this request in? Each refusal names the limit that it met."""

from dataclasses import replace

import pytest

from gateway.admission import Load, model_refusal, refusal, smoothed_lag
from gateway.settings import GatewaySettings
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
