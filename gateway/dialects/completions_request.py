"""The body of `POST /v1/completions`, OpenAI's older API for text without roles, to the inner request."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from gateway.dialects.generation import INT32_MAX, GenerationBody, read_sampling, read_streaming
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

TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]


class CompletionBody(GenerationBody, frozen=True):
    """`POST /v1/completions`. A list as `prompt` is one prompt of token ids, or a list of prompts."""

    prompt: str | list[str | TokenId | list[TokenId]] | None = None
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None


class CompletionRequest(InnerRequest, frozen=True, kw_only=True):
    """`echoed` is repeated before the text of every choice."""

    echoed: str = ""


_decode: Final = BodyDecoder(CompletionBody)
_without_effect: Final = UnsupportedParameters(GENERATION_NEUTRAL)


def parse_completion(body: bytes, *, limits: Limits) -> CompletionRequest:
    """The request in `body`. Raises `MeshError` with a 400 code and the parameter's path.

    One prompt per request: text, or token ids. An empty `suffix` is none. `echo` needs a prompt of text, and has no
    likelihoods. `max_tokens` is 16 where the client names no bound. `user` and unknown parameters are ignored.
    """
    asked = _decode(body, limits=limits)
    model = read_model(asked.model)
    _without_effect.refuse(asked)
    stream, include_usage = read_streaming(asked)
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise unsupported("best_of", "all choices are returned; leave it out, or say the same as 'n'")
    prompt = _prompt(asked)
    max_tokens = MAX_TOKENS_DEFAULT if asked.max_tokens is None else asked.max_tokens
    sampling, seeded = read_sampling(asked, max_tokens=max_tokens, logprobs=asked.logprobs, limits=limits)
    return CompletionRequest(
        model=model,
        prompt=prompt,
        sampling=sampling,
        seeded=seeded,
        stream=stream,
        include_usage=include_usage,
        echoed=_echoed(prompt, asked.logprobs) if asked.echo else "",
    )


def _prompt(asked: CompletionBody) -> Prompt:
    prompt = _single(asked.prompt)
    if not asked.suffix:
        return prompt
    if not isinstance(prompt, TextPrompt):
        raise unsupported("suffix", "it needs a prompt of text")
    return InfillPrompt(prefix=prompt.text, suffix=asked.suffix)


def _single(given: str | list[str | int | list[int]] | None) -> TextPrompt | TokenPrompt:
    """The one prompt in `given`."""
    if isinstance(given, str):
        return TextPrompt(text=given)
    if not given:
        raise invalid("prompt", "expected a text, or the ids of at least one token")
    ids = tuple(item for item in given if isinstance(item, int))
    if len(ids) == len(given):
        return TokenPrompt(ids=ids)
    if len(given) > 1:
        raise unsupported("prompt", "one prompt is answered per request; send one request for each")
    (only,) = given
    if isinstance(only, str):
        return TextPrompt(text=only)
    assert isinstance(only, list)
    if not only:
        raise invalid("prompt[0]", "expected the ids of at least one token")
    return TokenPrompt(ids=tuple(only))


def _echoed(prompt: Prompt, logprobs: int | None) -> str:
    if logprobs is not None:
        raise unsupported("echo", "there are no likelihoods of the prompt; leave out 'logprobs' or 'echo'")
    match prompt:
        case TextPrompt(text):
            return text
        case InfillPrompt(prefix):
            return prefix
        case _:
            raise unsupported("echo", "it needs a prompt of text")
