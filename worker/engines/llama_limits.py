"""What one request may ask of the `llama` engine before its first step, while all others wait for that.

Each refusal names its bound as `--set` takes it: `(engine.limits.NAME)`. An upper end of a range is where a request
could take seconds, or where something that calls itself could run out of stack.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from schemas.ranges import Positive

Depth = Annotated[int, Meta(ge=1, le=64)]
"""Levels of something that calls itself for each: Python's stack has room for all of them at their largest together."""


class GrammarLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on grammars, so that neither their translation nor llama.cpp's work with them can hold up other requests.

    With the defaults, checking and translating takes a fraction of 0.1 s on one core.
    """

    schema_bytes_max: Annotated[int, Meta(ge=1, le=4_194_304)] = 262_144
    """UTF-8 bytes of a JSON schema."""
    schema_nesting_max: Depth = 64
    """Levels of objects and arrays in a JSON schema, references in a row, and values inside of each other."""
    number_chars_max: Annotated[int, Meta(ge=1, le=1_000)] = 100
    """Characters of one number in a JSON schema: arithmetic on whole numbers takes the square of their digits."""
    schema_work_max: Annotated[int, Meta(ge=1, le=40_000)] = 4_000
    """Keywords, properties and values that are looked at to translate a schema, repeatedly where they are combined."""
    enum_max: Positive = 1_000
    """Values of one `enum`."""
    alternatives_max: Positive = 100
    """Alternatives of one `anyOf` or `oneOf`."""
    exclusion_depth_max: Annotated[int, Meta(ge=1, le=8)] = 3
    """Members within members in which the alternatives of a `oneOf` are looked at for a difference."""
    name_chars_max: Annotated[int, Meta(ge=1, le=128)] = 128
    """Characters of a declared name in an object that allows others, which have to differ from it somewhere: a rule for
    each, inside of the one before it."""
    pattern_bytes_max: Annotated[int, Meta(ge=1, le=65_536)] = 8_192
    """UTF-8 bytes of a regular expression."""
    gbnf_bytes_max: Annotated[int, Meta(ge=1, le=1_048_576)] = 131_072
    """UTF-8 bytes of a grammar, given or made."""
    groups_nested_max: Depth = 64
    """Groups within groups in a grammar or a regular expression; llama.cpp's parser calls itself for each."""
    repetitions_max: Annotated[int, Meta(ge=128, le=2_000)] = 2_000
    """Of one thing by a counted repetition, also as `minItems`, `maxItems`, `minLength` and `maxLength`. 2,000 is
    llama.cpp's own bound, beyond which it would drop an upper limit without a word; formats of strings need 128."""
    elements_max: Annotated[int, Meta(ge=1, le=2_000_000)] = 200_000
    """Elements of a grammar once llama.cpp has written out its repetitions."""
    ways_max: Annotated[int, Meta(ge=1, le=1_024)] = 128
    """Places where a text can begin to match a rule. llama.cpp tries all tokens of the vocabulary at each: with 49,152
    tokens, it took 7 ms for a usual schema, 18 for 10 optional members and 74 for 100, for each token that is drawn."""
    stacks_max: Annotated[int, Meta(ge=1, le=2_048)] = 256
    """Ways to read one text that llama.cpp has to keep open at once."""
    paths_max: Annotated[int, Meta(ge=1, le=65_536)] = 2_048
    """Ways to read one token that llama.cpp tries one after the other before it refuses it."""
    chain_max: Annotated[int, Meta(ge=1, le=1_000)] = 1_000
    """Rules that begin with each other in a row; llama.cpp calls itself for each."""
    passes_max: Annotated[int, Meta(ge=2, le=100)] = 16
    """Passes over all rules to find which may be empty or be completed; grammars that people write need two or three.
    """
    visits_max: Annotated[int, Meta(ge=1, le=2_000_000)] = 200_000
    """Rules that llama.cpp's check for left recursion may walk through, again for each way that leads to them."""


class LlamaLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on what a request holds, beyond its context and those of the gateway."""

    text_bytes_max: Annotated[int, Meta(ge=1, le=1_572_864)] = 768 * 1024
    """UTF-8 bytes of text that is turned into tokens. llama.cpp takes 0.3 to 2.3 us of CPU time for each, the more the
    longer its words are."""
    text_bytes_per_token_max: Positive = 32
    """The same, for each token of the context. Tokens of usual text have 3 to 6 bytes, of indented code up to 12. It
    says nothing of a text's tokens: there are tokenizers that drop any number of blanks, and tokens of hundreds of
    bytes."""
    conversation_values_max: Annotated[int, Meta(ge=1, le=1_000_000)] = 65_536
    """Texts, numbers, lists and mappings in a conversation."""
    template_chars_max: Positive = 256 * 1024
    """Characters of the model's chat template itself, which is met at the start and not by a request."""
    template_render_s_max: Annotated[float, Meta(gt=0, le=4)] = 2.0
    """Seconds that the chat template may take for a conversation."""
    template_rendered_chars_max: Annotated[int, Meta(ge=1, le=134_217_728)] = 16 * 1024 * 1024
    """Characters of the text that the chat template makes, and of every text and list on the way to it."""
    template_items_max: Positive = 1_000_000
    """Items that one of the template's filters makes one by one."""
    template_product_bits_max: Annotated[int, Meta(ge=1, le=1_048_576)] = 4096
    """Bits of a product of whole numbers in the template: larger ones take ever longer in one go."""
    dry_breakers_max: Annotated[int, Meta(ge=1, le=64)] = 8
    """Sequence breakers of DRY."""
    dry_overlaps_max: Annotated[int, Meta(ge=1, le=16_384)] = 2_048
    """Tokens that end as the sequence breakers of a request begin, counted for each beginning."""
    dry_holders_max: Annotated[int, Meta(ge=1, le=1_048_576)] = 65_536
    """Tokens that hold the sequence breakers of a request, counted for each."""
    grammar: GrammarLimits = GrammarLimits()
    """Bounds on the forms that answers have to have."""
