"""The peer's process: `python -m tools.bench.engine_peer_child SETTINGS`. Serves until it is ended."""

from __future__ import annotations

import importlib
import signal
import sys

import msgspec

from tools.bench.engine_peer import PeerReady, PeerSettings


def main() -> None:
    """Start the server core, say where it serves, and wait for the end."""
    settings = msgspec.json.decode(sys.argv[1], type=PeerSettings)
    try:
        # No type hints come with it.
        xllamacpp = importlib.import_module("xllamacpp")
    except ImportError:
        sys.exit("the package xllamacpp is not installed: ./tools/install --dev")
    params = xllamacpp.CommonParams()
    params.model.path = settings.model
    params.n_parallel = settings.slots
    params.n_ctx = settings.slots * settings.context
    params.cpuparams.n_threads = settings.threads
    params.cpuparams_batch.n_threads = settings.threads
    server = xllamacpp.Server(params)
    ready = PeerReady(url=server.listening_address, features=xllamacpp.get_system_info())
    sys.stdout.buffer.write(msgspec.json.encode(ready) + b"\n")
    sys.stdout.flush()
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
