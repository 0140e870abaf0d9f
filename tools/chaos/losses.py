"""Which of the commands that parts send to the bus get lost on the way. Pure."""

from __future__ import annotations

from typing import Final

from bus.subjects import DISCONNECT

_REPLIES: Final = "mesh.reply."


class FrameLoser:
    """Loses the next message with frames after each `lose_one`; `due` are those still to be lost."""

    def __init__(self) -> None:
        self.due = 0

    def lose_one(self) -> None:
        """One message more."""
        self.due += 1

    def __call__(self, verb: str, subject: str) -> bool:
        """Whether to lose this command."""
        if self.due == 0 or verb not in ("PUB", "HPUB") or not subject.startswith(_REPLIES):
            return False
        self.due -= 1
        return True


def disconnect_subscription(verb: str, subject: str) -> bool:
    """Whether this command asks for the server's word on connections that ended: without it a gateway is as deaf as
    where the system account's events are not imported."""
    return (verb, subject) == ("SUB", DISCONNECT)
