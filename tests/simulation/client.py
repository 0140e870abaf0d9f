"""A client of a simulated mesh: it reads to the end and knows every word that it should hear."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gateway.dialects.inner import InnerRequest
from gateway.exchange import Exchange
from gateway.progress import Completed
from gateway.service import GatewayService
from gateway.settings import GatewaySettings
from gateway.terms import BAND_HEADER, DEADLINE_HEADER, Terms, read_terms
from schemas.errors import ErrorCode, MeshError
from schemas.frames import Delta, FinishReason
from schemas.job import ChatPrompt
from schemas.sampling import Sampling
from tests.simulation.members import MODEL
from worker.engines.sim_prompt import TOKENS_PER_MESSAGE

if TYPE_CHECKING:
    from tests.simulation.world import World

RETRY_AFTER_S: Final = 0.3
REFUSALS_THAT_PASS: Final = frozenset(
    {
        ErrorCode.BUS_UNAVAILABLE,
        ErrorCode.MODEL_NOT_FOUND,
        ErrorCode.NO_REPLICA,
        ErrorCode.OVERLOADED,
        ErrorCode.QUEUE_FULL,
        ErrorCode.SHUTTING_DOWN,
    }
)


@dataclass(eq=False)
class Client:
    """One request, tried again where it was refused or its gateway died. `text` is what the last try was told,
    `waited_s` how long its first word took, `longest_silence_s` is between two words."""

    world: World
    name: str
    tokens: int
    tier: str = "auto"
    band: str | None = None
    deadline_s: float | None = None
    words: str = "how are you"
    text: str = ""
    outcome: Completed | MeshError | None = None
    left: bool = False
    tries: int = 0
    exchange: Exchange | None = None
    waited_s: float = 0.0
    longest_silence_s: float = 0.0
    _try: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._heard_at = self.world.loop.time()

    def leave(self) -> None:
        """Close the connection, as `http.disconnect` tells the gateway."""
        self.left = True
        if self._try is not None:
            self._try.cancel()

    @property
    def attempts(self) -> int:
        """How often its last try was published."""
        return 0 if self.exchange is None else self.exchange.attempts

    @property
    def request(self) -> InnerRequest:
        """What it asks for."""
        prompt = ChatPrompt(messages=({"role": "user", "content": self.words},))
        return InnerRequest(
            model=MODEL,
            prompt=prompt,
            sampling=Sampling(max_tokens=self.tokens, seed=0),
            stream=True,
            service_tier=self.tier,
        )

    def _terms(self, settings: GatewaySettings) -> Terms:
        headers = [] if self.deadline_s is None else [(DEADLINE_HEADER, str(self.deadline_s).encode())]
        if self.band is not None:
            headers.append((BAND_HEADER, self.band.encode()))
        return read_terms(headers, self.name, service_tier=self.tier, settings=settings)

    async def run(self) -> None:
        """Until it has an outcome or left."""
        while self.outcome is None and not self.left:
            gateway = self.world.some_gateway()
            if gateway is None or gateway.service is None:
                await asyncio.sleep(RETRY_AFTER_S)
                continue
            self.tries += 1
            self.text = ""
            self._try = gateway.process.spawn(self._ask(gateway.service), name=f"request of {self.name}")
            await asyncio.wait({self._try})
            if not self._try.cancelled():
                self._try.result()
            self._pause()
            if self.outcome is None:
                await asyncio.sleep(RETRY_AFTER_S)

    async def _ask(self, service: GatewayService) -> None:
        self.exchange = None
        try:
            terms = self._terms(self.world.gateway_settings)
            async with service._exchanges.open(self.request, terms=terms, body_bytes=100) as self.exchange:
                while self.exchange.outcome is None:
                    self._hear(await self.exchange.next())
                self._hear(await self.exchange.next())
                self.outcome = self.exchange.outcome
                self._check()
        except MeshError as error:
            if error.code not in REFUSALS_THAT_PASS:
                self.outcome = error

    def _pause(self) -> None:
        now = self.world.loop.time()
        if self.text:
            self.longest_silence_s = max(self.longest_silence_s, now - self._heard_at)
        self._heard_at = now

    def _hear(self, frames: list[Delta]) -> None:
        if frames:
            if not self.text:
                self.waited_s = self.world.loop.time() - self._heard_at
            self._pause()
        right = expected(self.tokens).startswith(self.text)
        self.text += "".join(frame.text for frame in frames)
        if right and not expected(self.tokens).startswith(self.text):
            self.world.violate(f"I1: {self.name} wants {self.tokens} tokens and was told '...{self.text[-40:]}'")

    def _check(self) -> None:
        if isinstance(self.outcome, MeshError):
            if self.outcome.code is ErrorCode.SHUTTING_DOWN:
                # Its gateway was told to end while this ran on: a client tries again elsewhere.
                self.outcome = None
            return
        assert isinstance(self.outcome, Completed)
        usage, prompt = self.outcome.usage, len(self.words.split()) + TOKENS_PER_MESSAGE
        if self.text != expected(self.tokens) or self.outcome.finish_reasons != (FinishReason.LENGTH,):
            self.world.violate(f"I1: {self.name} wants {self.tokens} tokens, the end is '...{self.text[-40:]}'")
        if (usage.prompt_tokens, usage.completion_tokens) != (prompt, self.tokens):
            self.world.violate(f"I1: {self.name} was charged {usage}")


@functools.cache
def expected(tokens: int) -> str:
    """What the `sim` engine says."""
    return "".join(f" tok{number}" for number in range(1, tokens + 1))
