"""Addresses of the bus as people write them."""

from __future__ import annotations

import pytest

from bus.addresses import InvalidAddress, servers_in


@pytest.mark.parametrize(
    "url, servers",
    [
        ("nats://127.0.0.1:4222", ["nats://127.0.0.1:4222"]),
        ("bus.example", ["bus.example"]),
        ("nats://a:1, tls://b/", ["nats://a:1", "tls://b/"]),
        ("[::1]:4222,nats://[::1]", ["[::1]:4222", "nats://[::1]"]),
    ],
)
def test_what_names_servers(url: str, servers: list[str]) -> None:
    assert servers_in(url) == servers


@pytest.mark.parametrize(
    "url, named, reason",
    [
        ("foo:bar", "'foo:bar'", "port is no number from 1 to 65535"),
        ("nats://127.0.0.1:99999", "'nats://127.0.0.1:99999'", "port is no number"),
        ("h:0", "'h:0'", "port is no number"),
        ("nats://", "'nats://'", "names no host"),
        ("nats://:4222", "'nats://:4222'", "names no host"),
        ("none", "'none'", "names no host"),
        ("", "''", "it is empty"),
        (" ", "' '", "it is empty"),
        ("nats://h:1,", "'nats://h:1,'", "a comma too many"),
        (",", "','", "a comma too many"),
        ("nats://h:1,foo:bar", "'foo:bar'", "port is no number"),
        ("::1", "'::1'", "in brackets"),
        ("nats://[::1", "'nats://[::1'", "host is none"),
        ("http://h:1", "'http://h:1'", "scheme is none of nats, tls"),
        ("NATS://h:1", "'NATS://h:1'", "scheme is none"),
        ("nats//h:1", "'nats//h:1'", "more than a host and a port"),
        ("h 1", "'h 1'", "more than a host and a port"),
        ("h\n1", r"'h\n1'", "more than a host and a port"),
        ("h:" + "1" * 1_000, "'h:" + "1" * 78 + "'", "port is no number"),
    ],
)
def test_what_names_none_is_said_with_the_reason(url: str, named: str, reason: str) -> None:
    with pytest.raises(InvalidAddress) as caught:
        servers_in(url)
    said = str(caught.value)
    assert said.startswith(f"{named} is no address of a NATS server, ")
    assert reason in said
    assert "\n" not in said


@pytest.mark.parametrize("url", ["nats://me:hidden@h:1", "nats://me:hid,hidden@h:1", "hidden@h", "nats://me:x@hidden"])
def test_a_password_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(InvalidAddress, match="a user or password has no place") as caught:
        servers_in(url)
    assert "hid" not in str(caught.value)
