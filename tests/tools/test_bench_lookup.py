"""`infermesh bench lookup`: drafts and what is taken of them, its figures, and a whole run on a tiny model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_memory import write_tiny_state
from tools.bench.lookup import LookupFailed, LookupSettings, measure_lookup
from tools.bench.lookup_child import BEHIND, STREAMS, WIDTHS
from tools.bench.lookup_decode import Decoder, NothingToDraft, taken
from tools.bench.lookup_report import Generated, row_of, step_times, together
from tools.bench.lookup_workloads import STREAMS_MAX, workloads
from tools.cli.bench_lookup import lookup_tables
from worker.engines.llama import LlamaSettings
from worker.engines.llama.cache import NOTHING
from worker.engines.llama.lookup import SIZES, Lookup
from worker.models import default_model_file

few_tokens = st.lists(st.integers(0, 3), max_size=40)
COMPLETION = 60
TOKENS = 8


def searched(tokens: Sequence[int], most: int) -> list[int]:
    """`Lookup.draft`, by looking through the whole sequence."""
    for size in SIZES:
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                drafted = list(tokens)
                for ahead in range(most):
                    drafted.append(drafted[start + size + ahead])
                return drafted[len(tokens) :]
    return []


@given(few_tokens, few_tokens, st.integers(0, 6))
def test_a_draft_is_what_followed_the_last_tokens_when_they_came_last(
    prompt: list[int], completion: list[int], most: int
) -> None:
    index = Lookup(prompt)
    index.extend(completion)
    assert index.draft(most) == searched([*prompt, *completion], most)


@pytest.mark.parametrize(
    "tokens, drafted",
    [
        ([1, 2, 3, 4, 5, 6, 7, 1, 2, 3], [4, 5, 6, 7]),
        ([9, 2, 3, 4, 8, 2, 3], [4, 8, 2, 3]),
        ([1, 2, 3, 5, 7, 2, 3, 6, 1, 2, 3], [5, 7, 2, 3]),
        ([7, 5, 5, 5], [5, 5, 5, 5]),
        ([1, 2, 3, 4], []),
        ([1], []),
        ([], []),
    ],
    ids=["three", "two", "three before two", "a loop", "nothing twice", "one", "none"],
)
def test_drafts(tokens: list[int], drafted: list[int]) -> None:
    assert Lookup(tokens).draft(4) == drafted


def test_no_token_is_taken_behind_a_wrong_one() -> None:
    assert taken([], [7]) == [7]
    assert taken([5, 6], [5, 6, 7]) == [5, 6, 7]
    assert taken([5, 6, 8], [5, 9, 8, 7]) == [5, 9]


@given(few_tokens.filter(len), st.integers(0, 6), st.integers(1, 3), st.integers())
def test_lookup_says_what_decoding_token_by_token_says(
    prompt: list[int], most: int, looks_back: int, salt: int
) -> None:
    def model(tokens: Sequence[int]) -> int:
        return hash((salt, *tokens[-looks_back:])) % 4

    plain = list(prompt)
    while len(plain) < COMPLETION:
        plain.append(model(plain))
    guessed, index = list(prompt), Lookup(prompt)
    while len(guessed) < COMPLETION:
        draft = index.draft(most)
        tokens = taken(draft, [model([*guessed, *draft[:count]]) for count in range(len(draft) + 1)])
        assert 1 <= len(tokens) <= len(draft) + 1
        guessed.extend(tokens)
        index.extend(tokens)
    assert guessed[:COMPLETION] == plain[:COMPLETION]


def generated(*completions: tuple[int, ...], wall_s: float, steps: int, drafted: int = 0) -> Generated:
    return Generated(completions=completions, steps=steps, drafted=drafted, wall_s=wall_s, cpu_s=2 * wall_s)


def test_a_row_compares_round_with_round() -> None:
    texts = ((1, 2, 3, 4, 5), (1, 2, 3, 4, 5))
    plain = [generated(*texts, wall_s=seconds, steps=8) for seconds in (1.0, 2.0, 1.0)]
    guessed = [generated(texts[0], (1, 2, 3, 4, 6), wall_s=seconds, steps=5, drafted=12) for seconds in (2.0, 2.0, 0.5)]
    row = row_of("chat", 2, plain, guessed)
    assert row.ratios == [0.5, 1.0, 2.0]
    assert row.ratio == 1.0, "the median of the rounds' ratios, not the ratio of medians"
    assert (row.plain_tokens_per_s, row.lookup_tokens_per_s) == (8.0, 4.0)
    assert (row.plain_cpu_ms, row.lookup_cpu_ms) == (250.0, 500.0)
    assert (row.tokens, row.tokens_per_step, row.right) == (8, 1.6, 0.25)
    assert (row.equal, row.completions) == (1, 2)


def test_groups_that_ran_one_after_the_other_add_up() -> None:
    whole = together([generated((1, 2), wall_s=1.0, steps=1), generated((3, 4, 5), wall_s=2.0, steps=2, drafted=4)])
    assert whole == generated((1, 2), (3, 4, 5), wall_s=3.0, steps=3, drafted=4)
    assert whole.tokens == 3, "first tokens come with the prompt"


def test_a_steps_time_is_its_median() -> None:
    (step,) = step_times({(100, 2, 5): [0.001, 0.009, 0.002]})
    assert (step.behind, step.threads, step.tokens, step.ms) == (100, 2, 5, 2.0)


def test_every_stream_has_a_prompt_of_its_own() -> None:
    for workload in workloads():
        assert len(set(workload.prompts)) == len(workload.prompts) == STREAMS_MAX


def test_what_is_to_be_replaced_is_in_the_text() -> None:
    by_name = {workload.name: workload.prompts for workload in workloads()}
    for prompt in by_name["rewrite text"]:
        instruction, _, text = prompt.partition("\n\n")
        new, old = instruction.split(" write ")[1].rstrip(".").split(" instead of ")
        assert old in text.replace("\n", " ")
        assert new not in text
    for prompt in by_name["rewrite code"]:
        old, new = prompt.split("`")[1], prompt.split("`")[3]
        assert prompt.count(old) > 2
        assert prompt.count(new) == 1


async def test_a_whole_run(tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf", context=2048)
    settings = LookupSettings(
        model=str(model), threads=1, decode_threads=None, rounds=1, repeats=1, tokens=TOKENS, draft=4
    )
    report = await measure_lookup(settings, machine={})
    assert [(step.behind, step.tokens) for step in report.steps] == list(product(BEHIND, WIDTHS))
    assert {step.threads for step in report.steps} == {report.settings["decode_threads"]} == {1}
    cells = [(workload.name, streams) for workload in workloads() for streams in STREAMS]
    assert [(row.workload, row.streams) for row in report.rows] == cells
    assert {(row.equal, row.completions) for row in report.rows} == {(STREAMS_MAX, STREAMS_MAX)}
    assert all(0 < row.tokens <= STREAMS_MAX * (TOKENS - 1) for row in report.rows)
    tables = lookup_tables(report)
    assert [table.row_count for table in tables] == [len(BEHIND), len(cells)]


def test_several_streams_with_drafts_say_the_same() -> None:
    decoder = Decoder(LlamaSettings(model=default_model_file(), context=256, slots=20, threads=1))
    texts = ["one two three four " * 8, "red green blue " * 8, "Why is the sky blue?"]
    prompts = [decoder.prefill(decoder.encode(text)) for text in texts]
    slots = [decoder.compute.cells.take(NOTHING) for _ in prompts]
    plain = decoder.generate(prompts, slots, tokens=24, draft=0)
    guessed = decoder.generate(prompts, slots, tokens=24, draft=4)
    decoder.compute.close()
    assert guessed.completions == plain.completions
    assert plain.steps == plain.tokens == guessed.tokens > guessed.steps
    assert plain.drafted == 0 < guessed.drafted


async def test_a_model_that_cannot_be_measured_is_named_as_the_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = LookupSettings(
        model=str(tmp_path / "no.gguf"), threads=1, decode_threads=1, rounds=1, repeats=1, tokens=8, draft=1
    )
    with pytest.raises(LookupFailed, match="code 1"):
        await measure_lookup(settings, machine={})
    assert "no.gguf" in capfd.readouterr().err


def test_a_model_that_cannot_take_tokens_back_is_refused(tmp_path: Path) -> None:
    model = write_tiny_state(tmp_path / "state.gguf")
    with pytest.raises(NothingToDraft):
        Decoder(LlamaSettings(model=model, context=64, slots=1, threads=1))
