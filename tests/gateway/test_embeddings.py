"""Embeddings: bodies to requests, vectors to bytes, and the whole route."""

import array
import asyncio
import base64
import json
from typing import Any

import httpx
import pytest

from gateway.dialects.embeddings import EmbeddingRequest, embedding_list, parse_embedding
from gateway.settings import GatewaySettings, Limits
from schemas.errors import ErrorCode, MeshError
from schemas.frames import Embedding, FinishReason, Usage
from schemas.job import EmbeddingPrompt
from tests.support.gateway import Bench

PATH = "/v1/embeddings"
USAGE = Usage(prompt_tokens=5, completion_tokens=0)
HALVES = array.array("f", [0.5, -0.5, 0.1]).tobytes()
THIRDS = array.array("f", [1 / 3] * 100).tobytes()
"""Numbers that JSON shows in 19 bytes each, a comma included."""
BYTES_MAX = 1_000_000


def ask(**parameters: Any) -> EmbeddingRequest:
    return parse_embedding(json.dumps({"model": "m", "input": "text", **parameters}).encode(), limits=Limits())


def answer(request: EmbeddingRequest, *vectors: bytes) -> Any:
    pieces = embedding_list(dict(enumerate(vectors)), request, model="m", usage=USAGE, bytes_max=BYTES_MAX)
    return json.loads(b"".join(pieces))


