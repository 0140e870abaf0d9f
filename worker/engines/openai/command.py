"""A server of our own: started by an operator's command, ended with this process."""

from __future__ import annotations

import asyncio
import sys
from typing import Final

from worker.engines.base import LoadError
from worker.engines.last_words import LastWords
from worker.engines.openai.client import Client, Cut, NotReached, Silent
from worker.engines.openai.settings import OpenAISettings
from worker.engines.openai.watch import MODELS_PATH

READ_BYTES: Final = 16 * 1024
PREDECESSOR_CHECK_S: Final = 0.1


class ServerCommand:
    """A running command. It ends when this process does, however that happens (see `guard`).

    What it prints is kept, a few lines of it, until `forget_output`: from the first request on it may quote prompts.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._output = LastWords()
        self._reading = asyncio.create_task(self._read(), name="output")
        self.ended = asyncio.create_task(self._wait(), name="command")

    @classmethod
    async def start(cls, settings: OpenAISettings, client: Client) -> ServerCommand:
        """Start it, once nobody else answers at its address. Raises `LoadError`."""
        await _until_unserved(client, settings)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "worker.engines.openai.guard"),
            *(str(settings.command_end_s), *settings.command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        return cls(process)

    def last_words(self) -> str:
        """The last line that it printed, if any is kept."""
        lines = self._output.lines()
        return lines[-1].strip() if lines else ""

    def forget_output(self) -> None:
        """Keep nothing of what it prints, now and from now on."""
        self._output.forget()

    async def close(self) -> None:
        """End it and wait for that."""
        assert self._process.stdin is not None, "asked for as a pipe"
        self._process.stdin.close()
        await self.ended

    async def _wait(self) -> int:
        code = await self._process.wait()
        await self._reading
        return code

    async def _read(self) -> None:
        assert self._process.stderr is not None, "asked for as a pipe"
        while data := await self._process.stderr.read(READ_BYTES):
            self._output.feed(data)


async def _until_unserved(client: Client, settings: OpenAISettings) -> None:
    """Wait until nobody answers where the command is going to serve: the server of a crashed engine needs a moment to
    leave. Raises `LoadError` when somebody stays."""
    limit_s = settings.predecessor_gone_s
    try:
        async with asyncio.timeout(limit_s):
            while True:
                async with client.request("GET", MODELS_PATH, head_wait=settings.answer_wait):
                    pass
                # Another process's end: there is nothing to await but time.
                await asyncio.sleep(PREDECESSOR_CHECK_S)
    except (NotReached, Cut, Silent):
        return
    except TimeoutError:
        what = f"something else already serves the URL of --command, for {limit_s:g} s now (engine.predecessor_gone_s)"
        raise LoadError(f"{what}: stop it, or leave --command out") from None
