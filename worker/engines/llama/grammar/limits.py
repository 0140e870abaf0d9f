"""Bounds on grammars, so that neither their translation nor llama.cpp's work with them can hold up other requests.

They are refused with a reason that has the bound in it. A translation within all of them takes a fraction of
`COMPILE_S`, which the tests hold.
"""

from __future__ import annotations

from typing import Final

COMPILE_S: Final = 0.1
"""Seconds that checking and translating one grammar may take on one core."""
SCHEMA_BYTES_MAX: Final = 262_144
"""UTF-8 bytes of a JSON schema."""
SCHEMA_NESTING_MAX: Final = 64
"""Levels of objects and arrays in a JSON schema."""
NUMBER_CHARS_MAX: Final = 100
"""Characters of one number in a JSON schema: arithmetic on whole numbers takes the square of their digits."""
EXPONENTS: Final = range(-324, 309)
"""Powers of ten of a number's first digit in a JSON schema: those of 64-bit floats, which readers of answers have."""
SCHEMA_WORK_MAX: Final = 4_000
"""Keywords, properties and values that are looked at to translate a schema, repeatedly where they are combined."""
ENUM_MAX: Final = 1_000
"""Values of one `enum`."""
ALTERNATIVES_MAX: Final = 100
"""Alternatives of one `anyOf` or `oneOf`."""
PATTERN_BYTES_MAX: Final = 8_192
"""UTF-8 bytes of a regular expression."""
GBNF_BYTES_MAX: Final = 131_072
"""UTF-8 bytes of a grammar, given or made."""
GROUPS_NESTED_MAX: Final = 64
"""Groups within groups in a grammar or a regular expression; llama.cpp's parser calls itself for each."""
REPETITIONS_MAX: Final = 2_000
"""Of one thing by a counted repetition, also as `minItems`, `maxItems`, `minLength` and `maxLength`; llama.cpp's own
bound, beyond which it would drop an upper limit without a word."""
ELEMENTS_MAX: Final = 200_000
"""Elements of a grammar once llama.cpp has written out its repetitions."""
WAYS_MAX: Final = 128
"""Places where a text can begin to match a rule. llama.cpp tries all tokens of the vocabulary at each: with 49,152
tokens, it took 7 ms for a usual schema, 18 for 10 optional members and 74 for 100, for each token that is drawn."""
STACKS_MAX: Final = 256
"""Ways to read one text that llama.cpp has to keep open at once."""
CHAIN_MAX: Final = 1_000
"""Rules that begin with each other in a row; llama.cpp calls itself for each."""