@pytest.mark.parametrize(
    "sent, read",
    [
        ("text", ("text",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        (["x"] * 2048, ("x",) * 2048),
        (list(range(5_000)), (tuple(range(5_000)),)),
    ],
)
def test_inputs_are_texts_or_token_ids(sent: object, read: tuple[object, ...]) -> None:
    request = ask(input=sent)
    assert request.prompt == EmbeddingPrompt(inputs=read)  # type: ignore[arg-type]
    assert request.inputs == len(read)


@pytest.mark.parametrize(
    "sent, param",
    [
        (None, "input"),
        ("", "input"),
        ([], "input"),
        ([""], "input[0]"),
        (["a", ""], "input[1]"),
        ([[]], "input[0]"),
        ([[1], []], "input[1]"),
        (["x"] * 2049, "input"),
        (["a", 1], "input"),
        (["a", [1]], "input"),
        ([1, [1]], "input"),
        ([-1], "input[0]"),
        ([2**31], "input[0]"),
        ([1.5], "input[0]"),
        ([True], "input[0]"),
        ([None], "input[0]"),
        (5, "input"),
        ({}, "input"),
    ],
)
def test_other_inputs_are_refused(sent: object, param: str) -> None:
    with pytest.raises(MeshError) as caught:
        ask(input=sent)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_VALUE, param)


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"model": None}, "model"),
    ],
)
def test_other_fields_are_checked(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(MeshError) as caught:
        ask(**fields)
    assert caught.value.param == param


def test_both_encodings_say_the_same() -> None:
    request = ask(input=["a", "b"])
    floats = answer(request, HALVES, HALVES)
    encoded = answer(ask(input=["a", "b"], encoding_format="base64"), HALVES, HALVES)
    assert [(item["object"], item["index"]) for item in floats["data"]] == [("embedding", 0), ("embedding", 1)]
    for item, other in zip(floats["data"], encoded["data"], strict=True):
        assert array.array("f", item["embedding"]).tobytes() == base64.b64decode(other["embedding"]) == HALVES
    assert (floats["object"], floats["model"]) == ("list", "m")
    assert floats["usage"] == encoded["usage"] == {"prompt_tokens": 5, "total_tokens": 5}


def test_dimensions_are_the_models_own() -> None:
    assert len(answer(ask(dimensions=3), HALVES)["data"][0]["embedding"]) == 3
    with pytest.raises(MeshError) as caught:
        answer(ask(dimensions=2), HALVES)
    assert (caught.value.code, caught.value.param) == (ErrorCode.UNSUPPORTED_PARAMETER, "dimensions")


@pytest.mark.parametrize("encoding", ["float", "base64"])
@pytest.mark.parametrize(
    "vector",
    [
        b"",
        b"\x00" * 5,
        array.array("f", [0.5, float("nan")]).tobytes(),
        array.array("f", [float("inf"), float("-inf")]).tobytes(),
    ],
)
def test_vectors_that_are_none_are_a_500(vector: bytes, encoding: str) -> None:
    with pytest.raises(MeshError) as caught:
        answer(ask(encoding_format=encoding), vector)
    assert caught.value.traits.status == 500


# --- the route --------------------------------------------------------------------------------------------------------


async def post(bench: Bench, vectors: dict[int, bytes], **fields: Any) -> httpx.Response:
    """The answer to a request for two vectors, for which the engine brings `vectors`."""
    async with bench.serving() as server, httpx.AsyncClient(base_url=server.url) as client:
        body = {"model": "sim", "input": ["a", "b"], **fields}

        async def serve() -> None:
            run = await bench.take()
            run.started()
            for index, vector in vectors.items():
                run.deliver(run.make(Embedding, index=index, vector=vector))
            run.done(FinishReason.STOP)

        (response, _) = await gather_both(client.post(PATH, json=body), serve())
    assert len(bench.exchanges) == 0
    return response


async def gather_both(first: Any, second: Any) -> tuple[httpx.Response, None]:
    async with asyncio.TaskGroup() as group:
        one, other = group.create_task(first), group.create_task(second)
    return one.result(), other.result()


async def test_vectors_are_answered_in_the_order_of_their_inputs() -> None:
    other = array.array("f", [1.0, 0.0, 0.0]).tobytes()
    response = await post(Bench(), {1: other, 0: HALVES}, encoding_format="base64")
    assert response.status_code == 200
    assert response.headers["x-request-id"]
    assert [base64.b64decode(item["embedding"]) for item in response.json()["data"]] == [HALVES, other]


@pytest.mark.parametrize("vectors", [{}, {0: HALVES}, {1: HALVES}, {0: HALVES, 1: HALVES, 2: HALVES}])
async def test_a_vector_that_is_missing_or_too_many_is_a_500(vectors: dict[int, bytes]) -> None:
    response = await post(Bench(), vectors)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_error")


async def test_vectors_count_for_the_size_of_an_answer() -> None:
    bench = Bench(settings=GatewaySettings(answer_bytes_max=2 * len(HALVES) - 1))
    response = await post(bench, {0: HALVES, 1: HALVES})
    assert response.status_code == 400
    assert "answer_bytes_max" in response.json()["error"]["message"]
    assert bench.cancels, "at the vector that was too much"


@pytest.mark.parametrize(
    "encoding, bytes_max, status",
    [("float", 2 * 19 * 100, 400), ("float", 2 * 22 * 100, 200), ("base64", 999, 400), ("base64", 1_300, 200)],
)
async def test_an_answer_counts_as_it_is_written(encoding: str, bytes_max: int, status: int) -> None:
    bench = Bench(settings=GatewaySettings(answer_bytes_max=bytes_max))
    response = await post(bench, {0: THIRDS, 1: THIRDS}, encoding_format=encoding)
    assert response.status_code == status
    if status == 400:
        error = response.json()["error"]
        assert (error["param"], "answer_bytes_max" in error["message"]) == ("input", True)
        assert ("base64" in error["message"]) == (encoding == "float")


async def test_a_lost_worker_has_its_vectors_computed_elsewhere() -> None:
    bench = Bench()
    async with bench.serving() as server, httpx.AsyncClient(base_url=server.url) as client:

        async def serve() -> None:
            for lost in (True, False):
                run = await bench.take()
                run.started()
                run.deliver(run.make(Embedding, index=0, vector=HALVES))
                if lost:
                    bench.router.on_worker_gone("w1", instance="i1")
            run.deliver(run.make(Embedding, index=1, vector=HALVES))
            run.done(FinishReason.STOP)

        body = {"model": "sim", "input": ["a", "b"]}
        response, _ = await gather_both(client.post(PATH, json=body), serve())
    assert (response.status_code, len(response.json()["data"])) == (200, 2)
    assert bench.publications[1].job.resume is None
