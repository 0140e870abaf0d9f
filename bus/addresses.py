"""Addresses of NATS servers as people give them, checked before nats-py sees them: its errors are not for people."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

ADDRESS_SHOWN_MAX: Final = 80
"""Characters of a wrong address that its error repeats."""
_SCHEMES: Final = ("nats", "tls")


class InvalidAddress(ValueError):
    """What was given names no server. One line: which part of it, and what is wrong."""


def servers_in(url: str) -> list[str]:
    """The servers that `url` names, separated by commas.

    Raises `InvalidAddress`. What may be a user or a password is not repeated.
    """
    if "@" in url:
        raise InvalidAddress(
            "a user or password has no place in the address of the bus: who we are is in the credentials file"
        )
    servers = [server.strip() for server in url.split(",")]
    if not url.strip():
        raise _invalid(url, "it is empty")
    if "" in servers:
        raise _invalid(url, "it has a comma too many")
    for server in servers:
        if reason := _fault(server):
            raise _invalid(server, reason)
    return servers


def _invalid(address: str, reason: str) -> InvalidAddress:
    return InvalidAddress(
        f"{address[:ADDRESS_SHOWN_MAX]!r} is no address of a NATS server, {reason}: "
        "give nats://HOST:PORT, several separated by commas"
    )


def _fault(server: str) -> str | None:
    """What keeps nats-py from understanding `server` as we do; None if nothing does."""
    scheme, separator, rest = server.partition("://")
    if separator and scheme not in _SCHEMES:
        return f"its scheme is none of {', '.join(_SCHEMES)}"
    address = rest if separator else server
    if address.count(":") > 1 and "[" not in address:
        return "an IPv6 address stands in brackets ([::1])"
    try:
        parts = urlsplit(f"nats://{address}")
    except ValueError:
        return "its host is none"
    if parts.hostname in (None, "none"):  # nats-py takes the second for the first
        return "it names no host"
    if parts.path.strip("/") or parts.query or parts.fragment or address.split() != [address]:
        return "it is more than a host and a port"
    try:
        good = parts.port != 0
    except ValueError:
        good = False
    return None if good else "its port is no number from 1 to 65535"
