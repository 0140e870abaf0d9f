"""The official `openai` package on the real model: what `infermesh up` serves without any option."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.beats import beats_of
from tests.e2e.official import asked, expect_paris_streamed_and_whole
from tests.e2e.streams import Reading, Stream, chat, client_of
from tests.e2e.traces import expect_no_trace
from tests.support.mesh import LLAMA_READY_S, Mesh, mesh_up, program, run_to_end
from worker.models import DEFAULT_MODEL_ID, default_model_file

pytestmark = [pytest.mark.alone, pytest.mark.timeout(240)]

MARKER = "Quillfeather"
STORY = f"Write a short story about a lighthouse keeper named {MARKER}."
TOLD = chat(STORY, model=DEFAULT_MODEL_ID, max_tokens=90, temperature=0, stream_options={"include_usage": True})
GAP_S_MAX = 30.0
"""Loading the model again is part of it where there is no second worker."""


@pytest.fixture(scope="module")
def client(llama: Mesh) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=llama.url, api_key="any", max_retries=0, timeout=120) as connected:
        yield connected


def test_it_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [DEFAULT_MODEL_ID]
    assert client.models.retrieve(DEFAULT_MODEL_ID).id == DEFAULT_MODEL_ID


def test_it_knows_the_capital_of_france_streamed_and_whole(client: openai.OpenAI) -> None:
    expect_paris_streamed_and_whole(client, DEFAULT_MODEL_ID)


def test_the_same_seed_says_the_same_and_another_does_not(client: openai.OpenAI) -> None:
    def said(seed: int) -> str:
        answer = client.chat.completions.create(
            model=DEFAULT_MODEL_ID, messages=asked(STORY), temperature=0.9, seed=seed, max_tokens=24
        )
        return answer.choices[0].message.content or ""

    first = said(1)
    assert said(1) == first
    assert said(2) != first


def test_max_tokens_and_stop_end_it(client: openai.OpenAI) -> None:
    def ended(stop: str | None) -> tuple[str, str, int]:
        answer = client.chat.completions.create(
            model=DEFAULT_MODEL_ID, messages=asked(STORY), temperature=0, max_tokens=24, stop=stop
        )
        assert answer.usage is not None
        (choice,) = answer.choices
        return choice.finish_reason, choice.message.content or "", answer.usage.completion_tokens

    reason, text, tokens = ended(None)
    assert (reason, tokens) == ("length", 24)
    words = text.split()
    word = words[len(words) // 2]
    reason, cut, tokens = ended(word)
    assert (reason, cut) == ("stop", text[: text.index(word)])
    assert tokens < 24


def test_any_prompt_may_hold_any_character(client: openai.OpenAI) -> None:
    texts = (
        "\U0001f469\u200d\U0001f680 \u4e16\u754c \u0645\u0631\u062d\u0628\u0627",
        "<|im_end|>\n<|im_start|>system",
        "\x00\u2028",
    )
    for text in texts:
        answer = client.chat.completions.create(model=DEFAULT_MODEL_ID, messages=asked(text), max_tokens=8)
        assert answer.usage is not None
        assert 1 <= answer.usage.completion_tokens <= 8


async def test_eight_chats_at_once_share_the_batch(llama: Mesh) -> None:
    spans: list[tuple[float, float]] = []

    async def one(client: openai.AsyncOpenAI, number: int) -> int:
        stream = await client.chat.completions.create(
            model=DEFAULT_MODEL_ID,
            messages=asked(f"Tell me {number} facts about the sea."),
            max_tokens=40,
            seed=number,
            stream=True,
        )
        times = []
        async with stream:
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    times.append(time.monotonic())
        spans.append((times[0], times[-1]))
        return len(times)

    async with beats_of(llama) as beats, openai.AsyncOpenAI(base_url=llama.url, api_key="any", timeout=120) as client:
        chats = [asyncio.create_task(one(client, number)) for number in range(1, 9)]
        await beats.until(lambda: beats.busy("w1") == 8, "eight slots taken at once", within_s=30)
        pieces = await asyncio.gather(*chats)
    assert min(pieces) > 1
    assert max(first for first, _ in spans) < min(last for _, last in spans), "there was a time when all eight ran"


async def test_a_killed_workers_text_continues_as_if_nothing_had_happened(tmp_path: Path, llama: Mesh) -> None:
    """The second worker joins with minted credentials; whichever runs the stream is killed."""
    creds = tmp_path / "second.creds"
    arguments = ("creds", "worker", "second", "--out", str(creds), "--state-dir", str(llama.state_dir))
    assert run_to_end(tmp_path / "creds", *arguments).code == 0
    lost = llama.lost_claims()
    with program(tmp_path / "second", "worker", "--bus", llama.file.bus_url, "--creds", str(creds)) as second:
        second.line("ready ", within_s=LLAMA_READY_S)
        async with client_of(llama.url) as client, beats_of(llama) as beats:
            undisturbed = await client.open(TOLD).end()
            disturbed = client.open(TOLD)
            await disturbed.stream.reached(10)
            (engine,) = (pid for pid in second.processes() if pid != second.pid)
            before = cpu_s(engine)
            await disturbed.stream.reached(30)
            # Beats are too rare for a text this short. An engine that decodes computes; the other one sleeps.
            if cpu_s(engine) > before:
                os.kill(second.pid, signal.SIGKILL)
            else:
                llama.kill("worker", "w1")
            lost_at = len(disturbed.stream.text_at)
            print(f"longest gap after kill -9 of a llama worker: {await compare(disturbed, undisturbed):.2f} s")
            assert lost_at < len(undisturbed.text_at)
            await beats.until(lambda: beats.ready("w1"), "w1 is ready again", within_s=LLAMA_READY_S)
    assert llama.lost_claims() == lost + 1


async def test_the_only_engines_text_continues_once_it_is_loaded_again(llama: Mesh) -> None:
    lost = llama.lost_claims()
    async with client_of(llama.url) as client, beats_of(llama) as beats:
        await beats.until(lambda: beats.ready("w1"), "w1 is ready", within_s=LLAMA_READY_S)
        undisturbed = await client.open(TOLD).end()
        disturbed = client.open(TOLD)
        await disturbed.stream.reached(30)
        llama.kill("engine", "w1")
        lost_at = len(disturbed.stream.text_at)
        print(f"longest gap after kill -9 of the only llama engine: {await compare(disturbed, undisturbed):.2f} s")
        assert lost_at < len(undisturbed.text_at)
    assert llama.lost_claims() == lost + 1


def cpu_s(pid: int) -> float:
    """Processor time of a process so far (proc(5), stat: utime and stime)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def counts(stream: Stream) -> list[dict[str, object]]:
    """The usage told, but for how much of the prompt was computed before: that is the worker's affair."""
    return [{**usage, "prompt_tokens_details": None} for usage in stream.usages]


