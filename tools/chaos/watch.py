"""Looks at every process of the mesh again and again while a load runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from tools.bench.client import clock
from tools.chaos.flatness import BOUNDS, Trend, trend
from tools.chaos.gateway_page import GatewayPage
from tools.chaos.observer import Observer
from tools.chaos.resources import Holding, read_holding
from tools.mesh_file import MeshProcess, read_mesh_file


class ProcessWatch:
    """`run` it beside the load; afterwards `trends` tells what the processes of the mesh of `state_dir` held."""

    def __init__(self, state_dir: Path, *, observer: Observer, page: GatewayPage, every_s: float) -> None:
        self._state_dir = state_dir
        self._observer = observer
        self._page = page
        self._every_s = every_s
        self._samples: dict[MeshProcess, list[tuple[float, Holding]]] = {}

    async def run(self) -> None:
        """Take samples until cancelled."""
        while True:
            await self.sample()
            await asyncio.sleep(self._every_s)

    async def sample(self) -> None:
        """Look at every process that is there now."""
        tasks = {worker.pid: worker.tasks for worker in self._observer.ready}
        of_gateway = await self._page.total("infermesh_tasks")
        for process in read_mesh_file(self._state_dir).processes:
            told = tasks.get(process.pid)
            if process.role == "gateway" and of_gateway is not None:
                told = int(of_gateway)
            holding = read_holding(process.pid, tasks=told)
            if holding is not None:
                self._samples.setdefault(process, []).append((clock(), holding))

    def trends(self) -> list[Trend]:
        """Every figure of every process that was looked at often enough."""
        return list(self._trends())

    def _trends(self) -> Iterator[Trend]:
        for process, samples in self._samples.items():
            for figure in BOUNDS:
                points = [
                    (at, float(value)) for at, holding in samples if (value := asdict(holding)[figure]) is not None
                ]
                found = trend(f"{process.role} {process.name}", figure, points)
                if found is not None:
                    yield found
