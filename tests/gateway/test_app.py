"""Routes and the shapes of errors, on the API's port and on the admin port."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from gateway.app import create_admin_app
from gateway.metrics import GatewayMetrics
from schemas.status import ReplicaState
from tests.support.gateway import Bench, raw_client, running, settle, until, worker_status


@asynccontextmanager
async def client_of(bench: Bench) -> AsyncIterator[httpx.AsyncClient]:
    async with bench.serving() as server, httpx.AsyncClient(base_url=server.url) as client:
        yield client


def error_of(response: httpx.Response) -> Any:
    """The error in an answer, which must have OpenAI's shape."""
    assert response.headers["content-type"] == "application/json"
    document = response.json()
    assert list(document) == ["error"]
    assert list(document["error"]) == ["message", "type", "param", "code"]
    return document["error"]


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/", "/v1/completionz", "/metrics", "/%2e%2e/x", "/v1/chat"])
async def test_unknown_paths_are_a_404_in_json(path: str) -> None:
    async with client_of(Bench()) as client:
        response = await client.get(path)
    assert (response.status_code, error_of(response)["code"]) == (404, "not_found")


async def test_a_path_with_a_slash_too_many_is_unknown_too() -> None:
    async with client_of(Bench()) as client:
        response = await client.post("/v1/chat/completions/", json={})
    assert (response.status_code, error_of(response)["code"]) == (404, "not_found")
    assert "x-request-id" in response.headers


@pytest.mark.parametrize(
    "method, path, allowed",
    [
        ("GET", "/v1/chat/completions", {"POST"}),
        ("DELETE", "/v1/chat/completions", {"POST"}),
        ("POST", "/v1/models", {"GET", "HEAD"}),
        ("DELETE", "/v1/models/sim", {"GET", "HEAD"}),
        ("POST", "/health", {"GET", "HEAD"}),
    ],
)
async def test_other_methods_are_a_405_in_json_that_says_which_are_allowed(
    method: str, path: str, allowed: set[str]
) -> None:
    async with client_of(Bench()) as client:
        response = await client.request(method, path)
    assert (response.status_code, error_of(response)["code"]) == (405, "method_not_allowed")
    assert set(response.headers["allow"].split(", ")) == allowed


async def test_every_answer_has_an_id_of_its_own() -> None:
    requests = [("GET", path) for path in ("/health", "/v1/models", "/v1/models/sim", "/v1/models/nope", "/nowhere")]
    requests += [("DELETE", "/v1/models"), ("POST", "/v1/embeddings"), ("POST", "/v1/completions")]
    async with client_of(Bench()) as client:
        ids = [(await client.request(method, path)).headers["x-request-id"] for method, path in requests]
    assert all(re.fullmatch("[0-9a-f]{24}", each) for each in ids)
    assert len(set(ids)) == len(requests)


async def test_health_answers() -> None:
    async with client_of(Bench()) as client:
        response = await client.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


async def test_models_with_a_ready_replica_are_listed() -> None:
    bench = Bench()
    bench.fleet.on_beat(worker_status("w2", models=("org/b", "a:7b")), 0.0)
    bench.fleet.on_beat(worker_status("w3", models=("loading",), state=ReplicaState.LOADING), 0.0)
    async with client_of(bench) as client:
        document = (await client.get("/v1/models")).json()
    assert document["object"] == "list"
    assert [model["id"] for model in document["data"]] == ["a:7b", "org/b", "sim"]
    assert {model["object"] for model in document["data"]} == {"model"}


@pytest.mark.parametrize(
    "path, model",
    [
        ("/v1/models/sim", "sim"),
        ("/v1/models/org/team/b", "org/team/b"),
        ("/v1/models/org%2Fteam%2Fb", "org/team/b"),
        ("/v1/models/a:7b", "a:7b"),
        ("/v1/models/gr%C3%BC%C3%9Fe%20*", "grüße *"),
    ],
)
async def test_a_model_is_shown_whatever_its_id_holds(path: str, model: str) -> None:
    bench = Bench()
    bench.fleet.on_beat(worker_status("w2", models=("org/team/b", "a:7b", "grüße *")), 0.0)
    async with client_of(bench) as client:
        response = await client.get(path)
    assert response.status_code == 200
    assert response.json()["id"] == model


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/late"])
async def test_models_are_told_once_every_worker_had_the_time_to_beat(path: str) -> None:
    bench = Bench(learns_for_s=1.2)
    async with bench.serving() as server, httpx.AsyncClient(base_url=server.url) as client:
        asking = asyncio.create_task(client.get(path), name="asking")
        await until(lambda: bool(server.server_state.tasks), what="the request")
        await settle()
        assert server.server_state.tasks
        bench.fleet.on_beat(worker_status("w2", models=("late",)), bench.clock())
        bench.sweep(1.2)
        response = await asking
    assert response.status_code == 200
    assert "late" in response.text


@pytest.mark.parametrize("path", ["/v1/models/nope", "/v1/models/sim/", "/v1/models/", "/v1/models/..%2f..%2fetc"])
async def test_a_model_nobody_announced_is_a_404(path: str) -> None:
    async with client_of(Bench()) as client:
        response = await client.get(path)
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")


async def test_a_model_name_cannot_break_the_answer() -> None:
    async with client_of(Bench()) as client:
        response = await client.get("/v1/models/" + "%22%0d%0a%e2%80%a8%00" + "x" * 3_000)
    assert response.status_code == 404
    assert len(error_of(response)["message"]) < 200


async def test_a_head_request_has_no_body() -> None:
    async with Bench().serving() as server, raw_client(server) as client:
        client.send(b"HEAD /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer = await client.read_to_end()
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/sim"])
async def test_a_defect_is_a_500_in_json_without_its_text(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> object:
        raise RuntimeError("the secret is 42")

    bench = Bench()
    monkeypatch.setattr(type(bench.fleet), "ready_models", property(broken))
    monkeypatch.setattr(type(bench.fleet), "knows", broken)
    async with client_of(bench) as client:
        response = await client.get(path)
    assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")
    assert "secret" not in response.text
    assert "Traceback" not in response.text
    assert response.headers["x-should-retry"] == "false"


async def test_the_admin_port_says_alive_ready_and_how_much() -> None:
    reasons: list[str | None] = [None]
    metrics = GatewayMetrics()
    metrics.requests.labels("sim", "stop", "chat").inc()
    app = create_admin_app(metrics, lambda: reasons[-1])
    async with running(app) as server, httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.get("/livez")).status_code == 200
        assert ((await client.get("/readyz")).status_code, (await client.get("/readyz")).text) == (200, "ok\n")
        reasons.append("the message bus is away")
        response = await client.get("/readyz")
        assert (response.status_code, response.text) == (503, "the message bus is away\n")
        assert (await client.get("/livez")).status_code == 200
        response = await client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        assert 'infermesh_requests_total{model="sim",outcome="stop",route="chat"} 1.0' in response.text
        assert (await client.get("/v1/models")).status_code == 404


async def test_the_api_port_does_not_serve_metrics() -> None:
    async with client_of(Bench()) as client:
        for path in ("/metrics", "/livez", "/readyz"):
            response = await client.get(path)
            assert response.status_code == 404
            assert json.loads(response.content)["error"]["code"] == "not_found"
