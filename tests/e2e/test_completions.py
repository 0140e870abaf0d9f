"""Plain completions on a real mesh: several prompts as one answer, and prompts that are told with their likelihoods."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion, CompletionChoice

from tests.e2e.beats import beats_of
from tests.e2e.leaving import holds, waiting_in
from tests.e2e.streams import counted
from tests.support.mesh import LLAMA_READY_S, WHOLE_S, Mesh, eventually, mesh_up
from worker.models import DEFAULT_MODEL_ID

pytestmark = pytest.mark.timeout(240)

LLAMA = DEFAULT_MODEL_ID
END_S = 60.0
STEP_MS = "10"
TOKENS = 300
WORDS = 200
PREFILL_RATE = "100"


class Answer:
    """One streamed answer, growing, read byte by byte. `error` is that of the stream, or of the whole answer."""

    def __init__(self) -> None:
        self.status = 0
        self.request_id = ""
        self.raw = b""
        self.chunks: list[dict[str, Any]] = []
        self.texts: defaultdict[int, str] = defaultdict(str)
        self.ends: list[tuple[int, str]] = []
        self.likelihoods: defaultdict[int, list[float | None]] = defaultdict(list)
        self.usage: dict[str, Any] | None = None
        self.error: dict[str, Any] | None = None
        self.done = False

    async def read(self, http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> None:
        async with http.stream("POST", f"{url}/completions", json={"stream": True, **body}) as response:
            self.status = response.status_code
            self.request_id = response.headers.get("x-request-id", "")
            if self.status != 200:
                self.error = json.loads(await response.aread())["error"]
                return
            rest = b""
            async for data in response.aiter_raw():
                self.raw += data
                *events, rest = (rest + data).split(b"\n\n")
                for event in events:
                    self._take(event)
            assert rest == b"", "the stream ends with a whole event"

    def _take(self, event: bytes) -> None:
        assert not self.done, "nothing follows [DONE]"
        assert b"\n" not in event
        if event.startswith(b": "):
            return
        assert event.startswith(b"data: ")
        payload = event.removeprefix(b"data: ")
        if payload == b"[DONE]":
            self.done = True
            return
        chunk = json.loads(payload)
        if "error" in chunk:
            self.error = chunk["error"]
            return
        self.chunks.append(chunk)
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            self.texts[choice["index"]] += choice["text"]
            self.likelihoods[choice["index"]] += (choice["logprobs"] or {}).get("token_logprobs", [])
            if choice["finish_reason"] is not None:
                self.ends.append((choice["index"], choice["finish_reason"]))


@asynccontextmanager
async def asking(mesh: Mesh, **body: Any) -> AsyncIterator[tuple[Answer, asyncio.Task[None]]]:
    """A streamed request; on leaving its connection is closed."""
    answer = Answer()
    async with httpx.AsyncClient(timeout=END_S) as http:
        task = asyncio.create_task(answer.read(http, mesh.url, body), name="answer")
        try:
            yield answer, task
        finally:
            task.cancel()
            await asyncio.wait({task})


def expect_counted(answer: Answer, *, prompts: int, tokens: int) -> None:
    """The `sim` engine's answer to each of that many prompts: nothing missing, nothing twice, each ended once."""
    assert answer.error is None
    assert dict(answer.texts) == dict.fromkeys(range(prompts), counted(tokens))
    assert sorted(answer.ends) == [(number, "length") for number in range(prompts)]
    assert {chunk["id"] for chunk in answer.chunks} == {f"cmpl-{answer.request_id}"}
    assert answer.done


