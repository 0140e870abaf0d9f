"""Whatever arrives on a connection, in whatever pieces: the application sees the requests that were sent and nothing
else, and silence ends the connection within its limits."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http1.phase import Phase
from gateway.settings import GatewaySettings
from gateway.sse import answer
from schemas.errors import ErrorCode, MeshError
from tests.gateway.http1.test_head import JDK_UPGRADE
from tests.support.gateway import settle
from tests.support.splits import cut, places
from tests.support.wire import Wire

SETTINGS = GatewaySettings(
    head_timeout_s=10.0, body_timeout_s=20.0, idle_connection_s=30.0, linger_s=2.0, linger_bytes_max=5_000
)
SMUGGLED = b"POST /smuggled HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request as a client writes it. `chunks` None: with a length."""

    body: bytes
    chunks: int | None
    fields: bytes
    trailers: bytes
    closes: bool

    def sent(self, number: int) -> bytes:
        """Its bytes."""
        head = b"POST /%d HTTP/1.1\r\nhost: x\r\n%b" % (number, self.fields)
        if self.closes:
            head += b"connection: close\r\n"
        if self.chunks is None:
            return head + b"content-length: %d\r\n\r\n%b" % (len(self.body), self.body)
        pieces = [self.body[at : at + self.chunks] for at in range(0, len(self.body), self.chunks)]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        return head + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n" + self.trailers + b"\r\n"


