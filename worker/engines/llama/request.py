"""A request as the engine runs it: its prompt's tokens, and its choices with what they have already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from schemas.errors import ErrorCode, MeshError
from schemas.job import Resume, ResumedChoice
from schemas.sampling import Sampling
from worker.engines.base import Submit
from worker.engines.llama.cache import Wanted
from worker.engines.llama.layout import TOLD_CHUNK, Layout, chunk_to_repeat, narrow_beginning
from worker.engines.llama.model import LoadedModel
from worker.engines.llama.sampler import TokenSampler
from worker.engines.llama.sampling import Samplers
from worker.engines.llama.sequence import Completion
from worker.engines.llama.settings import PREFILL_CHUNK_MAX
from worker.engines.llama.telling import Telling


@dataclass(frozen=True, eq=False, kw_only=True)
class Choice:
    """One of a request's answers. `resumed`: its tokens of an earlier attempt."""

    number: int
    completion: Completion
    resumed: tuple[int, ...]
    sampler: TokenSampler

    @property
    def finished(self) -> bool:
        """Whether there is nothing to draw: an earlier attempt did it, or nothing was asked for."""
        return self.completion.replayed.finish is not None


@dataclass(frozen=True, eq=False, kw_only=True)
class Prepared:
    """A valid request. `telling`: the likelihoods of the prompt's tokens, where some are wanted and not told yet.
    `close` frees its samplers."""

    key: int
    sampling: Sampling
    prompt: list[int]
    layout: Layout
    prefix_hashes: tuple[str, ...]
    telling: Telling | None
    choices: tuple[Choice, ...]

    @property
    def active(self) -> tuple[Choice, ...]:
        """Choices that need a slot: those that go on; else, where the prompt is to be told of, the first one for it."""
        unfinished = tuple(choice for choice in self.choices if not choice.finished)
        return unfinished or (self.choices[:1] if self.telling is not None else ())

    def wanted(self, choices: Sequence[Choice]) -> Wanted | None:
        """What the first sequence of those computes that begin together; None where all choices have ended before."""
        if not choices:
            return None
        # What several choices share ends with the prompt.
        resumed = choices[0].resumed if len(choices) == 1 else ()
        given = [*self.prompt, *resumed]
        reuse_max = len(given) if self.telling is None else self.telling.reusable
        return Wanted(given=given, layout=self.layout, reuse_max=reuse_max)

    def close(self) -> None:
        """Free what llama.cpp holds for it."""
        for choice in self.choices:
            choice.sampler.close()


def prepare(
    command: Submit, prompt: Sequence[int], *, model: LoadedModel, prompt_chunk: int, wide_fits: bool
) -> Prepared:
    """Check what is left to check of `command`, whose prompt has these tokens, and replay what it resumes.

    `prompt_chunk`, `wide_fits`: see `chunk_to_repeat`. Raises `MeshError`.
    """
    sampling = command.sampling
    resume = command.resume or Resume(choices=(ResumedChoice(ids=(), text=""),) * sampling.choices)
    if len(resume.choices) != sampling.choices:
        raise MeshError(ErrorCode.INVALID_VALUE, "the request resumes another number of choices than it has")
    if resume.prompt_tokens_told > len(prompt):
        raise MeshError(ErrorCode.INVALID_VALUE, "the request resumes a longer prompt than it has")
    size = len(model.pieces)
    if not all(0 <= token < size for choice in resume.choices for token in choice.ids):
        raise MeshError(ErrorCode.INVALID_VALUE, "the request resumes tokens that this model does not have")
    taken = len(prompt) + max(len(choice.ids) for choice in resume.choices)
    if taken > model.context:
        reason = f"prompt and answer have {taken} tokens; this model's context is {model.context} tokens"
        raise MeshError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, f"{reason} (engine.context)")
    choices: list[Choice] = []
    samplers = Samplers(sampling, prompt=prompt, model=model)
    try:
        for number, resumed in enumerate(resume.choices):
            completion = Completion(model, sampling, prompt_tokens=len(prompt), resumed=resumed)
            ids = tuple(completion.ids)
            sampler = samplers.make(number, resumed=ids)
            choices.append(Choice(number=number, completion=completion, resumed=ids, sampler=sampler))
    except BaseException:
        for choice in choices:
            choice.sampler.close()
        raise
    finally:
        samplers.close()
    telling = None
    if sampling.prompt_logprobs is not None and resume.prompt_tokens_told < len(prompt):
        telling = Telling(prompt, told=resume.prompt_tokens_told, top=sampling.prompt_logprobs, pieces=model.pieces)
    chunk = chunk_to_repeat(resume.prefill_chunk, own=prompt_chunk, wide_fits=wide_fits)
    return Prepared(
        key=command.key,
        sampling=sampling,
        prompt=list(prompt),
        layout=Layout(
            prompt=len(prompt),
            chunk=min(chunk, PREFILL_CHUNK_MAX if telling is None else TOLD_CHUNK),
            narrow=narrow_beginning(command.prompt),
        ),
        prefix_hashes=command.prefix_hashes,
        telling=telling,
        choices=tuple(choices),
    )
