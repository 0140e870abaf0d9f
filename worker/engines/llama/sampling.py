"""One sequence's way of choosing tokens: a chain of llama.cpp's samplers, in llama.cpp's order."""

from __future__ import annotations

from schemas.sampling import Sampling
from worker.engines.llama import binding


class TokenSampler:
    """Draws a sequence's tokens. `close` frees it.

    Temperature 0 is greedy and draws no random number; else each token costs exactly one draw, so a continuation
    after n tokens draws n numbers first (`skip`) and goes on as the undisturbed sequence would have.
    """

    def __init__(self, sampling: Sampling, *, skip: int) -> None:
        if sampling.temperature == 0:
            self._chain = binding.sampler_chain([binding.greedy_stage()])
            return
        random = binding.random_stage(usable_seed(sampling.seed))
        binding.draw(random, times=skip)
        self._chain = binding.sampler_chain([*_filters(sampling), random])

    def sample(self, context: binding.Context, *, row: int) -> int:
        """Choose the token that follows row `row` of the batch just computed."""
        return binding.sample(self._chain, context, row)

    def close(self) -> None:
        """Free the chain. Not used afterwards."""
        binding.free_sampler(self._chain)


def usable_seed(seed: int) -> int:
    """`seed`, except for the one value that llama.cpp takes as a wish for a random seed."""
    return seed - 1 if seed == binding.RESERVED_SEED else seed


def _filters(sampling: Sampling) -> list[binding.Sampler]:
    """The filters that do something: a neutral value leaves its filter out."""
    stages = []
    if sampling.top_k > 0:
        stages.append(binding.top_k_stage(sampling.top_k))
    if sampling.top_p < 1:
        stages.append(binding.top_p_stage(sampling.top_p))
    if sampling.min_p > 0:
        stages.append(binding.min_p_stage(sampling.min_p))
    if sampling.temperature != 1:
        stages.append(binding.temperature_stage(sampling.temperature))
    return stages
