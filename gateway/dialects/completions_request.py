"""The body of `POST /v1/completions`, OpenAI's older API for text without roles, to the inner request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from gateway.dialects.generation import INT32_MAX, GenerationBody, TokenId, read_sampling, read_streaming
from gateway.dialects.inner import InnerRequest
from gateway.dialects.json_body import BodyDecoder
from gateway.dialects.refusal import invalid, read_model, unsupported
from gateway.dialects.unsupported import GENERATION_NEUTRAL, UnsupportedParameters
from gateway.settings import Limits
from schemas.job import InfillPrompt, Prompt, TextPrompt, TokenPrompt

MAX_TOKENS_DEFAULT: Final = 16
"""OpenAI's own."""
LOGPROBS_MAX: Final = 5
"""Alternatives per token, OpenAI's own bound of this older API."""


class CompletionBody(GenerationBody, frozen=True):
    """`POST /v1/completions`. A list as `prompt` is one prompt of token ids, or a list of prompts."""

    prompt: str | list[str | TokenId | list[TokenId]] | None = None
    suffix: str | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None


class CompletionRequest(InnerRequest, frozen=True, kw_only=True):
    """`echoed` has for each prompt what is repeated before the text of its choices. Empty: nothing is, or the engine
    tells it (`Sampling.prompt_logprobs`)."""

    echoed: tuple[str, ...] = ()


_decode: Final = BodyDecoder(CompletionBody)
_without_effect: Final = UnsupportedParameters(GENERATION_NEUTRAL)


def parse_completion(body: bytes, *, limits: Limits) -> CompletionRequest:
    """The request in `body`. Raises `MeshError` with a 400 code and the parameter's path.

    Prompts are texts or lists of token ids, not both in one request. An empty `suffix` is none. `max_tokens` is 16
    where the client names no bound, and 0 only with `echo`. What `echo` shows of a prompt is its text as it was sent;
    with `logprobs`, and where the prompt came as token ids, the text of the tokens that the engine read. `user` and
    unknown parameters are ignored.
    """
    asked = _decode(body, limits=limits)
    model = read_model(asked.model)
    _without_effect.refuse(asked)
    stream, include_usage = read_streaming(asked)
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise unsupported("best_of", "all choices are returned; leave it out, or say the same as 'n'")
    first, *further = _prompts(asked, limits)
    prompts = (first, *further)
    sampling, seeded = read_sampling(asked, max_tokens=_max_tokens(asked), logprobs=asked.logprobs, limits=limits)
    prompt_logprobs = _prompt_logprobs(asked, prompts) if asked.echo else None
    return CompletionRequest(
        model=model,
        prompt=first,
        further=tuple(further),
        sampling=msgspec.structs.replace(sampling, prompt_logprobs=prompt_logprobs),
        seeded=seeded,
        stream=stream,
        include_usage=include_usage,
        echoed=tuple(map(_text_of, prompts)) if asked.echo and prompt_logprobs is None else (),
    )


def _max_tokens(asked: CompletionBody) -> int:
    if asked.max_tokens == 0 and not asked.echo:
        raise invalid("max_tokens", "expected `int` >= 1, or 0 together with 'echo'")
    return MAX_TOKENS_DEFAULT if asked.max_tokens is None else asked.max_tokens


def _prompts(asked: CompletionBody, limits: Limits) -> list[Prompt]:
    """At least one."""
    prompts = _read_prompts(asked.prompt, limits)
    if not asked.suffix:
        return prompts
    (first, *further) = prompts
    if further or not isinstance(first, TextPrompt):
        raise unsupported("suffix", "it needs one prompt of text")
    return [InfillPrompt(prefix=first.text, suffix=asked.suffix)]


def _read_prompts(given: str | list[str | int | list[int]] | None, limits: Limits) -> list[Prompt]:
    if isinstance(given, str):
        return [TextPrompt(text=given)]
    if not given:
        raise invalid("prompt", "expected a text, or the ids of at least one token")
    if len({type(item) for item in given}) > 1:
        raise invalid("prompt", "expected only texts, only token ids, or only lists of token ids")
    ids = tuple(item for item in given if isinstance(item, int))
    if ids:
        return [TokenPrompt(ids=ids)]
    if len(given) > limits.prompts_max:
        reason = f"at most {limits.prompts_max} prompts are allowed, got {len(given)} (limits.prompts_max)"
        raise invalid("prompt", reason)
    return [_item(item, index) for index, item in enumerate(given) if not isinstance(item, int)]


def _item(item: str | list[int], index: int) -> Prompt:
    if isinstance(item, str):
        return TextPrompt(text=item)
    if not item:
        raise invalid(f"prompt[{index}]", "expected the ids of at least one token")
    return TokenPrompt(ids=tuple(item))


def _prompt_logprobs(asked: CompletionBody, prompts: Sequence[Prompt]) -> int | None:
    """What the engine has to tell of an echoed prompt; None: its text is known."""
    if asked.logprobs is None:
        return 0 if isinstance(prompts[0], TokenPrompt) else None
    if isinstance(prompts[0], InfillPrompt):
        raise unsupported(
            "echo", "with 'suffix' there are no likelihoods of the prompt; leave out 'logprobs' or 'echo'"
        )
    return asked.logprobs


def _text_of(prompt: Prompt) -> str:
    match prompt:
        case InfillPrompt(prefix):
            return prefix
        case TextPrompt(text):
            return text
        case _:
            raise AssertionError("the text of other prompts is the engine's to tell")
