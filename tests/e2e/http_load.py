"""A load of short requests from clients that know which failures they may repeat, and count the others."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from tests.e2e.streams import chat, counted

TOKENS: Final = 3
ANSWER_S: Final = 20.0


class _Broken(Exception):
    """The connection ended before a whole answer."""


@dataclass
class Tally:
    """What came of the requests. `repeated`: those sent again, as HTTP allows, after the end of a connection that had
    served before (RFC 9112, 9.3.1)."""

    answered: int = 0
    repeated: int = 0
    wrong: list[str] = field(default_factory=list)


class Load:
    """`clients` that ask without pause until `stop`: every second on one connection, the others each time on a new
    one."""

    def __init__(self, url: str, clients: int) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._address = (parts.hostname, parts.port)
        self.tally = Tally()
        self._stopping = False
        self._tasks = [
            asyncio.create_task(self._ask_for_ever(keep=number % 2 == 0), name=f"load-{number}")
            for number in range(clients)
        ]

    async def stop(self) -> Tally:
        """Let the requests under way end."""
        self._stopping = True
        await asyncio.gather(*self._tasks)
        return self.tally

    async def _ask_for_ever(self, *, keep: bool) -> None:
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        while not self._stopping:
            reused = connection is not None
            try:
                async with asyncio.timeout(ANSWER_S):
                    if connection is None:
                        connection = await asyncio.open_connection(*self._address)
                    closing = await self._ask(*connection, keep=keep)
            except TimeoutError:
                closing = True
                self.tally.wrong.append(f"no answer within {ANSWER_S:g} s")
            except (OSError, _Broken) as error:
                closing = True
                if reused:
                    self.tally.repeated += 1
                else:
                    self.tally.wrong.append(f"on a new connection: {error!r}")
            if closing and connection is not None:
                connection[1].close()
                connection = None
        if connection is not None:
            connection[1].close()

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, keep: bool) -> bool:
        """One request; says whether its connection is over."""
        body = json.dumps(chat(max_tokens=TOKENS, stream=False)).encode()
        fields = f"host: x\r\ncontent-length: {len(body)}\r\n" + ("" if keep else "connection: close\r\n")
        writer.write(f"POST /v1/chat/completions HTTP/1.1\r\n{fields}\r\n".encode() + body)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
            answer = await reader.readexactly(length)
        except asyncio.IncompleteReadError as error:
            raise _Broken(f"{len(error.partial)} bytes") from None
        if head.startswith("http/1.1 200 ") and json.loads(answer)["choices"][0]["message"]["content"] == counted(
            TOKENS
        ):
            self.tally.answered += 1
        else:
            self.tally.wrong.append(f"{head.partition(chr(13))[0]}: {answer.decode()}")
        return "connection: close" in head