@dataclass
class Application:
    """Reads a request's body, waits until it is let go, and answers with the path."""

    held: bool = False
    seen: list[tuple[str, bytes]] = field(default_factory=list)
    names: set[bytes] = field(default_factory=set)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    gone: int = 0
    finished: int = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI."""
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        else:
            self.gone += 1
            return
        self.seen.append((scope["path"], body))
        self.names |= {name for name, _ in scope["headers"]}
        if self.held:
            leaving = asyncio.ensure_future(receive())
            going = asyncio.ensure_future(self.go.wait())
            await asyncio.wait({leaving, going}, return_when=asyncio.FIRST_COMPLETED)
            going.cancel()
            if leaving.done():
                self.gone += 1
            leaving.cancel()
        await answer(send, 200, b"answer to " + scope["path"].encode())
        self.finished += 1


ASKED = st.builds(
    Asked,
    body=st.binary(max_size=60) | st.sampled_from([SMUGGLED, b"\r\n\r\n", SMUGGLED * 3]),
    chunks=st.sampled_from([None, None, 1, 7, 1_000]),
    fields=st.sampled_from([b"", JDK_UPGRADE, b"expect: 100-continue\r\n"]),
    trailers=st.sampled_from([b"", b"x-mesh-band: interactive\r\n"]),
    closes=st.sampled_from([False, False, False, True]),
)


def served(sizes: list[int], closing: list[bool], pieces: list[bytes], settled: list[bool]) -> int:
    """How many of the requests are served: up to the first one that says it is the last, or whose successor began
    before its answer was complete, which is when the loop next turns after its last byte."""
    ends = [sum(len(piece) for piece in pieces[: number + 1]) for number in range(len(pieces))]
    position = 0
    for number, size in enumerate(sizes):
        last_at = next(at for at, end in enumerate(ends) if end >= position + size)
        answered_at = next(at for at in range(last_at, len(pieces)) if settled[at])
        position += size
        if number + 1 == len(sizes) or closing[number] or ends[answered_at] > position:
            return number + 1
    raise AssertionError


@settings(deadline=None)
@given(
    asked=st.lists(ASKED, min_size=1, max_size=4),
    at=places(900),
    apart=st.booleans(),
    turns=st.lists(st.booleans(), max_size=30),
)
def test_the_application_sees_what_was_sent_whatever_the_split(
    asked: list[Asked], at: list[int], apart: bool, turns: list[bool]
) -> None:
    """`apart`: no piece holds bytes of two requests. `turns`: after which pieces the loop turns."""
    sent = [request.sent(number) for number, request in enumerate(asked)]
    borders = [sum(map(len, sent[:number])) for number in range(len(sent))] if apart else []
    pieces = cut(b"".join(sent), at + borders)
    settled = [turns[number] if number < len(turns) else apart for number in range(len(pieces) - 1)] + [True]
    count = served([len(each) for each in sent], [each.closes for each in asked], pieces, settled)

    async def go() -> None:
        app = Application()
        wire = Wire(app, SETTINGS)
        for piece, turn in zip(pieces, settled, strict=True):
            if not wire.is_closing():
                wire.connection.data_received(piece)
            if turn:
                await settle()
        assert app.seen == [(f"/{number}", request.body) for number, request in enumerate(asked[:count])]
        assert b"x-mesh-band" not in app.names
        answers = wire.written.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").split(b"HTTP/1.1 200 OK\r\n")[1:]
        assert [each.rpartition(b"\r\n\r\n")[2] for each in answers] == [b"answer to /%d" % at for at in range(count)]
        is_last = count < len(asked) or asked[count - 1].closes
        assert (wire.is_closing() or wire.eof) == is_last
        wire.timers.pass_s(1_000)
        await settle()
        assert wire.is_closing()
        assert not wire.edge.connections

    asyncio.run(go())


ACTIONS = st.one_of(
    st.tuples(st.just("send"), st.sampled_from([b"\r\n", b"P", b"OST", b" / HTTP/1.1\r\nhost: x\r\n", b"\r\n", b"x"])),
    st.tuples(st.just("send"), st.sampled_from([SMUGGLED, SMUGGLED[:-1], SMUGGLED * 2, b"x" * 2_000, b"\x00"])),
    st.tuples(st.just("send"), st.just(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")),
    st.tuples(st.just("send"), st.sampled_from([b"1\r\na\r\n", b"0\r\n", b"a: b\r\n", b"70000\r\n", b"x" * 70_000])),
    st.tuples(st.just("pass"), st.sampled_from([0.5, 3.0, 11.0, 25.0])),
    st.tuples(st.just("answer"), st.just(None)),
)
UNTIMED = {Phase.ANSWERING, Phase.PARTING, Phase.CLOSED}


@settings(deadline=None)
@given(st.lists(ACTIONS, max_size=25))
def test_silence_ends_a_connection_within_its_limits_and_an_end_is_seen_in_every_phase(
    actions: list[tuple[str, Any]],
) -> None:
    async def go() -> None:
        app = Application(held=True)
        wire = Wire(app, SETTINGS)
        for what, value in actions:
            if what == "send":
                await wire.send(value)
            elif what == "pass":
                wire.timers.pass_s(value)
            else:
                app.go.set()
                await settle()
                app.go.clear()
            await settle()
            phase = vars(wire.connection)["_phase"]
            due_s = wire.timers.due_s
            assert (due_s is None) == (phase in UNTIMED)
            assert due_s is None or due_s <= wire.timers.now_s + wire.edge.limits_s[phase]
            assert phase is Phase.BODY or not wire.reading_paused
            assert wire.is_closing() == (phase is Phase.CLOSED)
        app.go.set()
        await settle()
        longest_s = SETTINGS.body_timeout_s + SETTINGS.linger_s + SETTINGS.idle_connection_s
        wire.timers.pass_s(SETTINGS.body_timeout_s)
        await settle()
        wire.timers.pass_s(longest_s - SETTINGS.body_timeout_s)
        await settle()
        assert wire.is_closing()
        assert not wire.edge.connections
        assert not wire.edge.tasks

    asyncio.run(go())


@pytest.mark.parametrize("dripped", [b"\r\n", b"\n", b"\r"])
@pytest.mark.parametrize("first", [b"", b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n"])
async def test_empty_lines_keep_no_connection(dripped: bytes, first: bytes) -> None:
    wire = Wire(Application(), SETTINGS)
    await wire.send(first)
    limit_s = SETTINGS.idle_connection_s if first else SETTINGS.head_timeout_s
    wire.written = b""
    for _ in range(int(limit_s) - 1):
        wire.timers.pass_s(1.0)
        await wire.send(dripped)
    assert not wire.is_closing()
    wire.timers.pass_s(1.0)
    assert wire.is_closing()
    assert wire.written == b""


@pytest.mark.parametrize(
    "sent, setting, limit_s",
    [
        (b"GET / HTTP/1.1\r\nhost: x\r\n", "head_timeout_s", SETTINGS.head_timeout_s),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n", "body_timeout_s", SETTINGS.body_timeout_s),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n", "body_timeout_s", 20.0),
    ],
)
async def test_a_request_that_drips_is_a_408(sent: bytes, setting: str, limit_s: float) -> None:
    raised: list[MeshError] = []

    async def reads(scope: Any, receive: Any, send: Any) -> None:
        try:
            while (await receive())["more_body"]:
                pass
        except MeshError as error:
            raised.append(error)

    wire = Wire(reads, SETTINGS)
    dripped = b"1\r\na\r\n" if b"chunked" in sent else b"x"
    await wire.send(sent)
    for _ in range(int(limit_s) - 1):
        wire.timers.pass_s(1.0)
        await wire.send(dripped)
    assert (raised, wire.written, wire.is_closing()) == ([], b"", False)
    wire.timers.pass_s(1.0)
    await settle()
    if setting == "body_timeout_s":
        assert [(error.code, f"({setting})" in error.message) for error in raised] == [
            (ErrorCode.REQUEST_TIMEOUT, True)
        ]
    else:
        assert wire.written.startswith(b"HTTP/1.1 408 ")
        assert f"({setting})".encode() in wire.written


@pytest.mark.parametrize("further", [b"", b"GET /b HTTP/1.1\r\nhost: x\r\n\r\n", b"GET /b", b"\x00", b"\r\n"])
@pytest.mark.parametrize("together", [True, False])
async def test_a_client_that_leaves_is_noticed_whatever_it_sent_before(further: bytes, together: bool) -> None:
    app = Application(held=True)
    wire = Wire(app, SETTINGS)
    first = b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
    await wire.send(*([first + further] if together else [first, further]))
    assert (app.seen, app.gone, wire.reading_paused) == ([("/a", b"{}")], 0, False)
    wire.timers.pass_s(1_000)
    assert not wire.is_closing(), "nothing of what came may end the answer under way"
    await wire.leave()
    assert (app.gone, app.finished) == (1, 1), "what is sent to nobody goes nowhere"


async def test_what_comes_during_an_answer_is_bounded() -> None:
    app = Application(held=True)
    wire = Wire(app, SETTINGS)
    await wire.send(SMUGGLED, b"x", b"x" * SETTINGS.linger_bytes_max)
    assert not wire.is_closing()
    await wire.send(b"x")
    assert wire.is_closing()
    assert app.gone == 1


async def test_an_answer_under_way_becomes_the_last_without_being_cut() -> None:
    app = Application(held=True)
    wire = Wire(app, SETTINGS)
    await wire.send(SMUGGLED + b"GET /b HTTP/1.1\r\n")
    app.go.set()
    await settle()
    head, _, body = wire.written.partition(b"\r\n\r\n")
    assert body == b"answer to /smuggled"
    assert b"\r\nconnection: close" in head
    assert (wire.eof, wire.is_closing()) == (True, False), "the client reads first"
    wire.timers.pass_s(SETTINGS.linger_s)
    assert wire.is_closing()


async def test_a_body_is_read_no_faster_than_it_is_received() -> None:
    received: list[bytes] = []
    turn = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            await turn.wait()
            turn.clear()
            message = await receive()
            received.append(message["body"])
            more = message["more_body"]
        await answer(send, 200, b"ok")

    wire = Wire(slow, SETTINGS)
    await wire.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n", b"x" * 100_000)
    assert wire.reading_paused
    turn.set()
    await settle()
    turn.set()
    await settle()
    assert (len(b"".join(received)), wire.reading_paused) == (100_000, False)
    await wire.send(b"x" * 100_000)
    assert wire.written.endswith(b"ok")
    assert len(b"".join(received)) == 200_000


async def test_the_word_to_go_on_comes_once_and_only_to_who_waits_for_it() -> None:
    said = b"HTTP/1.1 100 Continue\r\n\r\n"
    head = b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"
    app = Application(held=True)
    wire = Wire(app, SETTINGS)
    await wire.send(head)
    assert wire.written == said
    await wire.send(b"{", b"}")
    app.go.set()
    await settle()
    await wire.send(head + b"{}")
    assert wire.written.count(said) == 1
    assert wire.written.count(b" 200 OK") == 2


@pytest.mark.parametrize("ended_by", ["the answer", "its time"])
async def test_a_body_that_nobody_wanted_is_read_on_and_dropped(ended_by: str) -> None:
    go = asyncio.Event()

    async def deaf(scope: Any, receive: Any, send: Any) -> None:
        await go.wait()
        await answer(send, 200, b"ok")

    wire = Wire(deaf, SETTINGS)
    await wire.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n", b"x" * 100_000)
    assert wire.reading_paused
    if ended_by == "its time":
        wire.timers.pass_s(SETTINGS.body_timeout_s)
        assert not wire.reading_paused
    go.set()
    await settle()
    assert (wire.reading_paused, wire.eof, wire.is_closing()) == (False, True, False)
    await wire.send(b"x" * (SETTINGS.linger_bytes_max + 1))
    assert wire.is_closing()


@pytest.mark.parametrize("length", [0, 2])
async def test_an_answer_of_a_known_length_ends_with_its_last_byte(length: int) -> None:
    """Its client may ask again at once; that the application says the same once more changes nothing."""
    go = asyncio.Event()
    refused: list[RuntimeError] = []

    async def says_it_twice(scope: Any, receive: Any, send: Any) -> None:
        fields = [(b"content-length", b"%d" % length)]
        await send({"type": "http.response.start", "status": 200, "headers": fields})
        if length:
            await send({"type": "http.response.body", "body": b"o" * length, "more_body": True})
        await go.wait()
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        await send({"type": "http.response.body"})
        for more in ({"type": "http.response.body", "body": b"x"}, {"type": "http.response.start", "status": 200}):
            try:
                await send(more)
            except RuntimeError as error:
                refused.append(error)

    wire = Wire(says_it_twice, SETTINGS)
    await wire.send(SMUGGLED)
    await wire.send(SMUGGLED)
    go.set()
    await settle()
    assert wire.written.count(b"HTTP/1.1 200 OK\r\n") == 2
    assert wire.written.endswith(b"\r\n\r\n" + b"o" * length)
    assert (wire.eof, wire.is_closing(), len(refused)) == (False, False, 4)


async def test_a_path_is_no_address() -> None:
    scopes: list[Any] = []

    async def looks(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)
        await answer(send, 200, b"ok")

    wire = Wire(looks, SETTINGS, sockname="/run/socket")
    await wire.send(SMUGGLED)
    assert [(scope["client"], scope["server"]) for scope in scopes] == [(("192.0.2.1", 5), None)]


async def test_the_end_of_an_answer_is_the_end_for_who_still_receives() -> None:
    received = []

    async def asks_on(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        pending = asyncio.ensure_future(receive())
        await settle()
        await answer(send, 200, b"ok")
        received.append(await pending)
        received.append(await receive())

    wire = Wire(asks_on, SETTINGS)
    await wire.send(SMUGGLED)
    await settle()
    assert received == [{"type": "http.disconnect"}] * 2
    assert not wire.is_closing()


@pytest.mark.parametrize("sent", [[], [b"GET /"]])
@pytest.mark.parametrize("before", [True, False])
async def test_a_server_that_stops_waits_a_moment_for_who_has_just_come(sent: list[bytes], before: bool) -> None:
    wire = Wire(Application(), SETTINGS)
    if before:
        await wire.send(*sent)
    wire.connection.shutdown()
    if not before:
        wire.timers.pass_s(SETTINGS.newcomer_limit_s / 2)
        await wire.send(*sent)
        assert not wire.is_closing()
        wire.timers.pass_s(SETTINGS.newcomer_limit_s / 2)
    else:
        wire.timers.pass_s(SETTINGS.newcomer_limit_s)
    assert wire.is_closing()


async def test_a_server_that_stops_still_answers_what_was_asked() -> None:
    app = Application(held=True)
    wire, newcomer = Wire(app, SETTINGS), Wire(app, SETTINGS)
    await wire.send(SMUGGLED)
    wire.connection.shutdown()
    newcomer.connection.shutdown()
    await newcomer.send(SMUGGLED)
    app.go.set()
    await settle()
    for each in (wire, newcomer):
        assert b"\r\nconnection: close\r\n" in each.written
        assert each.written.endswith(b"answer to /smuggled")
        assert each.is_closing()
