"""A request as the engine runs it: its prompt's tokens, and its choices with what they have already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from schemas.errors import ErrorCode, MeshError
from schemas.job import Resume, ResumedChoice
from schemas.sampling import Sampling
from worker.engines.base import Submit
from worker.engines.llama.layout import Layout, narrow_beginning
from worker.engines.llama.model import LoadedModel
from worker.engines.llama.sampler import TokenSampler
from worker.engines.llama.sampling import make_sampler
from worker.engines.llama.sequence import Completion
from worker.engines.llama.settings import PREFILL_CHUNK_MAX


@dataclass(frozen=True, eq=False, kw_only=True)
class Choice:
    """One of a request's answers. `resumed`: its tokens of an earlier attempt."""

    number: int
    completion: Completion
    resumed: tuple[int, ...]
    sampler: TokenSampler

    @property
    def finished(self) -> bool:
        """Whether an earlier attempt left nothing to do."""
        return self.completion.replayed.finish is not None


@dataclass(frozen=True, eq=False, kw_only=True)
class Prepared:
    """A valid request. `close` frees its samplers."""

    key: int
    sampling: Sampling
    prompt: list[int]
    layout: Layout
    prefix_hashes: tuple[str, ...]
    choices: tuple[Choice, ...]

    @property
    def unfinished(self) -> tuple[Choice, ...]:
        """Choices that go on."""
        return tuple(choice for choice in self.choices if not choice.finished)

    def close(self) -> None:
        """Free what llama.cpp holds for it."""
        for choice in self.choices:
            choice.sampler.close()


def prepare(command: Submit, prompt: Sequence[int], *, model: LoadedModel, prompt_chunk: int, slots: int) -> Prepared:
    """Check what is left to check of `command`, whose prompt has these tokens, and replay what it resumes.

    Raises `MeshError`.
    """
    sampling = command.sampling
    if sampling.choices > slots:
        reason = f"this engine decodes {slots} sequences together: n must not exceed that"
        raise MeshError(ErrorCode.INVALID_VALUE, reason, param="n")
    resume = command.resume or Resume(choices=(ResumedChoice(ids=(), text=""),) * sampling.choices)
    if len(resume.choices) != sampling.choices:
        raise MeshError(ErrorCode.INVALID_VALUE, "the request resumes another number of choices than it has")
    size = len(model.pieces)
    if not all(0 <= token < size for choice in resume.choices for token in choice.ids):
        raise MeshError(ErrorCode.INVALID_VALUE, "the request resumes tokens that this model does not have")
    choices: list[Choice] = []
    try:
        for number, resumed in enumerate(resume.choices):
            choices.append(_choice(number, resumed, prompt=prompt, sampling=sampling, model=model))
    except BaseException:
        for choice in choices:
            choice.sampler.close()
        raise
    return Prepared(
        key=command.key,
        sampling=sampling,
        prompt=list(prompt),
        layout=Layout(
            prompt=len(prompt),
            chunk=min(resume.prefill_chunk or prompt_chunk, PREFILL_CHUNK_MAX),
            narrow=narrow_beginning(command.prompt),
        ),
        prefix_hashes=command.prefix_hashes,
        choices=tuple(choices),
    )


def _choice(
    number: int, resumed: ResumedChoice, *, prompt: Sequence[int], sampling: Sampling, model: LoadedModel
) -> Choice:
    completion = Completion(model, sampling, prompt_tokens=len(prompt), resumed=resumed)
    ids = tuple(completion.ids)
    sampler = make_sampler(sampling, choice=number, prompt=prompt, resumed=ids, model=model)
    return Choice(number=number, completion=completion, resumed=ids, sampler=sampler)
