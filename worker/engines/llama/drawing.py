"""From the logits of a batch to what an engine tells of them: sample, then events."""

from __future__ import annotations

import time

from schemas.frames import FinishReason, TokenLogprob
from worker.engines.base import Event, Tokens
from worker.engines.llama.compute import Compute
from worker.engines.llama.logprobs import token_logprob
from worker.engines.llama.model import LoadedModel
from worker.engines.llama.request import Choice, Prepared
from worker.engines.llama.running import SlotSequence
from worker.engines.llama.sequence import Drawn


class Drawing:
    """Draws the next tokens of sequences from the last batch of `compute`."""

    def __init__(self, model: LoadedModel, compute: Compute) -> None:
        self._model = model
        self._compute = compute

    def draw(self, sequence: SlotSequence, *, row: int, events: list[Event]) -> bool:
        """Draw one token from the logits in `row`. False = the sequence's choice ended with it."""
        running, choice = sequence.running, sequence.choice
        token = choice.sampler.sample(self._compute.context, row=row)
        if running.first_token_at is None:
            running.first_token_at = time.monotonic()
        drawn = choice.completion.end() if token is None else choice.completion.take(token)
        # The end of the only choice is the end of the request: no need to say it twice.
        finish = drawn.finish if len(running.reasons) > 1 else None
        logprobs = self._likelihoods(running.request, token, drawn, row=row)
        append_tokens(events, running.request.key, choice, drawn, logprobs, finish)
        running.reasons[choice.number] = drawn.finish
        return drawn.finish is None

    def draw_along(self, sequence: SlotSequence, guess: list[int], *, events: list[Event]) -> bool:
        """Draw one token, and one more behind each of `guess` that was right: the draws of decoding step by step.

        Row 0 is that of the token before the guess. False = the sequence's choice ended with one of them.
        """
        ids = sequence.choice.completion.ids
        for row, guessed in enumerate([*guess, None]):
            if not self.draw(sequence, row=row, events=events):
                return False
            if ids[-1] != guessed:
                break
        return True

    def _likelihoods(self, request: Prepared, token: int | None, drawn: Drawn, *, row: int) -> tuple[TokenLogprob, ...]:
        """What is told of a drawn token: of one that ends the choice only where the prompt's are told of too, for who
        asks for those counts every token."""
        sampling = request.sampling
        if sampling.logprobs is None or token is None or not (drawn.ids or sampling.prompt_logprobs is not None):
            return ()
        return (token_logprob(self._compute.logits(row), token, top=sampling.logprobs, pieces=self._model.pieces),)


def append_tokens(
    events: list[Event],
    key: int,
    choice: Choice,
    drawn: Drawn,
    logprobs: tuple[TokenLogprob, ...] = (),
    finish: FinishReason | None = None,
) -> None:
    """Tell of what was drawn, if there is anything to tell."""
    if drawn.ids or drawn.text or logprobs or finish is not None:
        events.append(Tokens(key, drawn.text, drawn.ids, choice.number, logprobs, finish))
