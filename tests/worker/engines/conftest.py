from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.openai_server import FakeServer, fake_server


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A server with the OpenAI API that says what a test tells it to."""
    with fake_server() as server:
        yield server
