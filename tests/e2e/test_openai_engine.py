"""A mesh whose engine is somebody else's server: llama.cpp's own, started by the worker's `--command`."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from schemas.status import ServerLoad
from tests.e2e.beats import beats_of
from tests.e2e.official import expect_paris_streamed_and_whole
from tests.e2e.streams import chat, client_of
from tests.e2e.test_parts import free_port
from tests.e2e.traces import expect_no_trace
from tests.support import llama_server
from tests.support.mesh import LLAMA_READY_S, Mesh, eventually, mesh_up, run_to_end
from worker.models import default_model_file

pytestmark = [pytest.mark.alone, pytest.mark.timeout(240)]

MODEL = "org/served"
MARKER = "Quillfeather"
STORY = f"Write a very long story about a lighthouse keeper named {MARKER}."
FREED_S = 1.0
BACK_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Served:
    """A mesh and the server behind it."""

    mesh: Mesh
    url: str

    def pid(self) -> int:
        """The server's process, not the one that guards it."""
        (pid,) = [pid for pid in self.mesh.up.processes() if self._is_server(pid)]
        return pid

    def running(self) -> float:
        """Requests that the server works on, as it says."""
        page = httpx.get(f"{self.url}/metrics").text
        (family,) = [
            each for each in text_string_to_metric_families(page) if each.name == "llamacpp:requests_processing"
        ]
        return family.samples[0].value

    def _is_server(self, pid: int) -> bool:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        return words[1:2] == [llama_server.__file__.encode()]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, str(llama_server.__file__), str(default_model_file()), str(port)]
    options = (
        *("--engine", "openai", "--url", url, "--command", shlex.join(command), "--model-id", MODEL, "--slots", "2"),
        *("--log-level", "debug"),
    )
    with mesh_up(tmp_path_factory.mktemp("served"), *options, ready_within_s=LLAMA_READY_S) as mesh:
        yield Served(mesh=mesh, url=url)
        expect_no_trace(mesh, MARKER)


def test_the_official_client_gets_the_server_s_answers_streamed_and_whole(served: Served) -> None:
    with openai.OpenAI(base_url=served.mesh.url, api_key="any", max_retries=0, timeout=60) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        expect_paris_streamed_and_whole(client, MODEL)


def test_what_the_server_refuses_is_told_to_the_client(served: Served) -> None:
    with (
        openai.OpenAI(base_url=served.mesh.url, api_key="any", max_retries=0, timeout=60) as client,
        pytest.raises(openai.BadRequestError) as caught,
    ):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": f"{MARKER} " * 2_000}])
    assert caught.value.code == "context_length_exceeded"


async def test_a_client_that_leaves_frees_the_server_s_slot(served: Served) -> None:
    async with client_of(served.mesh.url) as client, beats_of(served.mesh) as beats:
        reading = client.open(chat(STORY, model=MODEL, max_tokens=900))
        await reading.stream.reached(5)
        assert served.running() == 1
        load = await beats.until(lambda: beats.load("w1"), "the load, as the worker tells it")
        assert load == ServerLoad(running=1, waiting=0)
        await reading.leave()
        await eventually(lambda: served.running() == 0, "the server's slot is free", within_s=FREED_S)


async def test_a_server_killed_in_mid_stream_ends_it_with_one_error_and_comes_back(served: Served) -> None:
    async with client_of(served.mesh.url) as client, beats_of(served.mesh) as beats:
        told = client.open(chat(STORY, model=MODEL, max_tokens=900, temperature=0))
        await told.stream.reached(10)
        os.kill(served.pid(), signal.SIGKILL)
        cut = await told.end()
        assert cut.error is not None
        assert (cut.error["code"], cut.done, cut.finish_reasons) == ("worker_lost", False, [])
        again = chat(STORY, model=MODEL, max_tokens=60, temperature=0)
        whole = await client.open(again).end(within_s=BACK_S)
        if whole.error is not None:
            # The gateway had heard already that the only replica is away.
            assert whole.error["code"] == "no_replica"
            await beats.until(lambda: beats.ready("w1"), "the server is back", within_s=BACK_S)
            whole = await client.open(again).end(within_s=BACK_S)
        assert (whole.error, whole.finish_reasons, whole.done) == (None, ["length"], True)
        assert whole.text.startswith(cut.text[:20]), "nothing was repeated or left out before the cut"


@pytest.mark.parametrize(
    "options, complaint",
    [
        ([], "--model-id"),
        (["--model-id", "m"], "--url"),
        (["--model-id", "m", "--url", "localhost:8000"], "http://HOST:PORT"),
        (["--model-id", "m", "--url", "http://u:p@h"], "--api-key-file"),
        (["--model-id", "m", "--url", "http://h", "--metrics-name", "x=y"], "--metrics-name"),
        (["--model-id", "m", "--url", "http://h", "--command", "'"], "--command"),
        (["--model-id", "m", "--url", "http://h", "--command", "x", "--workers", "2"], "--workers 1"),
        (["--model-id", "m", "--url", "http://127.0.0.1:1", "--ready-within-s", "1"], "not ready"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_told_in_one_line(options: list[str], complaint: str, tmp_path: Path) -> None:
    ports = ("--port", "0", "--admin-port", "0", "--bus-port", "0", "--state-dir", str(tmp_path / "state"))
    ended = run_to_end(tmp_path, "up", *ports, "--engine", "openai", *options)
    assert ended.code == 1
    assert complaint in ended.complaint
