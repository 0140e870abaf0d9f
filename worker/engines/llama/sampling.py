"""One sequence's way of choosing tokens: llama.cpp's own samplers, in the order of llama.cpp's own chain.

The order is that of `common_sampler_init` (common/sampling.cpp) with the default `samplers` of common/common.h: logit
bias, penalties, DRY, top-k, typical, top-p, min-p, temperature, then the draw. As llama-server does (`init_sampler` in
tools/server), penalties and DRY have seen the prompt, and the grammar has not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from schemas.errors import ErrorCode, MeshError
from schemas.sampling import Dry, Sampling
from worker.engines.llama import binding
from worker.engines.llama.dry import check_breakers
from worker.engines.llama.grammar import compile_grammar
from worker.engines.llama.model import LoadedModel
from worker.engines.llama.sampler import ConstrainedSampler, FreeSampler, GreedySampler, TokenSampler

BANNED_AT: Final = -100.0
"""A logit bias that bans a token altogether, as OpenAI has it."""

_LEAST: Final = 1e-30
"""How likely a token is, beside the likeliest, that typical sampling weighs at least. llama.cpp's entropy is no number
where a probability is 0, as that of a banned token, and what it keeps then is not what `typical_p` means."""

_COLDEST: Final = 1e-30
"""A temperature as good as any below it, which logits can still be divided by in single precision."""

_SECOND_STREAM: Final = 0x9E3779B9
"""Added to the seed of the draw that replaces a token which the grammar refused."""


class Samplers:
    """Makes the samplers of one request's choices.

    What the choices have in common is made once and copied: breakers of DRY and grammars take llama.cpp long to
    prepare. Raises `MeshError`. To be closed when all choices have theirs.
    """

    def __init__(self, sampling: Sampling, *, prompt: Sequence[int], model: LoadedModel) -> None:
        self._sampling = sampling
        self._model = model
        self._textless = frozenset() if sampling.grammar is None else _textless(model)
        self._biases = _biases(sampling, model, self._textless)
        self._window = _window(sampling, model)
        if sampling.dry is not None:
            check_breakers(sampling.dry.breakers, model.spelling, model.limits)
        self._grammar = _grammar(sampling, model)
        self._stages = binding.sampler_chain(_changing_stages(sampling, self._biases, model=model))
        self._show(self._stages, prompt)

    def make(self, choice: int, *, resumed: Sequence[int]) -> TokenSampler:
        """The sampler of choice number `choice`, which has the tokens `resumed` already. Raises `MeshError`."""
        sampling = self._sampling
        seed = _seed(sampling.seed + choice)
        if self._grammar is None and sampling.temperature == 0 and self._window == 0:
            return GreedySampler(self._biases, vocabulary=len(self._model.pieces))
        stages = binding.clone_sampler(self._stages)
        self._show(stages, resumed)
        if self._grammar is None:
            binding.add_stage(stages, _draw_stage(sampling, seed=seed, skip=len(resumed)))
            return FreeSampler(stages)
        constrained = ConstrainedSampler(
            grammar=binding.clone_sampler(self._grammar),
            stages=stages,
            draws=tuple(
                _draw_stage(sampling, seed=_seed(seed + offset), skip=len(resumed)) for offset in (0, _SECOND_STREAM)
            ),
            random=sampling.temperature > 0,
            textless=self._textless,
            model=self._model,
        )
        try:
            constrained.replay(resumed)
        except BaseException:
            constrained.close()
            raise
        return constrained

    def close(self) -> None:
        """Free what the samplers were copied from. They stay."""
        binding.free_sampler(self._stages)
        if self._grammar is not None:
            binding.free_sampler(self._grammar)

    def _show(self, stages: binding.Sampler, tokens: Sequence[int]) -> None:
        """Have penalties and DRY see the end of `tokens`."""
        if self._window > 0:
            for token in tokens[-self._window :]:
                binding.accept(stages, token)


def _seed(number: int) -> int:
    """`number` as a seed below the one that llama.cpp takes as a wish for a random seed."""
    return number % binding.RESERVED_SEED


def _draw_stage(sampling: Sampling, *, seed: int, skip: int) -> binding.Sampler:
    if sampling.temperature == 0:
        return binding.greedy_stage()
    random = binding.random_stage(seed)
    binding.advance(random, draws=skip)
    return random


def _grammar(sampling: Sampling, model: LoadedModel) -> binding.Sampler | None:
    if sampling.grammar is None:
        return None
    text = compile_grammar(sampling.grammar, limits=model.limits.grammar, param=sampling.grammar_param)
    grammar = binding.grammar_sampler(model.handle, text)
    if grammar is None:
        reason = "llama.cpp does not accept this grammar"
        raise MeshError(ErrorCode.INVALID_VALUE, reason, param=sampling.grammar_param)
    return grammar


def _changing_stages(
    sampling: Sampling, biases: Sequence[tuple[int, float]], *, model: LoadedModel
) -> list[binding.Sampler]:
    """The stages that change or drop candidates: a neutral value leaves its stage out."""
    stages = [binding.bias_stage(biases, vocabulary=len(model.pieces))] if biases else []
    if _penalizes(sampling):
        stages.append(
            binding.penalties_stage(
                last_n=min(sampling.penalty_last_n, model.context),
                repeat=sampling.repeat_penalty,
                frequency=sampling.frequency_penalty,
                presence=sampling.presence_penalty,
                vocabulary=len(model.pieces),
            )
        )
    if (dry := sampling.dry) is not None:
        stages.append(
            binding.dry_stage(
                model.handle,
                multiplier=dry.multiplier,
                base=dry.base,
                allowed_length=dry.allowed_length,
                last_n=_dry_window(dry, model),
                breakers=dry.breakers,
            )
        )
    if sampling.temperature == 0:
        return stages
    if sampling.top_k > 0:
        stages.append(binding.top_k_stage(sampling.top_k))
    if sampling.typical_p < 1:
        stages += [binding.min_p_stage(_LEAST), binding.typical_stage(sampling.typical_p)]
    if sampling.top_p < 1:
        stages.append(binding.top_p_stage(sampling.top_p))
    if sampling.min_p > 0:
        stages.append(binding.min_p_stage(sampling.min_p))
    if sampling.temperature != 1:
        stages.append(binding.temperature_stage(max(sampling.temperature, _COLDEST)))
    return stages


def _penalizes(sampling: Sampling) -> bool:
    penalties = (sampling.repeat_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    return penalties != (1.0, 0.0, 0.0) and sampling.penalty_last_n > 0


def _dry_window(dry: Dry, model: LoadedModel) -> int:
    return min(dry.last_n or model.context, model.context)


def _window(sampling: Sampling, model: LoadedModel) -> int:
    """Tokens before it on which the choice of one depends: those that penalties and DRY look back on."""
    penalties = min(sampling.penalty_last_n, model.context) if _penalizes(sampling) else 0
    return max(penalties, 0 if sampling.dry is None else _dry_window(sampling.dry, model))


def _textless(model: LoadedModel) -> frozenset[int]:
    """Tokens that add nothing to an answer's text and do not end it. llama.cpp's grammars read such a control token as
    it looks when written out; the text would lack what the grammar has counted."""
    return frozenset(
        token for token, piece in enumerate(model.pieces) if not piece and not model.ends_generation(token)
    )


def _biases(sampling: Sampling, model: LoadedModel, textless: frozenset[int]) -> list[tuple[int, float]]:
    """Raises `MeshError` for tokens that the model does not have."""
    size = len(model.pieces)
    wrong = next((token for token, _ in sampling.logit_bias if token >= size), None)
    if wrong is not None:
        reason = f"token {wrong} is not in this model's vocabulary of {size} tokens"
        raise MeshError(ErrorCode.INVALID_VALUE, reason, param="logit_bias")
    biases = {token: -math.inf if bias <= BANNED_AT else bias for token, bias in sampling.logit_bias}
    banned = {*model.suppressed_tokens, *(model.end_tokens if sampling.ignore_eos else ()), *textless}
    return [*biases.items(), *((token, -math.inf) for token in sorted(banned) if biases.get(token) != -math.inf)]
