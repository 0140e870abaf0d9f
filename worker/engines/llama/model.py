"""A loaded model and its vocabulary."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from worker.engines.base import LoadError
from worker.engines.llama import binding
from worker.engines.llama.logs import LogCapture
from worker.engines.llama.settings import CONTEXT_DEFAULT_MAX, LlamaSettings

GGUF_MAGIC: Final = b"GGUF"
_PROGRESS_STEP: Final = 0.01


class LoadedModel:
    """The weights and the vocabulary, read-only. Raises `LoadError` if the file cannot serve.

    `pieces`: the bytes of each token id; empty for control tokens, which are never part of an answer's text.
    `control_texts`: how control tokens look when written out. `longest_token`: the most bytes of text one token takes.
    """

    def __init__(self, settings: LlamaSettings, *, progress: Callable[[str, float], None], log: LogCapture) -> None:
        self.handle = _load(settings, progress=progress, log=log)
        try:
            self.context = _choose_context(settings, trained=binding.trained_context(self.handle))
            self._read_vocabulary(progress)
        except BaseException:
            self.close()
            raise

    def _read_vocabulary(self, progress: Callable[[str, float], None]) -> None:
        if not binding.is_plain_decoder(self.handle):
            raise LoadError("the model does not generate text by decoding alone: choose a decoder-only language model")
        progress("reading the vocabulary", 0.0)
        ids = range(binding.vocabulary_size(self.handle))
        if not ids:
            raise LoadError("the model file has no vocabulary: it cannot turn text into tokens")
        self.pieces = [binding.token_piece(self.handle, token, special=False) for token in ids]
        self.control_texts = frozenset(
            self.control_text(token) for token in ids if binding.is_control(self.handle, token)
        ) - {""}
        self.longest_token = max(1, *map(len, self.pieces), *(len(text.encode()) for text in self.control_texts))
        self.begin_token, self.end_token = binding.begin_and_end_tokens(self.handle)
        self.wants_begin_token = binding.wants_begin_token(self.handle)
        self.chat_template = binding.metadata_text(self.handle, "tokenizer.chat_template")
        progress("reading the vocabulary", 1.0)

    def control_text(self, token: int) -> str:
        """How a token looks when written out, control tokens too; empty for the negative id of a missing token."""
        return "" if token < 0 else binding.token_piece(self.handle, token, special=True).decode("utf-8", "replace")

    def ends_generation(self, token: int) -> bool:
        """Whether the model ends its answer with this token."""
        return binding.is_end_of_generation(self.handle, token)

    def tokenize_raw(self, text: str) -> list[int]:
        """Tokens of a raw prompt: special ones are added as the model wants them, and none is read from the text."""
        return binding.tokenize(self.handle, text.encode(), add_special=True, parse_special=False)

    def tokenize_rendered(self, text: str) -> list[int]:
        """Tokens of a part of a rendered chat template, which writes its special tokens out."""
        return binding.tokenize(self.handle, text.encode(), add_special=False, parse_special=True)

    def close(self) -> None:
        """Free the weights. Not used afterwards."""
        binding.free_model(self.handle)


def _load(settings: LlamaSettings, *, progress: Callable[[str, float], None], log: LogCapture) -> binding.Model:
    _check_file(settings.model)
    reported = -1.0

    def report(fraction: float) -> None:
        nonlocal reported
        if fraction - reported >= _PROGRESS_STEP or fraction >= 1.0:
            reported = fraction
            progress("loading the model", fraction)

    log.forget()
    handle = binding.load_model(
        str(settings.model),
        gpu_layers=-1 if settings.gpu_layers is None else settings.gpu_layers,
        mmap=settings.mmap,
        use_extra_bufts=settings.use_extra_bufts,
        on_progress=report,
    )
    if handle is None:
        reason = _without_paths(log.first_complaint()) or "llama.cpp gave no reason"
        raise LoadError(f"the model file {settings.model.name} cannot be loaded (incomplete or unknown?): {reason}")
    return handle


def _check_file(path: Path) -> None:
    """Refuse what is no GGUF file, in words llama.cpp does not have."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise LoadError(f"the model file {path.name} cannot be read: {reason}") from None
    if magic != GGUF_MAGIC:
        raise LoadError(f"the model file {path.name} is not a GGUF file: llama.cpp serves GGUF models only")


def _choose_context(settings: LlamaSettings, *, trained: int) -> int:
    if settings.context is None:
        return min(trained, CONTEXT_DEFAULT_MAX)
    if settings.context > trained:
        raise LoadError(f"a context of {settings.context} tokens exceeds the {trained} the model was trained with")
    return settings.context


def _without_paths(text: str) -> str:
    """`text` with file names in place of paths: reasons travel to operators of other machines."""
    return re.sub(r"(?:/[^/\s'\"]+)+/", "", text)
