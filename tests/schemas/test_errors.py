"""The table of error codes is complete and consistent."""

import pytest

from schemas.errors import TRAITS, ErrorCode, ErrorInfo, MeshError

KIND_OF_STATUS = {429: "rate_limit_error"}


def test_every_code_has_traits() -> None:
    assert set(TRAITS) == set(ErrorCode)


@pytest.mark.parametrize("code", ErrorCode)
def test_traits_agree_with_each_other(code: ErrorCode) -> None:
    status, kind, retryable = TRAITS[code]
    assert 400 <= status <= 599
    assert kind == KIND_OF_STATUS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    assert not retryable or status >= 500


@pytest.mark.parametrize("code", ErrorCode)
def test_an_error_keeps_its_meaning_across_the_bus(code: ErrorCode) -> None:
    error = ErrorInfo(code, "what is wrong", param="stop").to_exception()
    assert isinstance(error, MeshError)
    assert (error.code, error.message, error.param) == (code, "what is wrong", "stop")
    assert error.traits is TRAITS[code]
    assert str(error) == "what is wrong"
