"""Names for the beginnings of a prompt, by which a replica that has computed one of them can be found. Pure.

The text is cut into blocks; the hash of a block covers it and everything before it, so two prompts share exactly the
names of the blocks that they have in common from the start.

Workers tell everybody on the bus for which names they hold cells. Who could compute a name could try out which texts
were asked, so names are keyed with a salt of two parts: a secret of the gateway, without which nobody can compute any,
and the caller, so that different callers never share one. The caller alone would not do: an address, or a key that is
the same everywhere, can be guessed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final

import msgspec

from schemas.job import PREFIX_HASHES_MAX, ChatPrompt, EmbeddingPrompt, InfillPrompt, Prompt, TextPrompt, TokenPrompt

BLOCK_BYTES: Final = 256
"""Bytes of text per block: some 60 tokens. What does not fill a block has no name."""
HASH_BYTES: Final = 8
SALT_BYTES: Final = 32


def caller_salt(caller: str, *, secret: bytes) -> bytes:
    """The salt of `caller`'s names, which tells of neither. `secret`: 16 to 64 bytes that nobody else knows."""
    return hashlib.blake2b(caller.encode(), digest_size=SALT_BYTES, key=secret).digest()


def prefix_hashes(prompt: Prompt, *, salt: bytes) -> tuple[str, ...]:
    """The chained hashes of `prompt`'s first blocks, at most `PREFIX_HASHES_MAX`, each 16 hexadecimal digits.

    `salt`: at most 64 bytes. Embeddings have none: nothing of them is kept. Nor has what an engine will refuse, because
    it is not text (lone surrogates).
    """
    try:
        text = b"".join(_limited(_pieces(prompt), bytes_max=BLOCK_BYTES * PREFIX_HASHES_MAX))
    except UnicodeEncodeError:
        return ()
    hashes: list[str] = []
    previous = b""
    for start in range(0, len(text) - BLOCK_BYTES + 1, BLOCK_BYTES):
        block = previous + text[start : start + BLOCK_BYTES]
        previous = hashlib.blake2b(block, digest_size=HASH_BYTES, key=salt).digest()
        hashes.append(previous.hex())
    return tuple(hashes)


def _limited(pieces: Iterator[bytes], *, bytes_max: int) -> Iterator[bytes]:
    room = bytes_max
    for piece in pieces:
        yield piece[:room]
        room -= len(piece)
        if room <= 0:
            return


def _pieces(prompt: Prompt) -> Iterator[bytes]:
    """What the model gets to read, in order, in a form that no two different prompts share."""
    match prompt:
        case ChatPrompt(messages):
            for message in messages:
                yield msgspec.json.encode(message, order="deterministic")
        case TextPrompt(text):
            yield b"text:"
            yield text.encode()
        case TokenPrompt(ids):
            yield b"ids:"
            yield msgspec.json.encode(ids)
        case InfillPrompt(prefix, suffix):
            yield b"infill:"
            yield msgspec.json.encode([prefix, suffix])
        case EmbeddingPrompt():
            return
