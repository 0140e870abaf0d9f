"""Choosing one token after the other: by llama.cpp alone, or under the eyes of a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from schemas.errors import ErrorCode, MeshError
from worker.engines.llama import binding
from worker.engines.llama.model import LoadedModel


class TokenSampler(Protocol):
    """Draws the tokens of one sequence.

    Temperature 0 is greedy and draws no random number; else each token costs exactly one draw, so a continuation
    after n tokens draws n numbers first and goes on as the undisturbed sequence would have.
    """

    def sample(self, context: binding.Context, *, row: int) -> int | None:
        """Choose the token that follows row `row` of the batch just computed; None where none is allowed any more."""

    def close(self) -> None:
        """Free what llama.cpp holds. Not used afterwards."""


class FreeSampler:
    """Everything is llama.cpp's own `llama_sampler_sample`. It owns `chain`, which ends with a draw."""

    def __init__(self, chain: binding.Sampler) -> None:
        self._chain = chain

    def sample(self, context: binding.Context, *, row: int) -> int | None:
        """See `TokenSampler`."""
        return binding.sample(self._chain, context, row)

    def close(self) -> None:
        """See `TokenSampler`."""
        binding.free_sampler(self._chain)


class GreedySampler:
    """The most likely token after `biases` were added, the first one of equals: what llama.cpp's greedy chain selects.

    That chain would lay the whole vocabulary out as candidates first (60 us for 49,152 tokens, instead of 3).
    """

    def __init__(self, biases: Sequence[tuple[int, float]], *, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._tokens = [token for token, _ in biases]
        self._biases = np.array([bias for _, bias in biases], dtype=np.float32)
        self._lowered = frozenset(self._tokens)
        self._raises = any(bias > 0 for _, bias in biases)

    def sample(self, context: binding.Context, *, row: int) -> int | None:
        """See `TokenSampler`."""
        return self.choose(binding.logits_row(context, row, vocabulary=self._vocabulary))

    def choose(self, logits: NDArray[np.float32]) -> int:
        """The token for these logits, which stay as they are."""
        token = int(logits.argmax())
        if token not in self._lowered and not self._raises:
            return token
        biased = logits.copy()
        # A token may come twice, with a bias of its own and banned.
        np.add.at(biased, self._tokens, self._biases)
        return int(biased.argmax())

    def close(self) -> None:
        """See `TokenSampler`: there is nothing to free."""


class ConstrainedSampler:
    """Draws first and asks the grammar about that one token; only if it is refused, all tokens are asked about.

    The second draw comes from a random stream of its own: were it the same number again, tokens would not come by their
    probability. Both streams advance once per token, whether the second one is needed or not, so that a continuation
    finds them where they were. It owns the samplers that it is given. `textless` tokens are refused, whatever the
    grammar says.
    """

    def __init__(
        self,
        *,
        grammar: binding.Sampler,
        stages: binding.Sampler,
        draws: tuple[binding.Sampler, ...],
        random: bool,
        textless: frozenset[int],
        model: LoadedModel,
    ) -> None:
        self._grammar = grammar
        self._stages = stages
        self._first, self._second = draws
        self._random = random
        self._textless = textless
        self._model = model

    def sample(self, context: binding.Context, *, row: int) -> int | None:
        """See `TokenSampler`."""
        candidates = self._model.candidates
        logits = binding.logits_row(context, row, vocabulary=len(self._model.pieces))
        candidates.fill(logits)
        candidates.apply(self._stages)
        candidates.apply(self._first)
        token = candidates.selected
        if token is not None and self._allows(token):
            if self._random:
                binding.advance(self._second, draws=1)
        else:
            candidates.fill(logits)
            candidates.apply(self._grammar)
            if not candidates.any_left:
                return None
            candidates.apply(self._stages)
            candidates.apply(self._second)
            token = candidates.selected
            # To accept a token that the grammar refuses ends the process: whatever the numbers were, it is asked.
            if token is None or not self._allows(token):
                return None
        self._accept(token)
        return token

    def replay(self, tokens: Sequence[int]) -> None:
        """Take the tokens of an earlier attempt. Raises `MeshError` if the grammar would not have let them pass."""
        for token in tokens:
            if not self._allows(token):
                raise MeshError(ErrorCode.INVALID_VALUE, "the request resumes tokens that its grammar refuses")
            binding.accept(self._grammar, token)

    def close(self) -> None:
        """See `TokenSampler`."""
        for sampler in (self._grammar, self._stages, self._first, self._second):
            binding.free_sampler(sampler)

    def _allows(self, token: int) -> bool:
        if token in self._textless:
            return False
        self._model.candidates.fill_one(token)
        self._model.candidates.apply(self._grammar)
        return self._model.candidates.any_left

    def _accept(self, token: int) -> None:
        binding.accept(self._stages, token)
        if not self._model.ends_generation(token):
            # A grammar that is told of an end need not be: nothing follows it.
            binding.accept(self._grammar, token)
