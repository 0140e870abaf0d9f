"""nats-py's client, except that a connection which is lost is dropped at once."""

from __future__ import annotations

from nats.aio.client import Client


class AbruptClient(Client):
    """nats-py (2.16, `Client._attempt_reconnect`) closes the old connection and waits until that is done before it
    makes a new one. A link that carries nothing any more cannot be closed while unsent bytes wait for it: with streams
    under way, a worker behind a dropped link would be away until TCP gives up, about 15 minutes. What nobody
    acknowledged is lost in any case; the mesh's own messages are repeated."""

    async def _attempt_reconnect(self) -> None:
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()
        await super()._attempt_reconnect()
