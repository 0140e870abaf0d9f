"""Commands lost on their way to the bus, from bytes alone."""

from __future__ import annotations

import pytest

from tools.chaos.losses import FrameLoser, disconnect_subscription
from tools.chaos.wire import ClientCommands

CONNECT = b'CONNECT {"verbose":false}\r\n'
FIRST = b"PUB mesh.reply.g1.w1 5\r\nab\r\nc\r\n"
SECOND = b"PUB mesh.reply.g1.w1 _IB.w1.x 2\r\nde\r\n"
WITH_HEADERS = b"HPUB mesh.reply.g1.w1 12 14\r\nNATS/1.0\r\n\r\nfg\r\n"
OTHER = b"PUB mesh.beat.worker.w1 2\r\n{}\r\n"
EMPTY = b"PUB mesh.reply.g1.w1 0\r\n\r\n"


def passed(loser: FrameLoser, *commands: bytes, at_once: int = 1_000) -> bytes:
    """What comes through when `at_once` bytes are read at a time."""
    stream, wire = b"".join(commands), ClientCommands(loser)
    return b"".join(wire.feed(stream[place : place + at_once]) for place in range(0, len(stream), at_once))


@pytest.mark.parametrize("at_once", [1, 2, 3, 7, 1_000])
def test_bytes_pass_unchanged_however_they_are_cut(at_once: int) -> None:
    commands = (CONNECT, b"PING\r\n", FIRST, OTHER, WITH_HEADERS, EMPTY, b"SUB a  1\r\n")
    assert passed(FrameLoser(), *commands, at_once=at_once) == b"".join(commands)


@pytest.mark.parametrize("at_once", [1, 5, 1_000])
def test_one_message_with_frames_is_lost_and_nothing_else(at_once: int) -> None:
    loser = FrameLoser()
    loser.lose_one()
    assert passed(loser, CONNECT, OTHER, FIRST, SECOND, OTHER, at_once=at_once) == CONNECT + OTHER + SECOND + OTHER
    assert loser.due == 0


@pytest.mark.parametrize("message", [FIRST, SECOND, WITH_HEADERS, EMPTY], ids=["plain", "reply", "headers", "empty"])
def test_a_message_of_any_form_is_lost_whole(message: bytes) -> None:
    loser = FrameLoser()
    loser.lose_one()
    assert passed(loser, message, OTHER) == OTHER


def test_an_unfinished_command_waits_for_its_end() -> None:
    wire = ClientCommands(FrameLoser())
    assert wire.feed(FIRST[:-1]) == b""
    assert wire.feed(FIRST[-1:] + b"PI") == FIRST
    assert wire.feed(b"NG\r\n") == b"PING\r\n"


def test_a_payload_that_looks_like_a_command_is_a_payload() -> None:
    loser = FrameLoser()
    loser.lose_one()
    disguised = b"PUB mesh.job.m.batch.any %d\r\n%b\r\n" % (len(FIRST), FIRST)
    assert passed(loser, disguised) == disguised
    assert loser.due == 1


def test_a_deaf_gateway_asks_for_everything_but_disconnects() -> None:
    wire = ClientCommands(disconnect_subscription)
    beats = b"SUB mesh.beat.worker.*  2\r\n"
    assert wire.feed(b"SUB mesh.sys.disconnect  1\r\n" + beats) == beats
