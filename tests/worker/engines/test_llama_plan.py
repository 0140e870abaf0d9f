"""The batch planner: who takes part in a step, and where a prompt is cut."""

from __future__ import annotations

import dataclasses
import itertools

from hypothesis import given
from hypothesis import strategies as st

from worker.engines.llama.layout import NARROW_CHUNK, TOLD_CHUNK, TOLD_ROWS_MAX, WIDE_BATCH, Layout, chunk_to_repeat
from worker.engines.llama.pace import Pace, Widths
from worker.engines.llama.plan import Chunk, Progress, choose_prefill_chunk, next_chunk, plan_step

WIDTHS = Widths(beside=100, alone=300)


def progress(
    slot: int = 0,
    *,
    prompt: int = 100,
    resumed: int = 0,
    computed: int = 0,
    chunk: int = 32,
    narrow: int = 0,
    resume_chunk: int = 63,
    alone_below: int = 10**6,
) -> Progress:
    return Progress(
        slot=slot,
        layout=Layout(prompt=prompt, chunk=chunk, narrow=narrow),
        resumed=resumed,
        computed=computed,
        resume_chunk=resume_chunk,
        alone_below=alone_below,
    )


def chunks_of(sequence: Progress, width: int | None = None, *, idle: bool = True) -> list[Chunk]:
    chunks = []
    while sequence.computed < sequence.given:
        chunk = next_chunk(sequence, width, idle=idle)
        chunks.append(chunk)
        sequence = dataclasses.replace(sequence, computed=chunk.end)
    return chunks


def sizes_of(sequence: Progress, width: int | None) -> list[int]:
    return [chunk.end - chunk.start for chunk in chunks_of(sequence, width)]


def test_every_decoding_sequence_and_the_prompt_whose_turn_it_is_take_part() -> None:
    plan = plan_step(
        [
            progress(3, computed=100),
            progress(1, computed=32),
            progress(0, computed=120),
            progress(2, computed=0),
        ],
        None,
        turn=1,
        others_wait=False,
    )
    assert plan.decodes == (0, 3)
    assert plan.chunk == Chunk(slot=1, start=32, end=64, last=False)


def test_nothing_runs_nothing_is_planned() -> None:
    for widths in (None, WIDTHS):
        plan = plan_step([], widths, turn=None, others_wait=False)
        assert (plan.decodes, plan.chunk) == ((), None)


def test_a_chunk_is_wide_as_long_as_nobody_waits_for_a_token() -> None:
    prompt = progress(0, prompt=1000, chunk=64)
    for others, end in (([], 296), ([progress(1, prompt=1000, chunk=64)], 296), ([progress(1, computed=100)], 104)):
        plan = plan_step([prompt, *others], WIDTHS, turn=0, others_wait=False)
        assert plan.chunk == Chunk(slot=0, start=0, end=end, last=False)


def test_prompt_and_resumed_tokens_never_share_a_chunk() -> None:
    assert [(chunk.start, chunk.end, chunk.last) for chunk in chunks_of(progress(prompt=70, resumed=130))] == [
        (0, 32, False),
        (32, 64, False),
        (64, 70, False),
        (70, 133, False),
        (133, 196, False),
        (196, 200, True),
    ]


@given(st.integers(1, 600), st.integers(0, 200), st.integers(1, 512), st.integers(1, 63))
def test_where_widths_matter_chunks_have_the_same_boundaries_on_every_attempt(
    prompt: int, resumed: int, width: int, resume_width: int
) -> None:
    first = chunks_of(progress(prompt=prompt, chunk=width))
    later = chunks_of(progress(prompt=prompt, resumed=resumed, chunk=width, resume_chunk=resume_width))
    boundaries = [(chunk.start, chunk.end) for chunk in later]
    assert boundaries[: len(first)] == [(chunk.start, chunk.end) for chunk in first]
    assert [start for start, _ in boundaries] == [0, *(end for _, end in boundaries[:-1])]
    assert all(end - start <= max(width, resume_width) for start, end in boundaries)
    assert [chunk.last for chunk in later] == [False] * (len(later) - 1) + [True]
    assert later[-1].end == prompt + resumed


@given(
    prompt=st.integers(1, 900),
    chunk=st.sampled_from([1, 32, 63, 64, 512]),
    narrow=st.sampled_from([0, 256]),
    widths=st.lists(st.integers(8, 512), min_size=1, max_size=4),
)
def test_whatever_the_widths_every_token_is_computed_by_its_kind_of_batch(
    prompt: int, chunk: int, narrow: int, widths: list[int]
) -> None:
    sequence = progress(prompt=prompt, chunk=chunk, narrow=narrow)
    for width in itertools.cycle(widths):
        piece = next_chunk(sequence, width, idle=True)
        size = piece.end - piece.start
        if piece.start in sequence.layout.wide:
            assert WIDE_BATCH <= size <= max(width, 2 * WIDE_BATCH - 1)
            assert piece.start == sequence.layout.wide.start or size <= max(width, WIDE_BATCH)
        else:
            assert size <= min(width, NARROW_CHUNK) + 1
            assert size > 1 or prompt == 1
        assert (piece.start in sequence.layout.wide) == (piece.end - 1 in sequence.layout.wide) == (size >= WIDE_BATCH)
        sequence = dataclasses.replace(sequence, computed=piece.end)
        if piece.last:
            break
    assert sequence.computed == prompt


