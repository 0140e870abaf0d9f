"""Whether the server is still there, and what it says of its load: one small request every second."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final

from schemas.status import ServerLoad
from worker.engines.openai.client import Client, Cut, NotReached, Silent
from worker.engines.openai.metrics import MetricNames, read_load
from worker.engines.openai.settings import OpenAISettings

PAGE_BYTES_MAX: Final = 4 * 1024 * 1024
"""Of a page of metrics. Of a larger one the load is not read, which is told and decides nothing: no setting."""
METRICS_PATH: Final = "/metrics"
MODELS_PATH: Final = "/v1/models"


class ServerLost(Exception):
    """The server is gone, or takes us no more: the engine ends, and is loaded again when the server is back."""


class Watch:
    """`run` it beside the requests. Any answer is a sign of life; only those of ``/metrics`` tell the load."""

    def __init__(
        self,
        client: Client,
        settings: OpenAISettings,
        *,
        on_load: Callable[[ServerLoad], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._settings = settings
        self._on_load = on_load
        self._clock = clock
        self._path = METRICS_PATH
        self._told: ServerLoad | None = None
        self._suspected = asyncio.Event()

    def suspect(self) -> None:
        """A request did not reach the server: look now, and take no connection for an answer."""
        self._suspected.set()

    async def run(self) -> None:
        """Look for ever. Raises `ServerLost` when nothing answered for `lost_after_s`, or, on suspicion, at once."""
        answered_at = self._clock()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.load_interval_s):
                    await self._suspected.wait()
            suspected = self._suspected.is_set()
            self._suspected.clear()
            try:
                await self._look()
                answered_at = self._clock()
            except (NotReached, Cut, Silent) as error:
                refused = suspected and isinstance(error, NotReached)
                if refused or self._clock() - answered_at >= self._settings.lost_after_s:
                    raise ServerLost(f"the server does not answer: {error}") from None

    async def _look(self) -> None:
        async with self._client.request("GET", self._path, head_wait=self._settings.answer_wait) as answer:
            if self._path != METRICS_PATH:
                return
            if answer.status in (401, 403, 404, 405, 501):
                # There is no such page for us: from now on only the server's presence is watched.
                self._path = MODELS_PATH
            if answer.status != 200:
                return
            page = await answer.whole(bytes_max=PAGE_BYTES_MAX, wait=self._settings.answer_wait)
        if page is None:
            return
        load = read_load(page.decode(errors="replace"), MetricNames.of(self._settings))
        if load != self._told:
            self._told = load
            self._on_load(load)