def refusal_of(client: openai.OpenAI, **fields: Any) -> tuple[str | None, str | None]:
    """Code and parameter of a 400."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**fields)
    return caught.value.code, caught.value.param


# --- several prompts, simulated


@pytest.mark.parametrize("prompts", [["a b", "c", "d e f"], [[1, 2], [3], [4, 5, 6]]])
def test_each_prompt_has_its_own_choice(simulated: openai.OpenAI, prompts: Any) -> None:
    answer = simulated.completions.create(model="sim", prompt=prompts, max_tokens=5)
    assert [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices] == [
        (number, counted(5), "length") for number in range(3)
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (6, 15, 21)


def test_an_echo_is_that_of_its_own_prompt(simulated: openai.OpenAI) -> None:
    answer = simulated.completions.create(model="sim", prompt=["a b", "c"], max_tokens=1, echo=True)
    assert [choice.text for choice in answer.choices] == ["a b tok1", "c tok1"]


def test_the_official_client_reads_the_stream_of_several_prompts(simulated: openai.OpenAI) -> None:
    texts: defaultdict[int, str] = defaultdict(str)
    ends: dict[int, str] = {}
    with simulated.completions.create(
        model="sim", prompt=["a", "b", "c"], max_tokens=40, stream=True, stream_options={"include_usage": True}
    ) as stream:
        *chunks, usage = list(stream)
    for choice in [choice for chunk in chunks for choice in chunk.choices]:
        texts[choice.index] += choice.text
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
    assert texts == dict.fromkeys(range(3), counted(40))
    assert ends == dict.fromkeys(range(3), "length")
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 120


@pytest.mark.parametrize(
    "fields, refused",
    [
        ({"prompt": ["a", 1]}, ("invalid_value", "prompt")),
        ({"prompt": ["a", [1]]}, ("invalid_value", "prompt")),
        ({"prompt": [[1], []]}, ("invalid_value", "prompt[1]")),
        ({"prompt": ["a"] * 65}, ("invalid_value", "prompt")),
        ({"prompt": ["a", "b"], "suffix": "c"}, ("unsupported_parameter", "suffix")),
        ({"prompt": ["a", "word " * 9_000]}, ("context_length_exceeded", "prompt[1]")),
        ({"prompt": ["a", "word " * 9_000], "stream": True}, ("context_length_exceeded", "prompt[1]")),
        ({"prompt": ["a", "b"], "n": 2}, ("unsupported_parameter", "n")),
        ({"prompt": "a", "max_tokens": 0}, ("invalid_value", "max_tokens")),
    ],
)
def test_what_cannot_be_had_is_refused(
    simulated: openai.OpenAI, fields: dict[str, Any], refused: tuple[str, str]
) -> None:
    if fields.get("stream") and refused[0] == "context_length_exceeded":
        with pytest.raises(openai.APIError) as caught, simulated.completions.create(model="sim", **fields) as stream:
            list(stream)
        assert (caught.value.code, caught.value.param) == refused
    else:
        assert refusal_of(simulated, model="sim", **fields) == refused


async def test_the_prompts_of_a_request_run_beside_one_another(sim: Mesh) -> None:
    async with (
        beats_of(sim) as beats,
        asking(sim, model="sim", prompt=list("abcdefgh"), max_tokens=400) as (answer, end),
    ):
        await beats.until(lambda: beats.busy("w1") == 8, "eight slots taken at once")
        await asyncio.wait_for(end, END_S)
        expect_counted(answer, prompts=8, tokens=400)


async def test_a_client_that_leaves_frees_every_slot_and_the_queue(tmp_path: Path) -> None:
    with mesh_up(tmp_path, "--engine", "sim", "--set", "engine.slots=4", "--sim-step-ms", STEP_MS) as mesh:
        body: dict[str, Any] = {"model": "sim", "prompt": list("abcdefghijkl"), "max_tokens": 4_000}
        async with waiting_in(mesh) as waiting:
            async with asking(mesh, **body):
                await holds(mesh, open_requests=12, running=3)
            await holds(mesh, open_requests=0, running=0)
            await waiting.until(0)


async def test_a_queue_too_full_for_all_of_them_takes_none(tmp_path: Path) -> None:
    narrow = ("--set", "engine.slots=1", "--set", "gateway.queue.queued_jobs_max=4", "--sim-step-ms", STEP_MS)
    with mesh_up(tmp_path, "--engine", "sim", *narrow, "--set", "gateway.caller_share_max=1") as mesh:
        async with waiting_in(mesh) as waiting, asking(mesh, model="sim", prompt="a", max_tokens=4_000):
            await holds(mesh, open_requests=1, running=1)
            async with asking(mesh, model="sim", prompt="b", max_tokens=1):
                await waiting.until(1)
                for stream in (True, False):
                    async with asking(mesh, model="sim", prompt=list("abcd"), stream=stream) as (refused, end):
                        await asyncio.wait_for(end, END_S)
                    assert (refused.status, refused.error and refused.error["code"]) == (429, "queue_full")
                    await waiting.until(1)
                    await holds(mesh, open_requests=2, running=1)
            await waiting.until(0)
            async with asking(mesh, model="sim", prompt=list("abcd"), max_tokens=1):
                await waiting.until(4)
            await waiting.until(0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Two workers that serve one model."""
    arguments = ("--engine", "sim", "--sim-step-ms", STEP_MS, "--sim-prefill-tokens-per-s", PREFILL_RATE)
    with mesh_up(tmp_path_factory.mktemp("pair"), *arguments, "--workers", "2") as mesh:
        yield mesh


