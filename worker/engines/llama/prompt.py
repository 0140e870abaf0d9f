"""From a request's prompt to the token ids the model computes.

Text in messages cannot fake a turn: where a message writes a control token out (`<|im_end|>`), a mark splits it before
the template is rendered, and the rendered text is tokenized in parts between the marks. So it reaches the model as the
plain characters it is. Prompts without such text tokenize exactly as in one piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from schemas.errors import ErrorCode, MeshError
from schemas.job import ChatPrompt, EmbeddingPrompt, InfillPrompt, Prompt, TextPrompt, TokenPrompt
from worker.engines.llama.controls import ControlSplitter
from worker.engines.llama.model import LoadedModel
from worker.engines.llama.template import ChatTemplate, TemplateUnusable
from worker.engines.llama.texts import check_texts

_MARKS: Final = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
"""Unicode noncharacters, reserved for a program's internal use."""

_NAMES: Final = {"prompt": "the prompt", "messages": "the conversation"}

_NO_EMBEDDINGS: Final = "this model does not compute embeddings"
_NO_INFILL: Final = "this model has no tokens for filling a gap: leave `suffix` out"
_NO_TEMPLATE: Final = "this model has no chat template: use completions with a text prompt"


class PromptEncoder:
    """Turns prompts into token ids for one model. Raises `TemplateUnusable` if its chat template is broken."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._template = _compile(model)
        self._controls = ControlSplitter(model.control_texts)

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def encode(self, prompt: Prompt, *, created: float) -> list[int]:
        """Token ids of `prompt`, at least one and fewer than the context. Raises `MeshError`."""
        match prompt:
            case TextPrompt(text):
                self._check_texts(text, param="prompt")
                tokens, param = (self._model.tokenize_raw(text) if text else []), "prompt"
            case ChatPrompt(messages):
                tokens, param = (self._encode_chat(messages, created=created) if messages else []), "messages"
            case TokenPrompt(ids):
                tokens, param = self._check_ids(ids), "prompt"
            case InfillPrompt(prefix, suffix):
                tokens, param = self._encode_infill(prefix, suffix), "prompt"
            case EmbeddingPrompt():
                raise MeshError(ErrorCode.UNSUPPORTED_PARAMETER, _NO_EMBEDDINGS, param="model")
        if not tokens:
            raise MeshError(ErrorCode.INVALID_VALUE, "the prompt is empty", param=param)
        if len(tokens) >= self._model.context:
            raise self._too_long(str(len(tokens)), param=param)
        return tokens

    def _encode_chat(self, messages: tuple[dict[str, Any], ...], *, created: float) -> list[int]:
        if self._template is None:
            raise MeshError(ErrorCode.TEMPLATE_REFUSED, _NO_TEMPLATE, param="messages")
        written = list(_strings(messages, values_max=self._model.limits.conversation_values_max))
        # Before anything else is done with them. The template may leave some out, and write much between them.
        self._check_texts(*written, param="messages")
        mark = _unused_mark(written)
        rendered = self._template.render(self._controls.split(messages, mark), created=created)
        self._check_texts(rendered, param="messages")
        tokens = [token for part in rendered.split(mark) if part for token in self._model.tokenize_rendered(part)]
        begin = self._model.begin_token
        if self._model.wants_begin_token and begin >= 0 and tokens[:1] != [begin]:
            tokens.insert(0, begin)
        return tokens

    def _check_ids(self, ids: Sequence[int]) -> list[int]:
        size = len(self._model.pieces)
        if any(token >= size for token in ids):
            reason = f"the prompt has a token that is not in this model's vocabulary of {size} tokens"
            raise MeshError(ErrorCode.INVALID_VALUE, reason, param="prompt")
        return list(ids)

    def _encode_infill(self, prefix: str, suffix: str) -> list[int]:
        """Prefix, suffix, then what is to be said, as llama-server's infill has it (`format_prompt_infill`)."""
        marks = self._model.infill
        if marks is None:
            raise MeshError(ErrorCode.UNSUPPORTED_PARAMETER, _NO_INFILL, param="suffix")
        self._check_texts(prefix, suffix, param="prompt")
        begin = [self._model.begin_token] if self._model.wants_begin_token else []
        before, after = self._model.tokenize_plain(prefix), self._model.tokenize_plain(suffix)
        return [*begin, marks.prefix, *before, marks.suffix, *after, marks.middle]

    def _check_texts(self, *texts: str, param: str) -> None:
        model = self._model
        check_texts(texts, limits=model.limits, context=model.context, param=param, what=_NAMES[param])

    def _too_long(self, tokens: str, *, param: str) -> MeshError:
        limit = self._model.context
        return MeshError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"the prompt has {tokens} tokens; this model's context is {limit} tokens for prompt and completion "
            "(engine.context)",
            param=param,
        )


def _compile(model: LoadedModel) -> ChatTemplate | None:
    if not model.chat_template:
        return None
    begin, end = model.control_text(model.begin_token), model.control_text(model.end_token)
    return ChatTemplate(model.chat_template, bos_token=begin, eos_token=end, limits=model.limits)


def _unused_mark(texts: Iterable[str]) -> str:
    used: set[str] = set().union(*texts)
    for mark in _MARKS:
        if mark not in used:
            return mark
    raise MeshError(ErrorCode.INVALID_VALUE, "the messages hold every Unicode noncharacter", param="messages")


def _strings(messages: Sequence[Any], *, values_max: int) -> Iterator[str]:
    """All texts in the messages, also the names in mappings. Raises `MeshError` for too many values."""
    waiting: list[Any] = [messages]
    seen = 0
    while waiting:
        value = waiting.pop()
        seen += 1
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            yield from value
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        if seen + len(waiting) > values_max:
            reason = f"the conversation has more than {values_max} texts, numbers, lists and mappings"
            named = f"{reason} (engine.limits.conversation_values_max)"
            raise MeshError(ErrorCode.INVALID_VALUE, named, param="messages")


__all__ = ["PromptEncoder", "TemplateUnusable"]
