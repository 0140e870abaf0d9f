"""A mesh whose bands have other names, from `infermesh up --bands` to the streams on its bus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from bus import subjects
from bus.connection import BusSettings, Connection
from bus.credentials import read_credentials
from bus.identity import ensure_user, load_mesh_identity
from bus.permissions import Role
from bus.registry import Presence
from schemas.bands import Band, check_band
from schemas.status import ReplicaState, WorkerStatus
from tests.e2e.streams import chat, counted
from tests.support.mesh import SIM_READY_S, Mesh, eventually, mesh_up, program, run_to_end
from tests.support.nats import Peer, connect

NAMES = ("urgent", "normal", "bulk")
POLICIES = ("--set", "worker.bands.bulk.slot_share=0.5", "--set", "gateway.bands.bulk.queued_jobs_max=7")
BEAT_WITHIN_S = 10.0


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    directory = tmp_path_factory.mktemp("bands")
    with mesh_up(directory, "--engine", "sim", "--slots", "8", "--bands", "urgent,normal,bulk", *POLICIES) as mesh:
        yield mesh


@asynccontextmanager
async def peer(mesh: Mesh, role: Role, name: str) -> AsyncIterator[Peer]:
    """A user of the bus with credentials of this mesh."""
    file = ensure_user(load_mesh_identity(mesh.state_dir), role=role, name=name)
    who = await connect(mesh.file.bus_url, file, inbox_prefix=read_credentials(file).inbox_prefix)
    try:
        yield who
    finally:
        await who.nc.close()


async def beat_of(mesh: Mesh, worker: str) -> WorkerStatus:
    """The next beat of a worker that takes jobs."""
    listener = ensure_user(load_mesh_identity(mesh.state_dir), role=Role.GATEWAY, name="listener")
    connection = await Connection.open(BusSettings(url=mesh.file.bus_url, credentials=listener))
    heard: asyncio.Future[WorkerStatus] = asyncio.get_running_loop().create_future()

    def take(status: WorkerStatus) -> None:
        ready = any(replica.state is ReplicaState.READY for replica in status.replicas)
        if status.name == worker and ready and not heard.done():
            heard.set_result(status)

    try:
        await Presence(connection, on_worker=take, on_disconnect=lambda event: None).start()
        return await asyncio.wait_for(heard, BEAT_WITHIN_S)
    finally:
        await connection.close()


def ask(mesh: Mesh, *, tier: str | None = None, band: str | None = None) -> httpx.Response:
    """A whole answer of three tokens, or an error."""
    body = {**chat(max_tokens=3), "stream": False} | ({} if tier is None else {"service_tier": tier})
    headers = {} if band is None else {"x-mesh-band": band}
    return mesh.http.post(f"{mesh.url}/chat/completions", json=body, headers=headers)


@pytest.mark.parametrize(
    "tier, band, reported",
    [
        ("priority", "urgent", "priority"),
        ("default", "normal", "default"),
        ("auto", "normal", "default"),
        ("flex", "bulk", "flex"),
        (None, "normal", None),
    ],
)
def test_the_service_tier_is_a_place_in_the_order(
    mesh: Mesh, tier: str | None, band: str, reported: str | None
) -> None:
    answer = ask(mesh, tier=tier)
    assert (answer.status_code, answer.headers["x-mesh-band"]) == (200, band)
    assert answer.json()["choices"][0]["message"]["content"] == counted(3)
    assert answer.json().get("service_tier") == reported


@pytest.mark.parametrize("band", NAMES)
def test_the_header_names_a_band(mesh: Mesh, band: str) -> None:
    answer = ask(mesh, band=band, tier="auto")
    assert (answer.status_code, answer.headers["x-mesh-band"]) == (200, band)


@pytest.mark.parametrize("band", ["interactive", "*", "bulk.>", "", "x" * 4_000])
def test_a_band_that_this_mesh_has_not_is_refused_and_those_it_has_are_named(mesh: Mesh, band: str) -> None:
    answer = ask(mesh, band=band)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "x-mesh-band")
    assert "choose one of urgent, normal, bulk" in error["message"]


async def test_each_band_has_its_stream_with_its_bound_and_there_is_no_other(mesh: Mesh) -> None:
    async with peer(mesh, Role.OPERATOR, "operator") as operator:
        streams = (await operator.request("$JS.API.STREAM.NAMES"))["streams"]
        assert {name for name in streams if name.startswith("JOBS-")} == {f"JOBS-{band}" for band in NAMES}
        bounds = []
        for band in NAMES:
            info = await operator.request(f"$JS.API.STREAM.INFO.{subjects.jobs_stream(check_band(band))}")
            bounds.append(info["config"]["max_msgs_per_subject"])
        assert bounds == [4_096, 4_096, 7]


async def test_nobody_has_a_right_to_the_stream_of_another_band(mesh: Mesh) -> None:
    async with peer(mesh, Role.GATEWAY, "g9") as gateway, peer(mesh, Role.WORKER, "w9") as worker:
        assert await gateway.publish_refused("$JS.API.STREAM.CREATE.JOBS-batch")
        assert await worker.publish_refused("$JS.API.CONSUMER.MSG.NEXT.JOBS-batch.any-sim")
        assert not await worker.publish_refused("$JS.API.CONSUMER.MSG.NEXT.JOBS-bulk.any-none")


async def test_a_worker_takes_the_policies_that_it_is_given(mesh: Mesh) -> None:
    (replica,) = (await beat_of(mesh, "w1")).replicas
    assert replica.shares == {"urgent": 8, "normal": 8, "bulk": 4}


async def test_a_worker_from_elsewhere_knows_the_bands_from_its_credentials_alone(mesh: Mesh, tmp_path: Path) -> None:
    file, state = tmp_path / "box.creds", ("--state-dir", str(mesh.state_dir))
    assert run_to_end(tmp_path / "creds", "creds", "worker", "box", "--out", str(file), *state).code == 0
    options = ("--bus", mesh.file.bus_url, "--creds", str(file), "--engine", "sim")
    with program(tmp_path / "box", "worker", *options) as worker:
        worker.line("ready ", within_s=SIM_READY_S)
        assert (await beat_of(mesh, "box")).bands == NAMES


async def test_a_worker_with_fewer_bands_says_so_and_the_gateway_notices(mesh: Mesh, tmp_path: Path) -> None:
    file = ensure_user(load_mesh_identity(mesh.state_dir), role=Role.WORKER, name="few")
    options = ("--bus", mesh.file.bus_url, "--creds", str(file), "--engine", "sim", "--set", "bands=bulk")
    with program(tmp_path / "few", "worker", *options) as worker:
        worker.line("ready ", within_s=SIM_READY_S)
        assert (await beat_of(mesh, "few")).bands == (Band("bulk"),)
        noticed = await eventually(lambda: other_bands(mesh), "the gateway's line", within_s=BEAT_WITHIN_S)
    assert [(line["worker"], line["its"], line["ours"]) for line in noticed] == [("few", ["bulk"], list(NAMES))]


def other_bands(mesh: Mesh) -> list[dict[str, object]]:
    """The log lines on workers with other bands."""
    lines = [line for line in mesh.logs().splitlines(keepends=True) if "a worker has other bands" in line]
    return [msgspec.json.decode(line) for line in lines if line.endswith("\n")]


def test_bands_of_another_mesh_are_one_clear_line(mesh: Mesh, tmp_path: Path) -> None:
    creds = str(load_mesh_identity(mesh.state_dir).credentials_path(Role.WORKER))
    options = ("--bus", mesh.file.bus_url, "--creds", creds, "--engine", "sim", "--set", "bands=urgent,batch")
    ended = run_to_end(tmp_path / "worker", "worker", *options)
    assert ended.code == 2
    assert ended.complaint == (
        "Error: --set bands: there is no band 'batch' in this mesh, which has urgent, normal, bulk"
    )
    again = run_to_end(tmp_path / "up", "up", "--engine", "sim", "--state-dir", str(mesh.state_dir), "--bands", "a,b")
    assert again.code == 1
    assert "has the bands urgent,normal,bulk" in again.complaint


@pytest.mark.parametrize("text, words", [("a,B", "band name 'B' is not valid"), ("a,a", "the band 'a' is named twice")])
def test_names_that_no_mesh_can_have_are_refused_before_keys_are_made(tmp_path: Path, text: str, words: str) -> None:
    ended = run_to_end(tmp_path / "init", "init", "--state-dir", str(tmp_path / "state"), "--bands", text)
    assert ended.code == 2
    assert ended.complaint.startswith(f"Error: Invalid value for '--bands': {words}")
    assert not (tmp_path / "state").exists()