async def whole_again(mesh: Mesh) -> None:
    """Wait until both workers take jobs."""
    async with beats_of(mesh) as beats:
        await beats.until(lambda: beats.ready("w1") and beats.ready("w2"), "both workers ready", within_s=WHOLE_S)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_worker_killed_in_the_middle_of_several_prompts_is_not_noticed(pair: Mesh, stream: bool) -> None:
    lost, prompts = pair.lost_claims(), list("abcdefghijkl")
    body = {"model": "sim", "prompt": prompts, "max_tokens": TOKENS, "stream_options": {"include_usage": True}}
    async with beats_of(pair) as beats:
        if stream:
            async with asking(pair, **body) as (answer, end):
                await eventually(lambda: min(map(len, answer.texts.values()), default=0) > 50, "text", within_s=END_S)
                pair.kill("worker", await beats.busy_worker())
                await asyncio.wait_for(end, END_S)
            expect_counted(answer, prompts=len(prompts), tokens=TOKENS)
            assert answer.usage is not None
            assert answer.usage["completion_tokens"] == TOKENS * len(prompts)
        else:
            async with httpx.AsyncClient(timeout=END_S) as http:
                del body["stream_options"]
                asked = asyncio.create_task(http.post(f"{pair.url}/completions", json=body), name="asked")
                pair.kill("worker", await beats.busy_worker())
                whole = (await asked).json()
            assert [choice["text"] for choice in whole["choices"]] == [counted(TOKENS)] * len(prompts)
    assert pair.lost_claims() > lost
    await holds(pair, open_requests=0, running=0)
    await whole_again(pair)


# --- prompts that the engine tells, simulated


def test_ids_are_told_as_text(simulated: openai.OpenAI) -> None:
    answer = simulated.completions.create(model="sim", prompt=[[7, 8], [9]], echo=True, max_tokens=2)
    assert [choice.text for choice in answer.choices] == [" tok7 tok8 tok1 tok2", " tok9 tok1 tok2"]
    assert [choice.logprobs for choice in answer.choices] == [None, None]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_worker_killed_while_it_tells_the_prompt_is_not_noticed(pair: Mesh, stream: bool) -> None:
    lost, prompt = pair.lost_claims(), "word " * WORDS
    body = {"model": "sim", "prompt": [prompt, prompt], "echo": True, "logprobs": 1, "max_tokens": 0, "stream": stream}
    async with beats_of(pair) as beats:
        if stream:
            async with asking(pair, **body) as (answer, end):
                await eventually(lambda: len(answer.likelihoods[0]) > 20, "a part of the prompt", within_s=END_S)
                assert len(answer.likelihoods[0]) < WORDS
                pair.kill("worker", await beats.busy_worker())
                await asyncio.wait_for(end, END_S)
            assert dict(answer.texts) == {0: prompt, 1: prompt}
            told = [answer.likelihoods[number] for number in (0, 1)]
        else:
            async with httpx.AsyncClient(timeout=END_S) as http:
                asked = asyncio.create_task(http.post(f"{pair.url}/completions", json=body), name="asked")
                pair.kill("worker", await beats.busy_worker())
                choices = (await asked).json()["choices"]
            assert [choice["text"] for choice in choices] == [prompt, prompt]
            told = [choice["logprobs"]["token_logprobs"] for choice in choices]
    for likelihoods in told:
        assert (len(likelihoods), likelihoods[0]) == (WORDS, None)
        assert likelihoods[1:8] == [-0.5, -0.5, -0.5, -4.0, -0.5, -0.5, -0.5]
    assert pair.lost_claims() > lost
    await whole_again(pair)


