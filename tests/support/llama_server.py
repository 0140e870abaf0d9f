"""llama.cpp's own server core as a program: `python llama_server.py MODEL.gguf PORT`. Two slots, one thread."""

from __future__ import annotations

import importlib
import signal
import sys


def main() -> None:
    """Serve until SIGTERM."""
    model, port = sys.argv[1:]
    # No type hints come with it.
    xllamacpp = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames = ["127.0.0.1"]
    params.port = int(port)
    params.n_parallel = 2
    params.n_ctx = 2 * 1024
    params.endpoint_metrics = True
    # Some virtual machines advertise instructions that their kernel refuses.
    params.no_extra_bufts = True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    print(f"listening at {server.listening_address}", file=sys.stderr, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
