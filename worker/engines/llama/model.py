"""A loaded model and its vocabulary."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Final

from worker.engines.base import LoadError
from worker.engines.gguf_header import Header
from worker.engines.llama import binding
from worker.engines.llama.dry import Spelling
from worker.engines.llama.fit import (
    check_context,
    context_limit,
    estimate,
    inspect_file,
    makes_vectors,
    usual_context,
)
from worker.engines.llama.logs import LogCapture
from worker.engines.llama.lora import check_adapters, load_adapters
from worker.engines.llama.settings import LlamaSettings

_PROGRESS_STEP: Final = 0.01


class LoadedModel:
    """The weights and the vocabulary, read-only. Raises `LoadError` if the file cannot serve.

    `adapters`: LoRA adapters with their scales, to be applied in each context made from it.
    `pieces`: the bytes of each token id; empty for control tokens, which are never part of an answer's text.
    `control_texts`: how control tokens look when written out.
    `end_tokens` end an answer; `suppressed_tokens` are never drawn. `infill`: tokens for filling a gap, where the model
    has them. `pooling`: how it makes vectors of texts, where that is what it does; such a model generates nothing.
    `candidates`: room for sampling one token. `growth_bytes`: as in `Capabilities`. `limits`: what one request may ask
    of it.
    """

    def __init__(self, settings: LlamaSettings, *, progress: Callable[[str, float], None], log: LogCapture) -> None:
        self.limits = settings.limits
        header = inspect_file(settings.model)
        check_context(settings, header)
        check_adapters(settings.loras, header)
        self.handle = _load(settings, progress=progress, log=log)
        try:
            self.adapters = load_adapters(self.handle, settings.loras, log=log)
            self.context = settings.context or usual_context(context_limit(header))
            need = estimate(header, settings, context=self.context, weights=0)
            self.growth_bytes = need.growth(settings.slots)
            self._read_vocabulary(progress)
            self.pooling = _pooling(header)
            if self.pooling is binding.Pooling.MEAN and not binding.remembers_all_cells(self.handle):
                # llama.cpp's graphs of such models keep the last token only, and its check of that aborts.
                raise LoadError("the model pools by the mean and has recurrent memory: only cls and last are served")
        except BaseException:
            self.close()
            raise

    def _read_vocabulary(self, progress: Callable[[str, float], None]) -> None:
        if not binding.is_plain_decoder(self.handle):
            raise LoadError("the model does not compute by decoding alone: choose a decoder-only language model")
        progress("reading the vocabulary", 0.0)
        ids = range(binding.vocabulary_size(self.handle))
        if not ids:
            raise LoadError("the model file has no vocabulary: it cannot turn text into tokens")
        self.pieces = [binding.token_piece(self.handle, token, special=False) for token in ids]
        self.control_texts = frozenset(
            self.control_text(token) for token in ids if binding.is_control(self.handle, token)
        ) - {""}
        self.end_tokens = tuple(token for token in ids if binding.is_end_of_generation(self.handle, token))
        self._end_tokens = frozenset(self.end_tokens)
        self.suppressed_tokens = binding.suppressed_tokens(self.handle)
        self.infill = binding.infill_tokens(self.handle)
        self.candidates = binding.Candidates(len(ids))
        self.begin_token, self.end_token = binding.begin_and_end_tokens(self.handle)
        self.wants_begin_token = binding.wants_begin_token(self.handle)
        self.chat_template = binding.metadata_text(self.handle, "tokenizer.chat_template")
        progress("reading the vocabulary", 1.0)

    @functools.cached_property
    def spelling(self) -> Spelling:
        """How its tokens are spelled, control tokens too."""
        return Spelling([*self.pieces, *(text.encode() for text in self.control_texts)])

    def control_text(self, token: int) -> str:
        """How a token looks when written out, control tokens too; empty for the negative id of a missing token."""
        return "" if token < 0 else binding.token_piece(self.handle, token, special=True).decode("utf-8", "replace")

    def ends_generation(self, token: int) -> bool:
        """Whether the model ends its answer with this token."""
        return token in self._end_tokens

    def tokenize_raw(self, text: str) -> list[int]:
        """Tokens of a raw prompt: special ones are added as the model wants them, and none is read from the text."""
        return binding.tokenize(self.handle, text.encode(), add_special=True, parse_special=False)

    def tokenize_rendered(self, text: str) -> list[int]:
        """Tokens of a part of a rendered chat template, which writes its special tokens out."""
        return binding.tokenize(self.handle, text.encode(), add_special=False, parse_special=True)

    def tokenize_plain(self, text: str) -> list[int]:
        """Tokens of a text as it stands: no special ones are added, and none is read from it."""
        return binding.tokenize(self.handle, text.encode(), add_special=False, parse_special=False)

    def close(self) -> None:
        """Free the weights. Not used afterwards."""
        binding.free_model(self.handle)


def _load(settings: LlamaSettings, *, progress: Callable[[str, float], None], log: LogCapture) -> binding.Model:
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


def _pooling(header: Header) -> binding.Pooling | None:
    """How the model makes vectors of texts; None for one that generates. Raises `LoadError`."""
    if not makes_vectors(header):
        return None
    declared = int(header.of_model("pooling_type"))
    if declared == binding.Pooling.NONE:
        return binding.Pooling.MEAN
    if declared not in (binding.Pooling.MEAN, binding.Pooling.CLS, binding.Pooling.LAST):
        raise LoadError("the model ranks texts or pools in an unknown way: only mean, cls and last pooling are served")
    return binding.Pooling(declared)


def _without_paths(text: str) -> str:
    """`text` with file names in place of paths: reasons travel to operators of other machines."""
    return re.sub(r"(?:/[^/\s'\"]+)+/", "", text)
