"""One choice's completion: what was drawn, what may be sent, and when it ends."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.frames import FinishReason
from schemas.job import ResumedChoice
from schemas.sampling import Sampling
from worker.engines.llama.model import LoadedModel
from worker.engines.text import OutputText


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What one drawn token leads to: what is to be sent, and the finish reason if it was the last."""

    ids: tuple[int, ...]
    text: str
    finish: FinishReason | None


class Completion:
    """The completion of one choice, token by token.

    The token that ends a generation belongs to the protocol between model and engine: it is not sent, has no id in
    `ids` and is not counted. Any other drawn token is, also the one that completes a stop string. Text held back is
    released exactly once, with the token that ends the completion.
    """

    def __init__(self, model: LoadedModel, sampling: Sampling, *, prompt_tokens: int, resumed: ResumedChoice) -> None:
        self._model = model
        self._ids_max = min(sampling.max_tokens, model.context - prompt_tokens)
        self._output = OutputText(stops=sampling.stop, already_sent=len(resumed.text))
        self.ids: list[int] = []
        self.replayed = self._replay(resumed)

    @property
    def room(self) -> int:
        """Tokens that may still be taken."""
        return self._ids_max - len(self.ids)

    def take(self, token: int) -> Drawn:
        """Add a drawn token."""
        if self._model.ends_generation(token):
            return Drawn(ids=(), text=self._output.finish(), finish=FinishReason.STOP)
        self.ids.append(token)
        text = self._output.push(self._model.pieces[token])
        if self._output.stopped:
            return Drawn(ids=(token,), text=text, finish=FinishReason.STOP)
        if len(self.ids) >= self._ids_max:
            return Drawn(ids=(token,), text=text + self._output.finish(), finish=FinishReason.LENGTH)
        return Drawn(ids=(token,), text=text, finish=None)

    def end(self) -> Drawn:
        """End it where no token is allowed any more."""
        return Drawn(ids=(), text=self._output.finish(), finish=FinishReason.STOP)

    def _replay(self, resumed: ResumedChoice) -> Drawn:
        """Take the tokens of an earlier attempt; the result has only what was not sent yet, and no ids."""
        if self._ids_max == 0:
            return Drawn(ids=(), text="", finish=FinishReason.LENGTH)
        text, finish = "", None
        for token in resumed.ids:
            drawn = self.take(token)
            text, finish = text + drawn.text, drawn.finish
            if finish:
                break
        if resumed.finished and not finish:
            text, finish = text + self._output.finish(), FinishReason.STOP
        return Drawn(ids=(), text=text, finish=finish)
