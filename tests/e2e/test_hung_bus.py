"""A bus that hangs: requests are refused at once, and who is asked to end meanwhile does so in time and says why."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import pytest

from bus.identity import ensure_user
from bus.permissions import Role
from gateway.settings import GatewaySettings
from tests.e2e.streams import chat, client_of, counted
from tests.support.apart import free_port
from tests.support.mesh import DEFECTS, SIM_READY_S, Ended, Program, eventually, frozen, program
from tests.support.nats import Mesh, running_mesh
from tools.supervisor.mesh import PARTS_DRAIN_S
from worker.settings import WorkerSettings

pytestmark = pytest.mark.alone

LONG: Final = 4_000
DRAIN_S: Final = 1.0
ENDS_S: Final = PARTS_DRAIN_S - max(GatewaySettings().drain_limit_s, WorkerSettings().drain_limit_s) + DRAIN_S
"""What `infermesh up` allows, with a shorter time for what runs."""
KNOWN_S: Final = GatewaySettings().bus_silence_s + 2.0
REFUSED_S: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A gateway and a worker, each a program of its own."""

    gateway: Program
    worker: Program
    url: str
    admin_url: str
    http: httpx.Client

    def serve(self) -> bool:
        """Whether the gateway has heard of the worker."""
        return bool(self.http.get(f"{self.url}/models").json()["data"])

    def readiness(self) -> tuple[int, str]:
        """What the gateway says of itself."""
        answer = self.http.get(f"{self.admin_url}/readyz")
        return answer.status_code, answer.text


@contextmanager
def parts_of(mesh: Mesh, tmp_path: Path) -> Iterator[Parts]:
    """Started on the bus of `mesh`; what is running has `DRAIN_S` when they are asked to end."""
    admin_port = free_port()
    with ExitStack() as stack:

        def start(role: Role, *options: str) -> Program:
            name = f"{role}-1"
            creds = str(ensure_user(mesh.identity, role=role, name=name))
            common = ("--bus", mesh.server.url, "--creds", creds, "--set", f"drain_limit_s={DRAIN_S}")
            return stack.enter_context(program(tmp_path / name, role, *common, *options))

        gateway = start(Role.GATEWAY, "--port", "0", "--admin-port", str(admin_port))
        worker = start(Role.WORKER, "--engine", "sim")
        url = gateway.line("ready ", within_s=SIM_READY_S).removeprefix("ready ")
        worker.line("ready ", within_s=SIM_READY_S)
        http = stack.enter_context(httpx.Client())
        yield Parts(gateway=gateway, worker=worker, url=url, admin_url=f"http://127.0.0.1:{admin_port}", http=http)


async def end_of(part: Program) -> tuple[Ended, float]:
    """Ask it to end; how it did, and after how many seconds."""
    asked_at = time.monotonic()
    ended = await asyncio.to_thread(part.stop)
    return ended, time.monotonic() - asked_at


@pytest.mark.timeout(120)
async def test_who_is_asked_to_end_while_the_bus_hangs_ends_in_time_and_says_why(tmp_path: Path) -> None:
    async with running_mesh(tmp_path / "state") as mesh:
        with parts_of(mesh, tmp_path) as parts:
            await eventually(parts.serve, "the model is listed", within_s=10.0)
            async with client_of(parts.url) as client:
                running = client.open(chat(max_tokens=LONG))
                await running.stream.reached(20)
                with frozen(mesh.server.pid):
                    away = (503, "the message bus is away\n")
                    await eventually(lambda: parts.readiness() == away, "it knows", within_s=KNOWN_S)
                    asked_at = time.monotonic()
                    refused = await client.open(chat(max_tokens=1)).end()
                    refused_s = time.monotonic() - asked_at
                    gateway, worker = await asyncio.gather(end_of(parts.gateway), end_of(parts.worker))
                stream = await running.end()
    print(f"bus hangs: gateway ended after {gateway[1]:.1f} s, worker after {worker[1]:.1f} s")
    assert (refused.status, refused.error and refused.error["code"]) == (503, "bus_unavailable")
    assert refused_s < REFUSED_S
    assert stream.error is not None
    assert (stream.error["code"], stream.finish_reasons, stream.done) == ("shutting_down", [], False)
    assert counted(LONG).startswith(stream.text)
    for ended, took_s in (gateway, worker):
        assert (ended.code, took_s < ENDS_S) == (0, True)
        assert not any(defect in ended.stderr for defect in DEFECTS), ended.stderr
        assert "the bus did not take our last words" in ended.stderr
