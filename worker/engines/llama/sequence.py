"""One request inside the engine: what was given, what was drawn, what may be sent, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from schemas.errors import ErrorCode, MeshError
from schemas.frames import FinishReason
from schemas.job import Resume, ResumedChoice
from schemas.sampling import Sampling
from worker.engines.base import Submit
from worker.engines.llama.model import LoadedModel
from worker.engines.llama.settings import PREFILL_CHUNK_MAX
from worker.engines.text import OutputText


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What one drawn token leads to: what is to be sent, and the finish reason if it was the last."""

    ids: tuple[int, ...]
    text: str
    finish: FinishReason | None


class Completion:
    """The completion of one request, token by token.

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

    def _replay(self, resumed: ResumedChoice) -> Drawn:
        """Take the tokens of an earlier attempt; the result has only what was not sent yet, and no ids."""
        text, finish = "", None
        for token in resumed.ids:
            drawn = self.take(token)
            text, finish = text + drawn.text, drawn.finish
            if finish:
                break
        if resumed.finished and not finish:
            text, finish = text + self._output.finish(), FinishReason.STOP
        return Drawn(ids=(), text=text, finish=finish)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A valid request: tokens of its prompt and of an earlier attempt, and its completion so far."""

    key: int
    sampling: Sampling
    prompt: tuple[int, ...]
    resumed: tuple[int, ...]
    prompt_chunk: int
    completion: Completion


def prepare(command: Submit, prompt: Tokens[int], *, model: LoadedModel, prompt_chunk: int) -> Prepared:
    """Check what is left to check of `command`, whose prompt has these tokens, and replay what it resumes.

    Raises `MeshError`.
    """
    resume = command.resume or Resume(choices=(ResumedChoice(ids=(), text=""),))
    if len(resume.choices) != 1:
        raise MeshError(ErrorCode.UNSUPPORTED_PARAMETER, "this engine generates one choice per request", param="n")
    choice = resume.choices[0]
    if not all(0 <= token < len(model.pieces) for token in choice.ids):
        raise MeshError(ErrorCode.INVALID_VALUE, "the request resumes tokens that this model does not have")
    completion = Completion(model, command.sampling, prompt_tokens=len(prompt), resumed=choice)
    return Prepared(
        key=command.key,
        sampling=command.sampling,
        prompt=tuple(prompt),
        resumed=tuple(completion.ids),
        prompt_chunk=min(resume.prefill_chunk or prompt_chunk, PREFILL_CHUNK_MAX),
        completion=completion,
    )
