"""The client side of the NATS protocol, as far as it takes to lose single commands. Pure.

A connection's bytes from the client are lines ending in CR LF; `PUB subject [reply] size` and
`HPUB subject [reply] header-size size` are followed by `size` bytes and another CR LF
(https://docs.nats.io/reference/reference-protocols/nats-protocol).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

LINE_BYTES_MAX: Final = 4 * 1024
"""A longer control line is none that a client of ours sends (CONNECT apart, which is passed on as it comes)."""
_END: Final = b"\r\n"

Lost = Callable[[str, str], bool]
"""Whether the command `verb` on `subject` is to be lost."""


class ClientCommands:
    """Cuts one connection's bytes into whole commands and leaves out those that `lost` names."""

    def __init__(self, lost: Lost) -> None:
        self._lost = lost
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """The bytes to be passed on now; an unfinished command waits for its end."""
        buffer = self._rest + data
        passed: list[bytes] = []
        begin = 0
        while (end := _command_end(buffer, begin)) is not None:
            if not self._is_lost(buffer[begin : buffer.index(_END, begin)]):
                passed.append(buffer[begin:end])
            begin = end
        self._rest = buffer[begin:]
        return b"".join(passed)

    def _is_lost(self, line: bytes) -> bool:
        words = line[:LINE_BYTES_MAX].split()
        if len(words) < 2:
            return False
        return self._lost(words[0].decode("latin-1").upper(), words[1].decode("latin-1"))


def _command_end(buffer: bytes, begin: int) -> int | None:
    """Where the command that begins at `begin` ends, None while its end has not come."""
    line_end = buffer.find(_END, begin)
    if line_end < 0:
        return None
    end = line_end + len(_END)
    words = buffer[begin : min(line_end, begin + LINE_BYTES_MAX)].split()
    if words and words[0].upper() in (b"PUB", b"HPUB"):
        end += int(words[-1]) + len(_END)
    return end if end <= len(buffer) else None
