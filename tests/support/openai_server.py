"""A server of the OpenAI API that does whatever a test says, and remembers what it was asked."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from typing import Any, Final

DEADLINE_S: Final = 10.0
MODEL: Final = "served"

HANG: Final = "hang"
"""A step of an answer: send nothing more, and wait for the client to close the connection."""

Answer = Iterable[bytes | str]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class FakeServer:
    """`answers` has what follows a request, by path: the bytes of the answer, piece by piece, or `HANG`. The connection
    is closed after the last piece. `left` is set when a client closes a connection on which the server hangs."""

    url: str
    answers: dict[str, Callable[[Asked], Answer]] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)

    def completions(self) -> list[Asked]:
        """The requests that were no looks at its state."""
        return [asked for asked in self.asked if asked.method == "POST"]

    def serve(self, connection: socket.socket) -> None:
        """One connection, one request."""
        connection.settimeout(DEADLINE_S)
        with connection, connection.makefile("rb") as stream:
            method, path, _ = stream.readline().decode().split()
            headers: dict[str, str] = {}
            while line := stream.readline().decode().strip():
                name, _, value = line.partition(":")
                headers[name.lower()] = value.strip()
            data = stream.read(int(headers.get("content-length", 0)))
            asked = Asked(method=method, path=path, headers=headers, body=json.loads(data) if data else {})
            self.asked.append(asked)
            answer = self.answers.get(path)
            for piece in answer(asked) if answer is not None else plain(404, "not here"):
                if isinstance(piece, str):
                    _until_closed(stream)
                    self.left.set()
                else:
                    connection.sendall(piece)


@contextmanager
def fake_server(port: int = 0) -> Iterator[FakeServer]:
    """It lists one model with a context of 4096 tokens and answers chats with ``Hello!``, until told otherwise."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        server = FakeServer(f"http://127.0.0.1:{listener.getsockname()[1]}")
        server.answers["/v1/models"] = lambda asked: json_answer(200, {"data": [{"id": MODEL, "max_model_len": 4096}]})
        server.answers["/v1/chat/completions"] = lambda asked: stream_of(*whole_chat("Hel", "lo!"))

        def serve(connection: socket.socket) -> None:
            try:
                server.serve(connection)
            except (OSError, ValueError):
                # The client is gone, perhaps before it asked: some tests are about that.
                return

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        try:
            yield server
        finally:
            # A close alone does not end an accept that waits.
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join(DEADLINE_S)


def _until_closed(stream: BufferedReader) -> None:
    try:
        assert stream.read(1) == b"", "a client sends one request"
    except ConnectionResetError:
        # It left without reading all that was sent.
        return


def head(status: int, content_type: str, *more: str) -> bytes:
    """Status line and headers of an answer that ends with the connection, or as `more` says."""
    return "\r\n".join([f"HTTP/1.1 {status} X", f"content-type: {content_type}", *more, "", ""]).encode()


def plain(status: int, text: str, *headers: str, content_type: str = "text/plain") -> Answer:
    """An answer with a text."""
    return [head(status, content_type, *headers) + text.encode()]


def json_answer(status: int, body: object) -> Answer:
    """An answer with JSON."""
    return plain(status, json.dumps(body), content_type="application/json")


def chunked(*pieces: bytes, whole: bool = True) -> list[bytes]:
    """Pieces in HTTP's chunked coding; without `whole`, the end is missing."""
    coded = [f"{len(piece):x}\r\n".encode() + piece + b"\r\n" for piece in pieces]
    return [*coded, b"0\r\n\r\n"] if whole else coded


def stream_of(*events: bytes, whole: bool = True) -> list[bytes]:
    """A streamed answer."""
    return [head(200, "text/event-stream; charset=utf-8", "transfer-encoding: chunked"), *chunked(*events, whole=whole)]


def event(body: object) -> bytes:
    """One server-sent event."""
    return f"data: {json.dumps(body)}\n\n".encode()


def text(content: str, **more: Any) -> bytes:
    """A chat chunk with text."""
    return event({"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": None, **more}]})


def finish(reason: str = "stop") -> bytes:
    """The chunk that ends a choice."""
    return event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})


def usage(prompt: int, completion: int) -> bytes:
    """The chunk with the counts."""
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})


DONE: Final = b"data: [DONE]\n\n"


def whole_chat(*texts: str, reason: str = "stop") -> list[bytes]:
    """All events of a chat that goes well: 7 prompt tokens, 10 completion tokens for each text."""
    return [text(""), *map(text, texts), finish(reason), usage(7, 10 * len(texts)), DONE]


def main() -> None:
    """As a program: serve at a port, with a child that does not end by itself and ignores SIGTERM."""
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
    child = subprocess.Popen([sys.executable, "-c", stubborn])
    print(f"child {child.pid}", file=sys.stderr, flush=True)
    with fake_server(int(sys.argv[1])):
        signal.pause()


if __name__ == "__main__":
    main()
