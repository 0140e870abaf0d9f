"""Stand-ins around the rooms of a worker: a clock moved by hand, a sender that keeps what it was given."""

from __future__ import annotations

from collections.abc import Sequence

from bus.connection import BusUnavailable
from bus.subjects import JobAddress
from schemas.frames import Frame, NumberedFrame
from schemas.job import Job


class ManualClock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


class KeptMessages:
    """What a `FrameSender` would have sent: one entry per message."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, list[Frame], int | None]] = []

    async def send(self, gateway: str, frames: Sequence[Frame], *, probe: int | None = None) -> None:
        """Keep a message."""
        self.messages.append((gateway, list(frames), probe))

    def frames(self, gateway: str = "g1") -> list[Frame]:
        """All frames for a gateway, in order."""
        return [frame for to, frames, _ in self.messages for frame in frames if to == gateway]

    def numbered(self, handle: int, gateway: str = "g1") -> list[NumberedFrame]:
        """The numbered frames of one claim, in order."""
        frames = self.frames(gateway)
        return [frame for frame in frames if isinstance(frame, NumberedFrame) and frame.handle == handle]


class HandedOut:
    """A delivery in memory: remembers how it was settled, once."""

    def __init__(self, job: Job, address: JobAddress, *, deliveries: int = 1, seq: int = 1, behind: int = 0) -> None:
        self.job = job
        self.address = address
        self.deliveries = deliveries
        self.seq = seq
        self.behind = behind
        self.settlements: list[str] = []
        self.failure: BusUnavailable | None = None

    @property
    def settled(self) -> bool:
        """Whether it has ended."""
        return bool(self.settlements)

    async def ack(self) -> None:
        """Done with it."""
        self._settle("ack")

    async def nak(self, *, delay_s: float = 0.0) -> None:
        """Back into the queue."""
        self._settle(f"nak {delay_s:g}")

    async def term(self) -> None:
        """Away with it."""
        self._settle("term")

    def _settle(self, how: str) -> None:
        assert not self.settlements, "a delivery ends once"
        if self.failure is not None:
            raise self.failure
        self.settlements.append(how)
