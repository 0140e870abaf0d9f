"""The live view of the workers, judged by our own monotonic clock since each worker's last beat.

The clock stops while our own connection is down (`restart_clocks`) or our loop stands still (`shift_clocks`): silence
that is our fault condemns nobody.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import structlog

from schemas.status import DisconnectEvent, ReplicaState, ReplicaStatus, WorkerStatus

PEER_ENDED: Final = frozenset({"Client Closed", "Read Error", "Write Error"})
"""Reasons of nats-server 2.15 for a connection that ended on the worker's side. Which one a killed process gets depends
on its sockets: with data unread the kernel resets the connection, and the server sees an error and no end."""

log = structlog.get_logger("gateway.fleet")


@dataclass(slots=True)
class _Seen:
    """`ready`: the models that it takes jobs for."""

    status: WorkerStatus
    heard_at: float
    ready: frozenset[str] = frozenset()


class Fleet:
    """Workers by name. All methods take `now` from the gateway's monotonic clock, in seconds."""

    def __init__(
        self,
        *,
        lost_after_s: float,
        known_models_max: int,
        on_new: Callable[[WorkerStatus], None] = lambda status: None,
        on_gone: Callable[[WorkerStatus, str], None],
        on_suspect: Callable[[str], None],
        on_model: Callable[[str], None],
        learns_until: float = float("-inf"),
    ) -> None:
        """`on_new(status)`: a process that was not here before. `on_gone(last_status, cause)`: the claims of that
        process are lost. `on_suspect(worker)`: its connection broke, but it may be reconnecting. `on_model(model)`: a
        model that this gateway has not seen before has a replica. `learns_until`: see `learn_until`."""
        self._lost_after_s = lost_after_s
        self._known_models_max = known_models_max
        self._on_new = on_new
        self._on_gone = on_gone
        self._on_suspect = on_suspect
        self._on_model = on_model
        self._learns_until = learns_until
        self._workers: dict[str, _Seen] = {}
        # By model and worker, so that neither a beat nor a question walks through all workers.
        self._serving: dict[str, dict[str, _Seen]] = {}
        self._ready_models: tuple[str, ...] = ()
        self._known: OrderedDict[str, None] = OrderedDict()
        self._has_forgotten = False

    def on_beat(self, status: WorkerStatus, now: float) -> None:
        """A worker says it is there. A new instance under an old name means that the old process is gone."""
        seen = self._workers.get(status.name)
        if seen is None or seen.status.instance != status.instance:
            if seen is not None:
                self._forget(status.name, "restarted")
            self._on_new(status)
            seen = self._workers[status.name] = _Seen(status, now)
        seen.status, seen.heard_at = status, now
        self._index(seen, _ready_models(status))
        for replica in status.replicas:
            if replica.model not in self._known:
                self._known[replica.model] = None
                self._on_model(replica.model)
                if len(self._known) > self._known_models_max:
                    self._forget_a_model()
            else:
                self._known.move_to_end(replica.model)

    def _forget_a_model(self) -> None:
        """Forget the one that was not announced for longest. Logged once: with too many, every beat costs one."""
        model, _ = self._known.popitem(last=False)
        if not self._has_forgotten:
            self._has_forgotten = True
            log.warning("a model is forgotten", model=model, known_models_max=self._known_models_max)

    def on_disconnect(self, event: DisconnectEvent) -> None:
        """The server saw a connection end. Matched by key and connection, never by the name a client gave itself."""
        for name, seen in list(self._workers.items()):
            status = seen.status
            theirs = (status.user_key, status.client_id, status.server_id)
            if theirs != (event.client.user, event.client.id, event.server.id):
                continue
            if event.reason in PEER_ENDED:
                self._forget(name, "disconnected")
            else:
                self._on_suspect(name)

    def sweep(self, now: float) -> None:
        """Give up workers whose beats stopped."""
        for name, seen in list(self._workers.items()):
            if now - seen.heard_at > self._lost_after_s:
                self._forget(name, "beats stopped")

    def restart_clocks(self, now: float) -> None:
        """Our connection was down: nobody is late yet."""
        self.shift_clocks(math.inf, now)

    def shift_clocks(self, lag_s: float, now: float) -> None:
        """Our loop stood still for `lag_s`: so much of everybody's silence was ours."""
        for seen in self._workers.values():
            seen.heard_at = min(seen.heard_at + lag_s, now)

    def replicas(self, model: str) -> Iterator[ReplicaStatus]:
        """Replicas of `model` that take jobs now."""
        for seen in self._serving.get(model, {}).values():
            for replica in seen.status.replicas:
                if replica.model == model and replica.state is ReplicaState.READY:
                    yield replica

    def fastest(self) -> dict[str, int]:
        """The best speed class of each model whose replicas, of those that take jobs now, differ in it."""
        classes = {model: {replica.speed_class for replica in self.replicas(model)} for model in self._serving}
        return {model: min(found) for model, found in classes.items() if len(found) > 1}

    def serves(self, model: str) -> bool:
        """Whether some replica takes jobs for `model` now."""
        return model in self._serving

    def knows(self, model: str) -> bool:
        """Whether some worker announced `model` since this gateway started. Of more than `known_models_max` models it
        forgets the one that was not announced for longest."""
        return model in self._known

    def learn_until(self, then: float) -> None:
        """By `then` every worker that is there will have had the time to say so."""
        self._learns_until = then

    def learns(self, now: float) -> bool:
        """Whether workers may be there that this gateway has not heard of yet."""
        return now < self._learns_until

    @property
    def known_models(self) -> tuple[str, ...]:
        """Every model that it `knows`."""
        return tuple(self._known)

    @property
    def ready_models(self) -> tuple[str, ...]:
        """Models with a replica that takes jobs, sorted."""
        return self._ready_models

    @property
    def workers(self) -> tuple[WorkerStatus, ...]:
        """The last beat of every live worker."""
        return tuple(seen.status for seen in self._workers.values())

    def _forget(self, name: str, cause: str) -> None:
        seen = self._workers.pop(name)
        self._index(seen, frozenset())
        self._on_gone(seen.status, cause)

    def _index(self, seen: _Seen, ready: frozenset[str]) -> None:
        """Note what `seen` takes jobs for from now on. Most beats change nothing of it."""
        if ready == seen.ready:
            return
        name = seen.status.name
        for model in seen.ready - ready:
            del self._serving[model][name]
            if not self._serving[model]:
                del self._serving[model]
        for model in ready - seen.ready:
            self._serving.setdefault(model, {})[name] = seen
        seen.ready = ready
        self._ready_models = tuple(sorted(self._serving))


def _ready_models(status: WorkerStatus) -> frozenset[str]:
    if status.draining:
        return frozenset()
    return frozenset(replica.model for replica in status.replicas if replica.state is ReplicaState.READY)
