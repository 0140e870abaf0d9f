"""The batch planner: who takes part in a step, and where a prompt is cut."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from worker.engines.llama.plan import Chunk, Progress, choose_prefill_chunk, next_chunk, plan_step


def progress(
    slot: int = 0,
    *,
    prompt: int = 100,
    resumed: int = 0,
    computed: int = 0,
    prompt_chunk: int = 32,
    resume_chunk: int = 64,
) -> Progress:
    return Progress(
        slot=slot,
        prompt=prompt,
        resumed=resumed,
        computed=computed,
        prompt_chunk=prompt_chunk,
        resume_chunk=resume_chunk,
    )


def chunks_of(sequence: Progress) -> list[Chunk]:
    chunks = []
    while sequence.computed < sequence.given:
        chunk = next_chunk(sequence)
        chunks.append(chunk)
        sequence = dataclasses.replace(sequence, computed=chunk.end)
    return chunks


def test_every_decoding_sequence_and_the_oldest_prompt_take_part() -> None:
    plan = plan_step(
        [
            progress(3, computed=100),
            progress(1, computed=32),
            progress(0, computed=120),
            progress(2, computed=0),
        ]
    )
    assert plan.decodes == (0, 3)
    assert plan.chunk == Chunk(slot=1, start=32, end=64, last=False)


def test_nothing_runs_nothing_is_planned() -> None:
    plan = plan_step([])
    assert (plan.decodes, plan.chunk) == ((), None)


def test_prompt_and_resumed_tokens_never_share_a_chunk() -> None:
    assert [(chunk.start, chunk.end, chunk.last) for chunk in chunks_of(progress(prompt=70, resumed=130))] == [
        (0, 32, False),
        (32, 64, False),
        (64, 70, False),
        (70, 134, False),
        (134, 198, False),
        (198, 200, True),
    ]


@given(st.integers(1, 600), st.integers(0, 200), st.integers(1, 512), st.integers(1, 64))
def test_chunks_cover_what_was_given_with_the_same_boundaries_on_every_attempt(
    prompt: int, resumed: int, width: int, resume_width: int
) -> None:
    first = chunks_of(progress(prompt=prompt, prompt_chunk=width))
    later = chunks_of(progress(prompt=prompt, resumed=resumed, prompt_chunk=width, resume_chunk=resume_width))
    boundaries = [(chunk.start, chunk.end) for chunk in later]
    assert boundaries[: len(first)] == [(chunk.start, chunk.end) for chunk in first]
    assert [start for start, _ in boundaries] == [0, *(end for _, end in boundaries[:-1])]
    assert all(end - start <= max(width, resume_width) for start, end in boundaries)
    assert [chunk.last for chunk in later] == [False] * (len(later) - 1) + [True]
    assert later[-1].end == prompt + resumed


def test_the_measured_chunk_fits_the_time() -> None:
    def chosen(narrow: float, wide: float) -> int:
        return choose_prefill_chunk(narrow_per_s=narrow, wide_per_s=wide, milliseconds=250.0)

    assert [chosen(1, rate) for rate in (1, 255, 256, 512, 1023, 1024, 10**6)] == [32, 32, 64, 128, 128, 256, 512]
    assert [chosen(rate, 255) for rate in (191, 192)] == [32, 48]


def test_a_long_prompt_begins_with_narrow_chunks() -> None:
    ends = [chunk.end for chunk in chunks_of(progress(prompt=460, prompt_chunk=64))]
    assert ends == [48, 96, 144, 192, 240, 256, 320, 384, 448, 460]
    assert [chunk.end for chunk in chunks_of(progress(prompt=600, prompt_chunk=512))][-3:] == [256, 512, 600]