@given(
    prompt=st.integers(1, 900),
    chunk=st.integers(1, TOLD_CHUNK),
    narrow=st.sampled_from([0, 256]),
    width=st.none() | st.integers(8, 512),
)
def test_a_chunk_whose_tokens_are_told_has_no_more_rows_than_there_is_room_for(
    prompt: int, chunk: int, narrow: int, width: int | None
) -> None:
    sequence = dataclasses.replace(progress(prompt=prompt, chunk=chunk, narrow=narrow), width_max=TOLD_CHUNK)
    widths = None if width is None else Widths(beside=width, alone=width)
    while sequence.computed < prompt:
        piece = plan_step([sequence], widths, turn=sequence.slot, others_wait=False).chunk
        assert piece is not None
        assert 1 <= piece.end - piece.start <= TOLD_ROWS_MAX
        sequence = dataclasses.replace(sequence, computed=piece.end)


def test_the_measured_chunk_fits_the_time_and_the_smallest_wide_one_twice_that() -> None:
    def chosen(narrow: float, wide: float) -> int:
        return choose_prefill_chunk(narrow_per_s=narrow, wide_per_s=wide, milliseconds=250.0)

    assert [chosen(1, rate) for rate in (1, 127, 128, 511, 512, 1023, 1024, 10**6)] == [
        32,
        32,
        64,
        64,
        128,
        128,
        256,
        512,
    ]
    assert [chosen(rate, 127) for rate in (191, 192)] == [32, 48]


def test_what_would_be_left_too_small_joins_the_first_chunk() -> None:
    assert sizes_of(progress(prompt=300, chunk=64), 128) == [108, 128, 64]
    assert sizes_of(progress(prompt=1_000, chunk=64), 64) == [104, *[64] * 14]
    assert sizes_of(progress(prompt=100, chunk=64), 64) == [100]
    assert sizes_of(progress(prompt=49), 48) == [47, 2]
    assert sizes_of(progress(prompt=63, chunk=512), 512) == [48, 15]


def test_a_narrow_beginning_is_for_prompts_that_are_longer_by_a_wide_batch() -> None:
    assert sizes_of(progress(prompt=460, chunk=64, narrow=256), 300) == [48, 48, 48, 48, 48, 16, 204]
    assert sizes_of(progress(prompt=319, chunk=64, narrow=256), 300) == [48, 48, 48, 48, 48, 48, 31]


def test_the_pace_follows_the_measured_rate_within_its_bounds() -> None:
    pace = Pace(400, beside_ms=250, alone_ms=500, least=32, most=512)
    assert pace.widths() == Widths(beside=100, alone=200)
    pace.note(100, seconds=0.5)
    assert pace.widths() == Widths(beside=50, alone=100)
    pace.note(100, seconds=0.25)
    assert pace.widths() == Widths(beside=75, alone=150)
    pace.note(31, seconds=0.001)
    assert pace.widths() == Widths(beside=75, alone=150)
    for _ in range(10):
        pace.note(512, seconds=0.01)
    assert pace.widths() == Widths(beside=512, alone=512)
    for _ in range(10):
        pace.note(32, seconds=10)
    assert pace.widths() == Widths(beside=32, alone=32)
    assert Pace(400, beside_ms=250, alone_ms=500, least=48, most=48).widths() == Widths(beside=48, alone=48)


def test_resumed_tokens_are_computed_alone_where_they_were_and_nobody_waits_for_it() -> None:
    sequence = progress(prompt=200, resumed=100, chunk=100, resume_chunk=32, alone_below=256)
    idle = [(chunk.start, chunk.end) for chunk in chunks_of(sequence) if chunk.start >= 200]
    assert idle[:2] == [(200, 232), (232, 256)]
    assert idle[2:] == [(place, place + 1) for place in range(256, 300)]
    beside = [(chunk.start, chunk.end) for chunk in chunks_of(sequence, idle=False) if chunk.start >= 200]
    assert beside == [(200, 232), (232, 264), (264, 296), (296, 300)]


def test_where_others_run_or_wait_resumed_tokens_are_computed_together() -> None:
    resumed = progress(0, prompt=200, resumed=100, computed=260, resume_chunk=32, alone_below=256)
    streams, prompts = progress(1, computed=100), progress(1, computed=0)
    ends = []
    for others, others_wait in (([], False), ([streams], False), ([prompts], False), ([], True)):
        chunk = plan_step([*others, resumed], WIDTHS, turn=0, others_wait=others_wait).chunk
        assert chunk is not None
        ends.append(chunk.end)
    assert ends == [261, 264, 264, 264]


def test_a_first_attempt_s_wide_chunks_are_repeated_where_they_take_no_longer_than_a_step_may() -> None:
    assert [chunk_to_repeat(first, own=32, wide_fits=True) for first in (0, 48, 63, 64, 512)] == [32, 48, 63, 64, 512]
    assert [chunk_to_repeat(first, own=32, wide_fits=False) for first in (0, 48, 63, 64, 512)] == [32, 48, 63, 32, 32]
