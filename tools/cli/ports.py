"""Whether a port that nobody asked for can be had."""

from __future__ import annotations

import errno
import socket


def is_taken(port: int, *, host: str) -> bool:
    """Whether somebody listens on `port` at one of the addresses of `host` (empty: any).

    A `host` that is none of this machine's is for whoever listens there to complain of.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        return False
    return any(_in_use(family, address) for family, _, _, _, address in found)


def _in_use(family: int, address: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False
