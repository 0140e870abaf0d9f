"""The configuration of a nats-server that carries a mesh. Its format is a superset of JSON, and JSON is written."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bus.connection import PAYLOAD_BYTES_MAX
from bus.credentials import write_secret
from bus.identity import MeshIdentity
from schemas.ranges import Interval, Port, Positive

MIB: Final = 1024 * 1024
GIB: Final = 1024 * MIB
RANDOM_PORT: Final = -1


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How the embedded server runs. Sizes in bytes, durations in seconds.

    `port` 0 takes a free one. `monitor_port` None = no monitoring endpoint; it is open to whoever reaches `host`.
    `memory_bytes_max` and `store_bytes_max` bound what all streams together may *reserve* with their own `max_bytes`.
    """

    state_dir: Path
    host: str = "127.0.0.1"
    port: Port = 4222
    server_name: str = "mesh"
    monitor_port: Port | None = None
    memory_bytes_max: Positive = 4 * GIB
    store_bytes_max: Positive = 64 * GIB
    payload_bytes_max: Positive = PAYLOAD_BYTES_MAX
    pending_bytes_max: Positive = 64 * MIB
    connections_max: Positive = 10_000
    ping_interval_s: Positive = 5
    pings_unanswered_max: Positive = 2
    write_deadline_s: Positive = 2
    authentication_timeout_s: Positive = 5
    log_bytes_max: Positive = 16 * MIB
    log_files_max: Positive = 3
    start_timeout_s: Interval = 15.0
    stop_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        if self.payload_bytes_max > self.pending_bytes_max:
            raise ValueError("payload_bytes_max must not exceed pending_bytes_max: the server could not deliver it")

    @property
    def directory(self) -> Path:
        """Where the server keeps what is its own."""
        return self.state_dir / "bus"

    @property
    def config_path(self) -> Path:
        """The file that `write_config` writes."""
        return self.directory / "nats.conf"

    @property
    def log_path(self) -> Path:
        """Where the server logs."""
        return self.directory / "server.log"

    @property
    def stderr_path(self) -> Path:
        """What the latest server process said before it had read its configuration, or while crashing."""
        return self.directory / "stderr.log"

    @property
    def ports_directory(self) -> Path:
        """Where the server says which ports it took."""
        return self.directory / "ports"


def write_config(settings: ServerSettings, identity: MeshIdentity) -> Path:
    """Write the server's configuration and return its path. Raises `IdentityError` when it cannot be written."""
    config = _config(settings, identity)
    config["log_file"] = str(settings.log_path)
    config["logfile_size_limit"] = settings.log_bytes_max
    config["logfile_max_num"] = settings.log_files_max
    # The server's parser knows no \u escapes, so names outside ASCII stay as they are.
    write_secret(settings.config_path, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    return settings.config_path


def _config(settings: ServerSettings, identity: MeshIdentity) -> dict[str, Any]:
    """Accounts are preloaded into a directory resolver: it keeps what is newer, so live revocations outlast a restart
    (the memory resolver forgets them). Neither `debug` nor `trace` is ever on: a trace would log payloads."""
    config: dict[str, Any] = {
        "host": settings.host,
        "port": settings.port or RANDOM_PORT,
        "server_name": settings.server_name,
        "operator": identity.operator_jwt,
        "system_account": identity.system_account,
        "resolver": {
            "type": "full",
            "dir": str(settings.directory / "accounts"),
            "allow_delete": False,
            "interval": "2m",
        },
        "resolver_preload": {
            identity.system_account: identity.system_jwt,
            identity.mesh_account: identity.mesh_jwt,
        },
        "jetstream": {
            "store_dir": str(settings.directory),
            "max_memory_store": settings.memory_bytes_max,
            "max_file_store": settings.store_bytes_max,
        },
        "authorization": {"timeout": settings.authentication_timeout_s},
        "max_payload": settings.payload_bytes_max,
        "max_pending": settings.pending_bytes_max,
        "max_connections": settings.connections_max,
        "ping_interval": f"{settings.ping_interval_s}s",
        "ping_max": settings.pings_unanswered_max,
        "write_deadline": f"{settings.write_deadline_s}s",
        "ports_file_dir": str(settings.ports_directory),
    }
    if settings.monitor_port is not None:
        config["http"] = f"{settings.host}:{settings.monitor_port or RANDOM_PORT}"
    return config
