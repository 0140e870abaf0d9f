"""A prompt that the engine tells: once, in order and whole, over any number of attempts, before the completion."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.dialects.completions_response import TextWriter, text_completion
from gateway.dialects.likelihoods import apart
from gateway.echoed import EchoedPrompt, PromptEcho
from gateway.progress import Completed
from gateway.received import LIKELIHOOD_BYTES, answer_bytes, waiting_bytes
from gateway.settings import GatewaySettings
from schemas.errors import ErrorCode, MeshError
from schemas.frames import Delta, Done, FinishReason, Likelihood, PromptToken, PromptTokens, TokenLogprob, Usage
from schemas.job import ResumedChoice
from schemas.sampling import Sampling
from tests.support.gateway import PROMPT_TOKENS, Bench, RawClient, Reader, Run, chat, raw_client, settle
from tests.support.terms import TERMS

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
RAWS = [b"", b"Once", b" upon", b" a", b" \xe2", b"\x82\xac", b" time"]
"""A control token, words, and a character in two halves."""
TEXT = "Once upon a \u20ac time"
assert len(RAWS) == PROMPT_TOKENS


def prompt_tokens(raws: Sequence[bytes] = RAWS) -> list[PromptToken]:
    """The first one has no likelihood, the others one likelier alternative."""
    likelier = (Likelihood(id=900, raw=b"x0", logprob=-0.5),)
    return [
        PromptToken(id=number, raw=raw, logprob=-float(number) if number else None, top=likelier if number else ())
        for number, raw in enumerate(raws)
    ]


TOKENS = prompt_tokens()


def sampling(**fields: Any) -> Sampling:
    return Sampling(**{"max_tokens": 4, "seed": 0, "logprobs": 1, "prompt_logprobs": 1, **fields})


def told(run: Run, *parts: tuple[int, int]) -> None:
    """Parts of the prompt, from one position to another."""
    for start, end in parts:
        run.deliver(run.make(PromptTokens, start=start, tokens=tuple(TOKENS[start:end])))


def drawn(raw: bytes) -> TokenLogprob:
    return TokenLogprob(chosen=Likelihood(id=7, raw=raw, logprob=-0.25), top=(Likelihood(7, raw, -0.25),))


def complete(run: Run, text: str = " end", reason: FinishReason = LENGTH) -> None:
    token = drawn(text.encode())
    run.deliver(run.make(Delta, text=text, ids=(7,), logprobs=(token,)))
    run.deliver(run.make(Done, finish_reasons=(reason,), usage=Usage(PROMPT_TOKENS, 1)))


@asynccontextmanager
async def reading(bench: Bench, **fields: Any) -> AsyncIterator[Reader]:
    async with bench.reading(chat(prompt_logprobs=1, logprobs=1, **fields)) as reader:
        yield reader


def code_of(reader: Reader) -> ErrorCode | None:
    assert reader.exchange is not None
    outcome = reader.exchange.outcome
    return outcome.code if isinstance(outcome, MeshError) else None


# --- over attempts


async def test_what_is_told_of_the_prompt_comes_before_the_completion() -> None:
    bench = Bench()
    async with reading(bench) as reader:
        run = await bench.take()
        run.started()
        told(run, (0, 5))
        await settle()
        assert (reader.text, reader.exchange and reader.exchange.first_text_at) == ("Once upon a ", None)
        told(run, (5, 7))
        complete(run)
        exchange = await reader.ended()
    assert isinstance(exchange.outcome, Completed)
    assert reader.text == TEXT + " end"
    assert exchange.first_text_at is not None


async def test_a_continuation_says_what_was_told_and_what_comes_again_is_dropped() -> None:
    bench = Bench()
    async with reading(bench) as reader:
        first = await bench.take()
        first.started(prefill_chunk=32)
        told(first, (0, 3))
        await settle()
        bench.router.on_worker_gone("w1", instance="i1")
        second = await bench.take()
        resume = second.job.resume
        assert resume is not None
        assert (resume.prompt_tokens_told, resume.prefill_chunk) == (3, 32)
        assert resume.choices == (ResumedChoice(ids=(), text=""),)
        second.started()
        told(second, (1, 2))
        told(second, (2, 5))
        told(second, (5, 7))
        bench.router.on_worker_gone("w1", instance="i1")
        third = await bench.take()
        assert third.job.resume is not None
        assert third.job.resume.prompt_tokens_told == PROMPT_TOKENS
        third.started()
        complete(third)
        exchange = await reader.ended()
    assert isinstance(exchange.outcome, Completed)
    assert reader.text == TEXT + " end"
    assert sum(len(frame.tokens) for frame in reader.frames if isinstance(frame, EchoedPrompt)) == PROMPT_TOKENS


async def test_an_engine_that_cannot_continue_tells_the_prompt_anew() -> None:
    bench = Bench()
    async with reading(bench) as reader:
        first = await bench.take()
        first.started(resumes=False)
        told(first, (0, 3))
        await settle()
        bench.router.on_worker_gone("w1", instance="i1")
        second = await bench.take()
        assert second.job.resume is None
        second.started(resumes=False)
        told(second, (0, 7))
        complete(second)
        await reader.ended()
    assert reader.text == TEXT + " end"


@pytest.mark.parametrize(
    "parts, then",
    [
        pytest.param([(1, 2)], "", id="a gap at the beginning"),
        pytest.param([(0, 2), (3, 5)], "", id="a gap"),
        pytest.param([(0, 7), (0, 8)], "", id="more than there is"),
        pytest.param([], "end", id="nothing"),
        pytest.param([(0, 6)], "end", id="not all"),
        pytest.param([(0, 6)], "text", id="the rest too late"),
    ],
)
async def test_an_engine_that_tells_the_prompt_wrong_fails_the_request(parts: list[tuple[int, int]], then: str) -> None:
    bench = Bench()
    async with reading(bench) as reader:
        run = await bench.take()
        run.started()
        for start, end in parts:
            run.deliver(run.make(PromptTokens, start=start, tokens=(*TOKENS, TOKENS[1])[start:end]))
        if then == "end":
            complete(run)
        if then == "text":
            run.deliver(run.make(Delta, text="x", ids=(7,)))
            told(run, (6, 7))
        await reader.ended()
        assert code_of(reader) is ErrorCode.ENGINE_ERROR
    assert len(bench.router) == 0


async def test_a_prompt_that_nobody_asked_for_fails_the_request() -> None:
    bench = Bench()
    async with bench.reading() as reader:
        run = await bench.take()
        run.started()
        told(run, (0, 1))
        await reader.ended()
        assert code_of(reader) is ErrorCode.ENGINE_ERROR


async def test_what_is_told_counts_against_the_buffer_of_a_slow_client() -> None:
    bench = Bench(settings=GatewaySettings(stream_buffer_bytes_max=LIKELIHOOD_BYTES * 3))
    request = chat(prompt_logprobs=1, logprobs=1)
    async with bench.exchanges.open(request, terms=TERMS, body_bytes=1) as exchange:
        run = await bench.take()
        run.started()
        told(run, (0, 1))
        bench.sweep_over_buffer()
        assert exchange.outcome is None
        told(run, (1, 3))
        bench.sweep_over_buffer()
        assert getattr(exchange.outcome, "code", None) is ErrorCode.SLOW_CLIENT


def test_in_an_answer_the_prompt_counts_for_each_of_its_choices() -> None:
    part = EchoedPrompt(handle=1, seq=0, text="ab", choices=3, tokens=tuple(TOKENS[:2]))
    assert waiting_bytes(part) == 2 + 3 * LIKELIHOOD_BYTES
    assert answer_bytes(part) == 3 * waiting_bytes(part)


@settings(deadline=None)
@given(st.data())
def test_any_attempts_that_tell_any_parts_add_up_to_the_prompt_once(data: st.DataObject) -> None:
    raw = TEXT.encode() + data.draw(st.sampled_from([b"", b"\xf0\x9f"]))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)))))
    raws = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    tokens = prompt_tokens(raws)
    echo, text = PromptEcho(sampling()), ""
    seen: list[PromptToken] = []
    while echo.told < len(tokens):
        start = data.draw(st.integers(0, echo.told))
        end = data.draw(st.integers(start + 1, len(tokens)))
        before = echo.told
        part = echo.take(
            PromptTokens(handle=1, seq=0, start=start, tokens=tuple(tokens[start:end])), prompt_tokens=len(tokens)
        )
        assert (part is None) == (end <= before)
        if part is not None:
            text += part.text
            seen += part.tokens
            assert part.ends == (echo.told == len(tokens))
    assert (text, seen) == (raw.decode(errors="replace"), tokens)


# --- as it is shown


def answers(
    deltas: list[Delta], reason: FinishReason, *, choices: int = 1, logprobs: bool = True
) -> list[dict[str, Any]]:
    """The choices of the whole answer, which are those of the stream as well."""
    usage = Usage(PROMPT_TOKENS, 1)
    reasons = [reason] * choices
    body = text_completion(
        "cmpl-1",
        created=1,
        model="m",
        echoed=[],
        choices=apart(deltas, choices=choices),
        finish_reasons=reasons,
        usage=usage,
        logprobs=logprobs,
    )
    whole: list[dict[str, Any]] = json.loads(b"".join(body))["choices"]
    writer = TextWriter("cmpl-1", created=1, model="m", choices=choices, logprobs=logprobs)
    events = writer.opening() + b"".join(map(writer.delta, deltas)) + writer.ending(reasons, usage)
    lines = [json.loads(line[6:]) for line in events.split(b"\n") if line.startswith(b"data: {")]
    streamed = [choice for line in lines for choice in line["choices"]]
    for choice in whole:
        mine = [each for each in streamed if each["index"] == choice["index"]]
        assert "".join(each["text"] for each in mine) == choice["text"]
        for name in choice["logprobs"] or {}:
            joined = [entry for each in mine if each["logprobs"] for entry in each["logprobs"][name]]
            assert joined == choice["logprobs"][name]
    return whole


def shown_prompt(cuts: Sequence[int], *, of: Sampling, raws: Sequence[bytes] = RAWS) -> list[Delta]:
    echo, parts = PromptEcho(of), []
    tokens = prompt_tokens(raws)
    for start, end in zip([0, *cuts], [*cuts, len(raws)], strict=True):
        frame = PromptTokens(handle=1, seq=0, start=start, tokens=tuple(tokens[start:end]))
        part = echo.take(frame, prompt_tokens=len(raws))
        assert part is not None
        parts.append(part)
    return list(parts)


def generated(text: str, *tokens: TokenLogprob, choice: int = 0) -> Delta:
    return Delta(handle=1, seq=0, text=text, ids=(7,) * len(tokens), logprobs=tokens, choice=choice)


@pytest.mark.parametrize("cuts", [[], [1], [5], [1, 2, 3, 4, 5, 6]])
def test_the_lists_have_the_prompt_and_then_the_completion(cuts: list[int]) -> None:
    (choice,) = answers([*shown_prompt(cuts, of=sampling()), generated(" end", drawn(b" end"))], LENGTH)
    shown = choice["logprobs"]
    assert choice["text"] == TEXT + " end"
    assert shown["tokens"] == ["", "Once", " upon", " a", "bytes:\\x20\\xe2", "bytes:\\x82\\xac", " time", " end"]
    assert shown["token_logprobs"] == [None, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -0.25]
    assert shown["top_logprobs"][0] is None
    assert shown["top_logprobs"][1] == {"x0": -0.5, "Once": -1.0}
    assert shown["text_offset"] == [0, 0, 4, 9, 11, 12, 13, 18]


def test_each_choice_has_the_prompt() -> None:
    of = sampling(choices=2)
    deltas = [*shown_prompt([3], of=of), generated("b", drawn(b"b"), choice=1), generated("a", drawn(b"a"))]
    first, second = answers(deltas, LENGTH, choices=2)
    assert (first["text"], second["text"]) == (TEXT + "a", TEXT + "b")
    assert first["logprobs"]["token_logprobs"] == second["logprobs"]["token_logprobs"]


def test_without_likelihoods_only_the_text_is_shown() -> None:
    of = sampling(logprobs=None, prompt_logprobs=0)
    (choice,) = answers([*shown_prompt([5], of=of), generated(" end")], LENGTH, logprobs=False)
    assert (choice["text"], choice["logprobs"]) == (TEXT + " end", None)


def test_a_prompt_alone_is_an_answer() -> None:
    (choice,) = answers(shown_prompt([2], of=sampling(max_tokens=0)), LENGTH)
    assert (choice["text"], len(choice["logprobs"]["tokens"])) == (TEXT, PROMPT_TOKENS)


def test_a_prompt_that_ends_in_the_middle_of_a_character_does_not_shift_the_completion() -> None:
    deltas = [*shown_prompt([1], of=sampling(), raws=[b"a", b"\xe2"]), generated("b", drawn(b"b"))]
    (choice,) = answers(deltas, LENGTH)
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("a\ufffdb", [0, 1, 2])


# --- as lm-evaluation-harness reads it (lm_eval/models/openai_completions.py, `parse_logprobs`)


def harness(choice: dict[str, Any], ctxlen: int) -> tuple[float, bool]:
    """Sum of the continuation's logprobs, and whether each of its tokens was the likeliest: the package's own
    arithmetic, which takes the last entry for the one token that it had generated."""
    logprobs = choice["logprobs"]["token_logprobs"][ctxlen:-1]
    tops = choice["logprobs"]["top_logprobs"][ctxlen:-1]
    return sum(logprobs), all(logprob == max(top.values()) for logprob, top in zip(logprobs, tops, strict=True))


@pytest.mark.parametrize(
    "completion, reason",
    [
        pytest.param([generated(" end", drawn(b" end"))], LENGTH, id="a token"),
        pytest.param([generated("", drawn(b"\xf0"))], LENGTH, id="a part of a character"),
        pytest.param([generated("", drawn(b""))], LENGTH, id="a control token"),
        pytest.param([], STOP, id="the end of the text, untold"),
        pytest.param([Delta(handle=1, seq=0, text="", logprobs=(drawn(b""),))], STOP, id="the end of the text, told"),
    ],
)
def test_the_likelihood_of_a_continuation_is_found_whatever_was_generated_behind_it(
    completion: list[Delta], reason: FinishReason
) -> None:
    (choice,) = answers([*shown_prompt([4], of=sampling(max_tokens=1)), *completion], reason)
    assert len(choice["logprobs"]["tokens"]) == PROMPT_TOKENS + 1
    assert harness(choice, 4) == (-4.0 - 5.0 - 6.0, False)
    assert harness(choice, 1)[0] == -21.0


# --- over HTTP


@asynccontextmanager
async def posted(bench: Bench, **fields: Any) -> AsyncIterator[RawClient]:
    async with bench.serving() as server, raw_client(server) as client:
        client.post(json.dumps({"model": "sim", **fields}).encode(), path="/v1/completions")
        yield client


@pytest.mark.parametrize("prompt", ["hello", [1, 2, 3], ["a", "b"], [[1], [2]]])
@pytest.mark.parametrize("stream", [True, False])
async def test_prompts_are_told_by_the_engine_and_shown_before_their_completions(prompt: Any, stream: bool) -> None:
    bench = Bench()
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    async with posted(bench, prompt=prompt, echo=True, logprobs=1, max_tokens=1, stream=stream) as client:
        for _ in range(2 if several else 1):
            run = await bench.take()
            assert (run.job.sampling.prompt_logprobs, run.job.sampling.max_tokens) == (1, 1)
            run.started()
            told(run, (0, 4))
            await settle()
            told(run, (4, 7))
            complete(run)
        got = (await client.read_until(b"0\r\n\r\n" if stream else b"}}}")).partition(b"\r\n\r\n")[2]
    documents = [json.loads(line[6:]) for line in got.split(b"\n") if line.startswith(b"data: {")]
    choices = [choice for each in documents or [json.loads(got)] for choice in each["choices"]]
    for index in range(2 if several else 1):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == TEXT + " end"
        entries = [entry for choice in mine if choice["logprobs"] for entry in choice["logprobs"]["token_logprobs"]]
        assert entries == [None, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -0.25]


async def test_the_answer_to_an_echo_without_completion() -> None:
    bench = Bench()
    async with posted(bench, prompt=[1, 2], echo=True, max_tokens=0) as client:
        run = await bench.take()
        assert (run.job.sampling.prompt_logprobs, run.job.sampling.max_tokens) == (0, 0)
        run.started()
        told(run, (0, 7))
        run.deliver(run.make(Done, finish_reasons=(LENGTH,), usage=Usage(PROMPT_TOKENS, 0)))
        answer = json.loads((await client.read_until(b"}}}")).partition(b"\r\n\r\n")[2])
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == (TEXT, "length", None)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (PROMPT_TOKENS, 0)
