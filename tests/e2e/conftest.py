from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.e2e.official import connected
from tests.support.mesh import LLAMA_READY_S, Mesh, mesh_up


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The real model computes on all cores: who asks it bears no neighbour."""
    for item in items:
        if isinstance(item, pytest.Function) and "llama" in item.fixturenames:
            item.add_marker(pytest.mark.alone)


@pytest.fixture(scope="session")
def sim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """A mesh that nobody harms, logging all it can."""
    with mesh_up(tmp_path_factory.mktemp("sim"), "--engine", "sim", "--log-level", "debug") as mesh:
        yield mesh


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """The real model, in the same way."""
    directory = tmp_path_factory.mktemp("llama")
    with mesh_up(directory, "--log-level", "debug", ready_within_s=LLAMA_READY_S) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def simulated(sim: Mesh) -> Iterator[openai.OpenAI]:
    """The official client of `sim`."""
    with connected(sim) as client:
        yield client


@pytest.fixture(scope="module")
def real(llama: Mesh) -> Iterator[openai.OpenAI]:
    """The official client of `llama`."""
    with connected(llama) as client:
        yield client
