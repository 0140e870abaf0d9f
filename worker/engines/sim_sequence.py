"""One sequence of the `sim` engine: which text comes with which token, and when it ends. Pure."""

from __future__ import annotations

from schemas.errors import ErrorCode, MeshError
from schemas.frames import FinishReason, PromptToken
from schemas.job import Resume
from worker.engines.text import StopMatcher


class Sequence:
    """A request under way. `position` counts its tokens, `reason` says why it ended (None: it has not).

    `to_compute` is what a prefill has to go through: the prompt and the ids of a continuation; `computed` of it is
    done. `likely` has the prompt's tokens where they are to be told of, and the first `told` of them were. `unsent` is
    text of replayed tokens that the gateway lacks. `accepted_at` and `decoding_at` are seconds of the engine's clock.
    The engine sets what concerns its schedule.
    """

    __slots__ = (
        "_stops",
        "accepted_at",
        "computed",
        "decoding_at",
        "is_poison",
        "key",
        "likely",
        "limit",
        "position",
        "prompt_tokens",
        "reason",
        "to_compute",
        "told",
        "unsent",
    )

    def __init__(self, key: int, *, prompt_tokens: int, limit: int, stops: tuple[str, ...]) -> None:
        self.key = key
        self.prompt_tokens = prompt_tokens
        self.limit = limit
        self.position = 0
        self.reason: FinishReason | None = None if limit else FinishReason.LENGTH
        self.to_compute = prompt_tokens
        self.computed = 0
        self.unsent = ""
        self.likely: tuple[PromptToken, ...] = ()
        self.told = 0
        self.accepted_at = 0.0
        self.decoding_at = 0.0
        self.is_poison = False
        self._stops = StopMatcher(stops) if stops else None

    @property
    def untold(self) -> bool:
        """Whether tokens of the prompt are still to be told of."""
        return self.told < len(self.likely)

    def advance(self) -> str:
        """Draw the next token, number `position` after the call, and return the text that may be sent with it."""
        self.position += 1
        text = f" tok{self.position}"
        last = self.position >= self.limit
        if self._stops is not None:
            text = self._stops.push(text)
            if self._stops.matched:
                self.reason = FinishReason.STOP
                return text
            if last:
                text += self._stops.finish()
        if last:
            self.reason = FinishReason.LENGTH
        return text

    def replay(self, resume: Resume) -> None:
        """Go silently through the tokens of an earlier attempt; of their text only what the gateway lacks is `unsent`.

        Raises `MeshError` when the earlier text is not what this engine would have said: it would be contradicted.
        """
        if len(resume.choices) != 1:
            raise MeshError(ErrorCode.INVALID_VALUE, "this engine continues exactly one choice")
        (choice,) = resume.choices
        pieces: list[str] = []
        for _ in choice.ids:
            if self.reason is not None:
                break
            pieces.append(self.advance())
        if choice.finished and self.reason is None:
            self.reason = FinishReason.STOP
        text = "".join(pieces)
        if not text.startswith(choice.text):
            raise MeshError(ErrorCode.ENGINE_ERROR, "the text to be continued is not what this engine generates")
        self.to_compute = self.prompt_tokens + len(choice.ids)
        self.told = resume.prompt_tokens_told
        self.unsent = text[len(choice.text) :]
