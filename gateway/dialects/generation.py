"""What the bodies of chat and plain completions have in common: how tokens are drawn, and when that ends.

The names are OpenAI's, and for what OpenAI does not have those of llama-server and vLLM. Every field may be null, which
means the same as absent. The bounds are those of `schemas.sampling`: what is accepted here makes a valid job.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw

from gateway.dialects.inner import SEED_MAX, SEED_MIN, TOKENS_UNBOUNDED, fold_seed
from gateway.dialects.refusal import check_bytes, invalid
from gateway.dialects.structured import StructuredBody, read_grammar
from gateway.settings import Limits
from schemas.sampling import CHOICES_MAX, GRAMMAR_PARAM, REPEAT_PENALTY_MIN, Dry, Sampling

INT32_MAX: Final = 2**31 - 1
WINDOW_TOKENS_MAX: Final = 2**20
"""Tokens that penalties may look back on. More than any model's context: -1, all of it, becomes this."""

TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
TokenCount = Annotated[int, Meta(ge=1, le=INT32_MAX)]
Window = Annotated[int, Meta(ge=-1, le=WINDOW_TOKENS_MAX)]
Unit = Annotated[float, Meta(ge=0.0, le=1.0)]
PositiveUnit = Annotated[float, Meta(gt=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
RepeatPenalty = Annotated[float, Meta(ge=REPEAT_PENALTY_MIN, le=10.0)]


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None


class GenerationBody(StructuredBody, frozen=True):
    """The fields of both. `repeat_penalty` is llama-server's name and `repetition_penalty` vLLM's for the same."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenCount | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    seed: int | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: PositiveUnit | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    min_p: Unit | None = None
    typical_p: PositiveUnit | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repeat_penalty: RepeatPenalty | None = None
    repetition_penalty: RepeatPenalty | None = None
    repeat_last_n: Window | None = None
    dry_multiplier: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    dry_base: Annotated[float, Meta(ge=1.0, le=100.0)] | None = None
    dry_allowed_length: Annotated[int, Meta(ge=0, le=WINDOW_TOKENS_MAX)] | None = None
    dry_penalty_last_n: Window | None = None
    dry_sequence_breakers: list[str] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100.0, le=100.0)]] | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    user: str | None = None

    # Accepted only with a value that changes nothing: see `neutral`.
    min_tokens: int | None = None
    stop_token_ids: list[Raw] | None = None
    guided_whitespace_pattern: Any = None
    regex: Any = None
    allowed_token_ids: Any = None
    bad_words: list[Raw] | None = None
    length_penalty: float | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    use_beam_search: bool | None = None
    dynatemp_range: float | None = None
    mirostat: int | None = None
    samplers: Any = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None


_TAKEN_AS_THEY_ARE: Final = (
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "frequency_penalty",
    "presence_penalty",
    "ignore_eos",
)


def read_sampling(
    body: GenerationBody, *, max_tokens: int | None, logprobs: int | None, limits: Limits
) -> tuple[Sampling, bool]:
    """How to draw, and whether the client chose the seed. Raises `MeshError` naming the parameter at fault.

    Empty stop strings are ignored. `top_k` -1 is 0, off. A window of -1 tokens is all of the context.
    """
    given = {name: value for name in _TAKEN_AS_THEY_ARE if (value := getattr(body, name)) is not None}
    grammar_param, grammar = read_grammar(body, limits=limits) or (GRAMMAR_PARAM, None)
    sampling = Sampling(
        max_tokens=TOKENS_UNBOUNDED if max_tokens is None else max_tokens,
        seed=0 if body.seed is None else _seed(body.seed),
        top_k=max(body.top_k or 0, 0),
        repeat_penalty=_repeat_penalty(body),
        dry=_dry(body, limits),
        logit_bias=_logit_bias(body.logit_bias or {}, limits),
        stop=_stop(body.stop, limits),
        grammar=grammar,
        grammar_param=grammar_param,
        logprobs=logprobs,
        choices=body.n or 1,
        **given,
    )
    if body.repeat_last_n is not None:
        window = WINDOW_TOKENS_MAX if body.repeat_last_n == -1 else body.repeat_last_n
        sampling = msgspec.structs.replace(sampling, penalty_last_n=window)
    return sampling, body.seed is not None


def read_streaming(body: GenerationBody) -> tuple[bool, bool]:
    """Whether the answer is streamed, and whether its usage is told. Raises `MeshError`."""
    stream = body.stream is True
    if body.stream_options is not None and not stream:
        raise invalid("stream_options", "it is only allowed when 'stream' is true")
    return stream, body.stream_options is not None and body.stream_options.include_usage is True


def _seed(seed: int) -> int:
    if not SEED_MIN <= seed <= SEED_MAX:
        raise invalid("seed", "expected a 64-bit integer")
    return fold_seed(seed)


def _repeat_penalty(body: GenerationBody) -> float:
    first, second = body.repeat_penalty, body.repetition_penalty
    if first is not None and second is not None and first != second:
        raise invalid("repetition_penalty", "it says something else than 'repeat_penalty', which means the same")
    return first if first is not None else second if second is not None else 1.0


def _dry(body: GenerationBody, limits: Limits) -> Dry | None:
    """DRY as llama-server takes it: off with a multiplier or a window of 0, whatever the other parameters say."""
    breakers = body.dry_sequence_breakers
    if breakers is not None:
        if len(breakers) > limits.dry_breakers_max:
            reason = f"at most {limits.dry_breakers_max} are allowed, got {len(breakers)} (limits.dry_breakers_max)"
            raise invalid("dry_sequence_breakers", reason)
        for index, text in enumerate(breakers):
            check_bytes(f"dry_sequence_breakers[{index}]", text, limits.stop_bytes_max, "stop_bytes_max")
    if not body.dry_multiplier or body.dry_penalty_last_n == 0:
        return None
    dry = Dry(multiplier=body.dry_multiplier)
    return Dry(
        multiplier=dry.multiplier,
        base=dry.base if body.dry_base is None else body.dry_base,
        allowed_length=dry.allowed_length if body.dry_allowed_length is None else body.dry_allowed_length,
        last_n=max(body.dry_penalty_last_n or 0, 0),
        breakers=dry.breakers if breakers is None else tuple(text for text in breakers if text),
    )


def _logit_bias(biases: dict[str, float], limits: Limits) -> tuple[tuple[int, float], ...]:
    if len(biases) > limits.logit_bias_max:
        reason = f"at most {limits.logit_bias_max} tokens are allowed, got {len(biases)} (limits.logit_bias_max)"
        raise invalid("logit_bias", reason)
    for key in biases:
        # Only as Python writes them: "01" beside "1" would be two biases of one token.
        if not (
            key.isascii() and key.isdecimal() and len(key) <= 10 and key == str(int(key)) and int(key) <= INT32_MAX
        ):
            raise invalid("logit_bias", 'expected token ids as keys, such as "1234"')
    return tuple((int(key), bias) for key, bias in biases.items())


def _stop(stop: str | list[str] | None, limits: Limits) -> tuple[str, ...]:
    if not stop:
        return ()
    if isinstance(stop, str):
        check_bytes("stop", stop, limits.stop_bytes_max, "stop_bytes_max")
        return (stop,)
    if len(stop) > limits.stop_max:
        raise invalid("stop", f"at most {limits.stop_max} stop strings are allowed, got {len(stop)} (limits.stop_max)")
    for index, text in enumerate(stop):
        check_bytes(f"stop[{index}]", text, limits.stop_bytes_max, "stop_bytes_max")
    return tuple(text for text in stop if text)
