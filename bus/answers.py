"""What JetStream answers to a publication or a request: done, or an error with the number that says which."""

from __future__ import annotations

import msgspec


class ApiError(msgspec.Struct, frozen=True):
    """Why not. `err_code` is JetStream's own number, `description` its words."""

    err_code: int = 0
    description: str = ""

    def __str__(self) -> str:
        return f"{self.description} ({self.err_code})"


class Answer(msgspec.Struct, frozen=True):
    """A PubAck, or the beginning of any other answer of JetStream's API. `seq` is 0 where there is none."""

    seq: int = 0
    error: ApiError | None = None


def read_answer(data: bytes) -> Answer:
    """The answer in a message from JetStream."""
    return msgspec.json.decode(data, type=Answer)
