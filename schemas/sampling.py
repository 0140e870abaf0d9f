"""How a job's tokens are chosen, and what its answer must look like."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from schemas.ranges import NonNegative

CHOICES_MAX: Final = 8
"""Choices of one request (`n`): part of the protocol, which every engine has to keep. Its 400 has the number."""
PENALTY_LAST_N: Final = 64
"""Tokens on which penalties look back where nothing else is asked for, llama.cpp's own default."""
REPEAT_PENALTY_MIN: Final = 0.01
"""Logits are divided by it. Nobody wants less, and what single precision takes for 0 makes them no numbers."""
GRAMMAR_PARAM: Final = "response_format"
"""The parameter that demands a form of the answer, where a client uses OpenAI's own."""
TOP_LOGPROBS_MAX: Final = 20
"""Alternatives reported per token, OpenAI's own bound."""


class Dry(msgspec.Struct, frozen=True, omit_defaults=True):
    """ "Don't repeat yourself": a penalty on tokens that would prolong a repetition already there.

    The penalty is ``multiplier * base ** (length - allowed_length)`` for a repetition of `length` tokens, looked for in
    the last `last_n` tokens (0: all of the context). `breakers` are strings across which nothing counts as repeated.
    """

    multiplier: Annotated[float, Meta(gt=0.0, le=100.0)]
    base: Annotated[float, Meta(ge=1.0, le=100.0)] = 1.75
    allowed_length: Annotated[int, Meta(ge=0, le=2**20)] = 2
    last_n: Annotated[int, Meta(ge=0, le=2**20)] = 0
    breakers: tuple[str, ...] = ("\n", ":", '"', "*")


class JsonGrammar(msgspec.Struct, frozen=True, tag_field="kind", tag="json"):
    """The answer is one JSON object."""


class SchemaGrammar(msgspec.Struct, frozen=True, tag_field="kind", tag="schema"):
    """The answer is JSON that the JSON schema `schema` (as JSON text) accepts."""

    schema: str


class GbnfGrammar(msgspec.Struct, frozen=True, tag_field="kind", tag="gbnf"):
    """The answer is in the language of llama.cpp's grammar `text`, from its rule `root`."""

    text: str


class RegexGrammar(msgspec.Struct, frozen=True, tag_field="kind", tag="regex"):
    """The whole answer matches the regular expression `pattern`."""

    pattern: str


Grammar = JsonGrammar | SchemaGrammar | GbnfGrammar | RegexGrammar


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How tokens are drawn and when generation ends. Neutral values switch a filter or a penalty off.

    `seed` is always drawn before the job is published, so that every attempt draws the same tokens; choice number `i`
    draws with `seed + i` (modulo 2**32 - 1). `penalty_last_n` is the window of the three penalties in tokens.
    `logit_bias` has pairs of token id and what is added to its logit; -100 and below bans. `grammar_param`: the
    parameter of the client's that demands `grammar`, which a refusal names. `logprobs` None: none are wanted; else how
    many alternatives per token. `prompt_logprobs`: the same for the tokens of the prompt. `choices` (OpenAI's `n`)
    share the prompt. `max_tokens` 0: nothing is generated, and the choices end with the prompt, for `length`.
    """

    max_tokens: NonNegative
    seed: Annotated[int, Meta(ge=0, le=2**32 - 1)]
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 1.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: NonNegative = 0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    typical_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    repeat_penalty: Annotated[float, Meta(ge=REPEAT_PENALTY_MIN, le=10.0)] = 1.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    penalty_last_n: Annotated[int, Meta(ge=0, le=2**20)] = PENALTY_LAST_N
    dry: Dry | None = None
    logit_bias: tuple[tuple[NonNegative, Annotated[float, Meta(ge=-100.0, le=100.0)]], ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    grammar_param: str = GRAMMAR_PARAM
    logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    choices: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] = 1
