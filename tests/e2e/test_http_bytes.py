"""What is on the wire: the bytes `curl -N` shows, health, and the admin port."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.e2e.leaving import Clock, holds
from tests.e2e.streams import chat, counted
from tests.support.mesh import Mesh

CURL_S = 30


def curl(url: str, *arguments: str) -> tuple[str, bytes]:
    """Head and body, as they come."""
    command = ["curl", "-sS", "-N", "-i", "--max-time", str(CURL_S), *arguments, url]
    answer = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=CURL_S + 5)
    assert answer.stderr == b""
    head, _, body = answer.stdout.partition(b"\r\n\r\n")
    return head.decode("ascii"), body


def posted(url: str, body: dict[str, object]) -> tuple[str, bytes]:
    return curl(f"{url}/chat/completions", "-H", "content-type: application/json", "-d", json.dumps(body))


def headers_of(head: str) -> dict[str, str]:
    return {name.lower(): value for name, _, value in (line.partition(": ") for line in head.splitlines()[1:])}


def events_of(body: bytes) -> list[bytes]:
    """The payloads of a clean stream: blocks of one `data:` line or of comments, LF only, valid UTF-8."""
    assert body.endswith(b"\n\n")
    assert b"\r" not in body
    payloads = []
    for block in body[:-2].split(b"\n\n"):
        if block.startswith(b":"):
            assert all(line.startswith(b":") for line in block.split(b"\n"))
            continue
        assert len(block.decode().splitlines()) == 1, "also for clients that split at U+2028"
        assert block.startswith(b"data: ")
        payloads.append(block.removeprefix(b"data: "))
    return payloads


def test_a_stream_is_clean_server_sent_events(sim: Mesh) -> None:
    head, body = posted(sim.url, chat(max_tokens=9, stream_options={"include_usage": True}))
    headers = headers_of(head)
    assert head.startswith("HTTP/1.1 200 ")
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert abs(parsedate_to_datetime(headers["date"]).timestamp() - time.time()) < CURL_S
    assert re.fullmatch(r"[0-9a-f]{24}", headers["x-request-id"])
    *payloads, last = events_of(body)
    assert last == b"[DONE]"
    chunks = [json.loads(payload) for payload in payloads]
    assert all(isinstance(chunk, dict) for chunk in chunks)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert "".join(delta.get("content", "") for delta in deltas) == counted(9)
    assert chunks[-1]["choices"] == []
    assert [chunk["usage"] is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]


def test_a_refused_stream_is_a_plain_error_with_its_status(sim: Mesh) -> None:
    head, body = posted(sim.url, chat(temperature=-1))
    assert head.startswith("HTTP/1.1 400 ")
    assert headers_of(head)["content-type"] == "application/json"
    assert json.loads(body)["error"]["param"] == "temperature"


def test_a_whole_answer_carries_its_length(sim: Mesh) -> None:
    head, body = posted(sim.url, chat(stream=False, max_tokens=3))
    assert headers_of(head)["content-length"] == str(len(body))
    assert json.loads(body)["choices"][0]["message"]["content"] == counted(3)


def test_a_body_in_chunks_is_bounded_too(sim: Mesh, tmp_path: Path) -> None:
    file = tmp_path / "body"
    file.write_bytes(json.dumps(chat("x" * 5_000_000)).encode())
    headers = ("-H", "transfer-encoding: chunked", "-H", "expect:")
    head, body = curl(f"{sim.url}/chat/completions", *headers, "--data-binary", f"@{file}")
    assert head.startswith("HTTP/1.1 413 ")
    assert headers_of(head)["connection"] == "close"
    assert json.loads(body)["error"]["code"] == "body_too_large"


def test_a_wish_for_http2_is_passed_over(sim: Mesh) -> None:
    """Java's HttpClient utters it with each request, and so do proxies that pass `Upgrade` on."""
    upgrade = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQBAAAAAAIAAAAA")
    url = f"{sim.url}/chat/completions"
    options = [option for field in upgrade for option in ("-H", field)]
    head, body = curl(url, *options, "-H", "content-type: application/json", "-d", json.dumps(chat(max_tokens=3)))
    assert head.startswith("HTTP/1.1 200 ")
    assert events_of(body)[-1] == b"[DONE]"


async def test_a_client_that_asked_ahead_and_left_frees_its_slot(sim: Mesh) -> None:
    address = urlsplit(sim.url)
    body = json.dumps(chat(max_tokens=4_000)).encode()
    request = (
        f"POST {address.path}/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    )
    clock = Clock("asked ahead and left")
    for ahead in (request + body, request[:20], b"\r\n"):
        with socket.create_connection((address.hostname, address.port)) as client:
            client.sendall(request + body + ahead)
            await holds(sim, open_requests=1, running=1)
        clock.start()
        await holds(sim, open_requests=0, running=0)
        clock.stop()
    clock.check()


def test_health_needs_no_model(sim: Mesh) -> None:
    head, body = curl(f"{sim.url.removesuffix('/v1')}/health")
    assert head.startswith("HTTP/1.1 200 ")
    assert json.loads(body)["status"] == "ok"


@pytest.mark.parametrize(
    "method, path, status, code",
    [
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/", 404, "not_found"),
        ("GET", "/metrics", 404, "not_found"),
    ],
)
def test_what_is_not_there_says_so_in_json(sim: Mesh, method: str, path: str, status: int, code: str) -> None:
    answer = sim.http.request(method, sim.url.removesuffix("/v1") + path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_the_admin_port_tells_life_readiness_and_figures(sim: Mesh) -> None:
    for path in ("livez", "readyz"):
        assert sim.http.get(f"{sim.file.admin_url}/{path}").status_code == 200
    name = "infermesh_requests_total{model=sim,outcome=length,route=chat}"
    before = sim.metrics().get(name, 0.0)
    posted(sim.url, chat(max_tokens=2))
    after = sim.metrics()
    assert after[name] == before + 1
    assert after["infermesh_workers"] == 1
    assert after["infermesh_bus_up"] == 1
    assert after["infermesh_open_requests"] == 0
    assert httpx.get(f"{sim.file.admin_url}/v1/models").status_code == 404