# --- the real model, as lm-evaluation-harness asks it

CONTEXT = "The capital of France is"
LIKELIHOOD: dict[str, Any] = {"temperature": 0, "seed": 1234, "max_tokens": 1, "logprobs": 1, "echo": True}
"""What `LocalCompletionsAPI._create_payload` sends for a likelihood (lm_eval/models/openai_completions.py)."""
END_OF_TURN = 2
"""`<|im_end|>` of the default model."""


def harness(choice: CompletionChoice, ctxlen: int) -> tuple[float, bool]:
    """`LocalCompletionsAPI.parse_logprobs`: what follows the context, without the last entry, which was generated."""
    assert choice.logprobs is not None
    logprobs = (choice.logprobs.token_logprobs or [])[ctxlen:-1]
    tops = (choice.logprobs.top_logprobs or [])[ctxlen:-1]
    return sum(logprobs), all(logprob == max(top.values()) for logprob, top in zip(logprobs, tops, strict=True))


def tokens_of(choice: CompletionChoice) -> list[str]:
    assert choice.logprobs is not None
    return choice.logprobs.tokens or []


def expect_complete(answer: Completion) -> None:
    """The lists are as long as usage says, the text is that of its tokens, and only the first has no likelihood."""
    assert answer.usage is not None
    entries = 0
    for choice in answer.choices:
        shown = choice.logprobs
        assert shown is not None
        assert shown.token_logprobs is not None
        assert shown.top_logprobs is not None
        assert shown.text_offset is not None
        tokens = tokens_of(choice)
        entries += len(tokens)
        assert len(shown.token_logprobs) == len(shown.top_logprobs) == len(shown.text_offset) == len(tokens)
        assert "".join(tokens) == choice.text
        assert shown.text_offset == [len("".join(tokens[:index])) for index in range(len(tokens))]
        assert [each[0] for each in (shown.token_logprobs, shown.top_logprobs)] == [None, None]
        for token, logprob, top in zip(tokens[1:], shown.token_logprobs[1:], shown.top_logprobs[1:], strict=True):
            assert logprob <= 0
            assert top[token] == logprob
    assert entries == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_greedy_continuation_is_found_to_be_one_with_the_likelihoods_it_was_drawn_with(real: openai.OpenAI) -> None:
    drawn = real.completions.create(model=LLAMA, prompt=CONTEXT, temperature=0, max_tokens=6, logprobs=1)
    said = drawn.choices[0]
    assert drawn.usage is not None
    assert said.logprobs is not None
    answer = real.completions.create(model=LLAMA, prompt=CONTEXT + said.text, **LIKELIHOOD)
    expect_complete(answer)
    (choice,) = answer.choices
    ctxlen = drawn.usage.prompt_tokens
    assert tokens_of(choice)[ctxlen:-1] == tokens_of(said)
    likelihood, greedy = harness(choice, ctxlen)
    assert greedy
    assert likelihood == pytest.approx(sum(said.logprobs.token_logprobs or []), abs=0.3)
    unlikely = real.completions.create(model=LLAMA, prompt=CONTEXT + " purple", **LIKELIHOOD)
    other, greedy = harness(unlikely.choices[0], ctxlen)
    assert not greedy
    assert other < -5


