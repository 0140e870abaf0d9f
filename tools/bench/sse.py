"""Server-sent events from bytes (WHATWG HTML, section 9.2), incrementally. No I/O."""

from __future__ import annotations

from typing import Final

from tools.bench.http1 import MalformedAnswer

EVENT_BYTES_MAX: Final = 1024 * 1024


class EventSplitter:
    """Cuts a byte stream, in pieces of any size, into the `data` payloads of its events.

    Comments and other fields are skipped. Lines end in LF or CRLF; a lone CR, legal but unused, is not a line end here.
    """

    def __init__(self) -> None:
        self._rest = b""

    @property
    def unfinished(self) -> bool:
        """Whether bytes of an event came whose closing blank line has not."""
        return bool(self._rest.strip())

    def feed(self, piece: bytes) -> list[bytes]:
        """Payloads of the events that `piece` completes. Raises `MalformedAnswer` past `EVENT_BYTES_MAX`."""
        data = self._rest + piece
        if b"\r" in data:
            # A CR at the very end stays in the rest until its LF comes.
            data = data.replace(b"\r\n", b"\n")
        blocks = data.split(b"\n\n")
        self._rest = blocks.pop()
        if len(self._rest) > EVENT_BYTES_MAX:
            raise MalformedAnswer(f"event over {EVENT_BYTES_MAX} bytes")
        payloads: list[bytes] = []
        for block in blocks:
            if block.startswith(b"data: ") and b"\n" not in block:
                payloads.append(block[6:])
            else:
                payloads.extend(_payload_of_lines(block))
        return payloads


def _payload_of_lines(block: bytes) -> list[bytes]:
    """The one payload of an event of several lines; none when it has no data."""
    values = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
    return [b"\n".join(values)] if values else []
