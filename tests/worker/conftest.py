from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.nats import Mesh, running_mesh


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    """A nats-server of its own for each test: it starts in some 50 ms."""
    async with running_mesh(tmp_path / "state") as running:
        yield running