def test_prompts_of_ids_together_are_as_each_alone(real: openai.OpenAI) -> None:
    prompts = [[504, 3575, 282, 4649, 314], [504, 3575], [19, 20, 21, 22, 23, 24]]
    together = real.completions.create(model=LLAMA, prompt=prompts, **LIKELIHOOD)
    expect_complete(together)
    assert together.usage is not None
    assert together.usage.prompt_tokens == sum(map(len, prompts))
    for prompt, choice in zip(prompts, together.choices, strict=True):
        assert len(tokens_of(choice)) == len(prompt) + 1
        alone = real.completions.create(model=LLAMA, prompt=prompt, **LIKELIHOOD).choices[0]
        assert tokens_of(alone) == tokens_of(choice)
        assert harness(choice, 1)[0] == pytest.approx(harness(alone, 1)[0], abs=0.3)


def test_what_was_generated_has_one_entry_also_where_the_model_ends(real: openai.OpenAI) -> None:
    """Else the harness would take the continuation's last token for it."""
    ids = [504, 3575, 282, 4649, 314]
    usual = real.completions.create(model=LLAMA, prompt=ids, **LIKELIHOOD).choices[0]
    ended = real.completions.create(model=LLAMA, prompt=ids, logit_bias={str(END_OF_TURN): 100}, **LIKELIHOOD)
    (choice,) = ended.choices
    assert choice.finish_reason == "stop"
    assert len(tokens_of(choice)) == len(ids) + 1
    assert harness(choice, 2)[0] == pytest.approx(harness(usual, 2)[0], abs=0.3)


def test_a_prompt_alone_is_told_without_a_completion(real: openai.OpenAI) -> None:
    answer = real.completions.create(model=LLAMA, prompt=[CONTEXT, "Two"], max_tokens=0, echo=True, logprobs=2)
    expect_complete(answer)
    assert [choice.text for choice in answer.choices] == [CONTEXT, "Two"]
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_a_streamed_echo_is_the_whole_one(real: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": LLAMA, "prompt": [CONTEXT, "Two and two is"], "max_tokens": 8, "n": 2}
    asked |= {"temperature": 0.8, "seed": 5, "logprobs": 1, "echo": True}
    whole = real.completions.create(**asked)
    expect_complete_of_each(whole)
    texts: defaultdict[int, str] = defaultdict(str)
    tokens: defaultdict[int, list[str]] = defaultdict(list)
    with real.completions.create(**asked, stream=True) as stream:
        for choice in [choice for chunk in stream for choice in chunk.choices]:
            texts[choice.index] += choice.text
            if choice.logprobs is not None:
                tokens[choice.index] += choice.logprobs.tokens or []
    assert [texts[index] for index in range(4)] == [choice.text for choice in whole.choices]
    assert [tokens[index] for index in range(4)] == [tokens_of(choice) for choice in whole.choices]


def expect_complete_of_each(answer: Completion) -> None:
    for choice in answer.choices:
        assert "".join(tokens_of(choice)) == choice.text


@pytest.mark.alone
async def test_a_killed_llama_workers_prompts_go_on(tmp_path: Path) -> None:
    """Two workers on one machine are slow; both end what the other began."""
    prompts = [CONTEXT, "Once upon a time", "Two and two is"]
    body: dict[str, Any] = {"model": LLAMA, "prompt": prompts, "temperature": 0, "max_tokens": 80, "echo": True}
    body |= {"logprobs": 1, "ignore_eos": True}
    with mesh_up(tmp_path, "--workers", "2", ready_within_s=LLAMA_READY_S) as mesh:
        async with asking(mesh, **body) as (undisturbed, end):
            await asyncio.wait_for(end, 2 * END_S)
        async with beats_of(mesh) as beats, asking(mesh, **body) as (answer, end):
            worker = await beats.busy_worker()
            await eventually(
                lambda: len(answer.texts) == 3 and min(map(len, answer.texts.values())) > 50, "text", within_s=END_S
            )
            mesh.kill("worker", worker)
            await asyncio.wait_for(end, 2 * END_S)
        assert mesh.lost_claims() >= 1
    assert (answer.error, answer.done) == (None, True)
    assert answer.texts == undisturbed.texts
    assert {number: len(shown) for number, shown in answer.likelihoods.items()} == {
        number: len(shown) for number, shown in undisturbed.likelihoods.items()
    }
