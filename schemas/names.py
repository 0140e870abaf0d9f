"""Names of the mesh's members, checked where they are minted and where they enter a subject.

A name becomes a token of NATS subjects, so a name such as ``*`` would carry the rights of every member.
"""

from __future__ import annotations

import re
from typing import Annotated, Final

from msgspec import Meta

NAME_PATTERN: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
RESERVED_NAMES: Final = frozenset({"any", "resume"})
_PATTERN: Final = rf"^(?!(?:{'|'.join(sorted(RESERVED_NAMES))})\Z){NAME_PATTERN.pattern}\Z"

CheckedName = Annotated[str, Meta(pattern=_PATTERN)]
"""A member's name as a field of a message: what is none is refused where the message is read."""
MODEL_ID_BYTES_MAX: Final = 128
"""Part of the protocol: every member of a mesh must take the same ids, and an id is a token of a subject."""


class InvalidName(ValueError):
    """A member name or model id that may not enter a subject. The text says what is allowed."""


def check_name(name: str, *, kind: str) -> str:
    """Return `name` if it may name a worker, gateway or operator, else raise `InvalidName`."""
    if not NAME_PATTERN.fullmatch(name):
        raise InvalidName(
            f"{kind} name {name[:80]!r} is not valid: use 1 to 63 of a-z, 0-9 and '-', beginning with a letter or digit"
        )
    if name in RESERVED_NAMES:
        raise InvalidName(f"{kind} name {name!r} is reserved: choose another one")
    return name


def is_name(text: str) -> bool:
    """Whether `text` may name a member: for names that come as a part of a subject."""
    return NAME_PATTERN.fullmatch(text) is not None and text not in RESERVED_NAMES


def check_model_id(model_id: str) -> str:
    """Return `model_id` if it may be a logical model id, else raise `InvalidName`.

    Any printable text of at most 128 UTF-8 bytes is one: the subject encoding takes care of the rest.
    """
    try:
        size = len(model_id.encode())
    except UnicodeEncodeError:
        raise InvalidName("model id is not valid: it holds a lone surrogate") from None
    if not 1 <= size <= MODEL_ID_BYTES_MAX:
        raise InvalidName(f"model id is not valid: it must have 1 to {MODEL_ID_BYTES_MAX} bytes, this one has {size}")
    if not model_id.isprintable():
        raise InvalidName("model id is not valid: it holds an unprintable character")
    return model_id