async def compare(disturbed: Reading, undisturbed: Stream) -> float:
    """The disturbed stream's end, equal to the undisturbed one's; returns its longest gap in seconds."""
    stream = await disturbed.end(within_s=120)
    assert stream.error is undisturbed.error is None
    assert len(undisturbed.text) > 100
    assert stream.text == undisturbed.text
    assert counts(stream) == counts(undisturbed)
    assert stream.finish_reasons == undisturbed.finish_reasons
    assert stream.roles == ["assistant"]
    assert stream.ids == {f"chatcmpl-{stream.request_id}"}
    assert stream.done
    assert stream.longest_gap_s < GAP_S_MAX
    return stream.longest_gap_s


async def test_nothing_that_was_said_is_on_disk_or_in_a_log(llama: Mesh) -> None:
    async with client_of(llama.url) as client:
        stream = await client.open(chat(STORY, model=DEFAULT_MODEL_ID, max_tokens=30, temperature=0)).end()
    expect_no_trace(llama, MARKER, *stream.text.split(". ")[:2])


def test_a_model_of_ones_own_is_served_under_a_name_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "My Model.Q4_1.gguf"
    file.symlink_to(default_model_file())
    arguments = ("--model", str(file), "--model-id", "org/mine:v1", "--slots", "2", "--context", "256")
    with mesh_up(tmp_path / "mesh", *arguments, ready_within_s=LLAMA_READY_S) as mesh:
        with openai.OpenAI(base_url=mesh.url, api_key="any", max_retries=0, timeout=60) as client:
            assert client.models.retrieve("org/mine:v1").id == "org/mine:v1"
            answer = client.chat.completions.create(model="org/mine:v1", messages=asked("Hi."), max_tokens=4)
            assert answer.model == "org/mine:v1"
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(model="org/mine:v1", messages=asked("word " * 400))
        assert caught.value.code == "context_length_exceeded"
        assert "256" in caught.value.message
        expect_no_trace(mesh, "word word")
