"""Parameters that clients know from elsewhere and that have no effect here."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Final

import msgspec

from gateway.dialects.refusal import unsupported

Neutral = Mapping[str, tuple[object, ...]]

GENERATION_NEUTRAL: Final[Neutral] = {
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "guided_whitespace_pattern": (),
    "regex": (),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "length_penalty": (1.0,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "dynatemp_range": (0.0,),
    "mirostat": (0,),
    "samplers": (),
    "top_n_sigma": (0.0, -1.0),
    "xtc_probability": (0.0,),
}
"""Of chat and plain completions alike: extensions of other servers (vLLM's and SGLang's first, then llama-server's)."""


class UnsupportedParameters:
    """Refuses parameters, except with the values that ask for no effect.

    A parameter accepted and ignored is a wrong answer that looks right.
    """

    def __init__(self, neutral: Neutral) -> None:
        """`neutral`: per parameter, which is a field of the body, the values that are accepted beside null."""
        self._neutral = neutral
        self._values_of = attrgetter(*neutral)

    def refuse(self, body: msgspec.Struct) -> None:
        """Raise `MeshError` (`unsupported_parameter`) for the first parameter that asks for an effect."""
        for (name, neutral), value in zip(self._neutral.items(), self._values_of(body), strict=True):
            if value is not None and value not in neutral:
                raise unsupported(name, "with this value it has no effect on this server; leave it out")
