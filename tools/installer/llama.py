"""Finds or builds a wheel of llama-cpp-python and installs it.

PyPI has its source only. In this order: a wheel built here before, a prebuilt one from the package's own wheel index
(also one that was kept before), a build. pip's cache is not used for it, because its key leaves out CMAKE_ARGS: it may
hold a wheel that was built for the instructions of another machine's CPU.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tools.installer.environment import Environment, exclusive
from tools.installer.errors import InstallError
from tools.installer.llama_build import BuildOptions, build, require_compiler
from tools.installer.process import CommandFailed, run
from tools.installer.report import Phase, Reporter

PREBUILT_INDEX = "https://abetlen.github.io/llama-cpp-python/whl/cpu"
PREBUILT_CONNECT_TIMEOUT_S = 5
PREBUILT_TIMEOUT_S = 120.0
CHECK_TIMEOUT_S = 60.0
BUILT_FOLDER = "built"
"""Wheels that were compiled here. Those beside it may come from the index: INFERMESH_PREBUILT=0 never takes them."""

NUMPY_REFUSES = 65
"""Status of the check where numpy, which llama-cpp-python imports, needs instructions that the CPU does not show."""
CHECK = f"""
try:
    import numpy
except RuntimeError:
    raise SystemExit({NUMPY_REFUSES})
import llama_cpp
llama_cpp.llama_backend_init()
print(llama_cpp.llama_print_system_info().decode())
"""
HOST_TYPE = (
    "In a virtual machine give it the CPU type 'host' (host-passthrough) first: one like kvm64 hides instructions, and "
    "models run several times slower without. Else run again with"
)


def install(env: Environment, report: Reporter) -> None:
    """Install llama-cpp-python and what it imports; afterwards `import llama_cpp` is known to work.

    Raises InstallError: no compiler, a failed build, a CPU without the instructions of the build or of numpy.
    """
    options = BuildOptions.read(env.lock("llama-sdist"), env.environ)
    with report.phase("llama.cpp: its Python dependencies") as phase:
        env.pip("install", "--require-hashes", "-r", env.lock("llama"), phase=phase)

    store = wheel_store(env.environ, fallback=env.folder / "wheels") / options.key()
    built = store / BUILT_FOLDER
    built.mkdir(parents=True, exist_ok=True)
    prebuilt = takes_prebuilt(env.environ)
    with exclusive(store / "lock", on_wait=lambda: report.note("llama.cpp: waiting for another build of it")):
        if own := _wheel_in(built):
            report.note(f"llama.cpp: using the wheel built before, {own}")
            _install_kept(own, options, env, report)
        elif prebuilt and (kept := _wheel_in(store)):
            report.note(f"llama.cpp: using the wheel kept before, {kept}")
            _install_kept(kept, options, env, report)
        elif options.customized or not prebuilt or not _install_prebuilt(store, options, env, report):
            require_compiler(env.environ)
            _install_kept(build(built, options, env, report), options, env, report)


def takes_prebuilt(environ: Mapping[str, str]) -> bool:
    """Whether a wheel that was not compiled here may be installed.

    Those of the index are not on PyPI, so no lock holds their hashes; INFERMESH_PREBUILT=0 leaves them out.
    """
    return environ.get("INFERMESH_PREBUILT", "1") != "0"


def wheel_store(environ: Mapping[str, str], *, fallback: Path) -> Path:
    """The folder of wheels, shared by all checkouts of a user; `fallback` where home is not writable."""
    home = environ.get("HOME")
    cache = environ.get("XDG_CACHE_HOME") or (f"{home}/.cache" if home else None)
    if cache is None:
        return fallback
    store = Path(cache) / "infermesh" / "wheels"
    try:
        store.mkdir(parents=True, exist_ok=True)
    except OSError:
        return fallback
    return store if os.access(store, os.W_OK) else fallback


def _install_prebuilt(store: Path, options: BuildOptions, env: Environment, report: Reporter) -> bool:
    """Try the package's own wheel index. False when it is not reached, has no wheel for us, or the wheel won't run."""
    with tempfile.TemporaryDirectory(dir=store) as scratch, report.phase("llama.cpp: prebuilt wheel") as phase:
        download: list[str | Path] = [env.python, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        download += ["--index-url", PREBUILT_INDEX, "--timeout", str(PREBUILT_CONNECT_TIMEOUT_S), "--retries", "0"]
        download += ["--dest", scratch, f"llama-cpp-python=={options.version}"]
        try:
            run(download, log=env.log, timeout_s=PREBUILT_TIMEOUT_S, environ=env.environ, on_tick=phase.tick)
        except CommandFailed:
            phase.outcome = "none within reach"
            return False
        wheel = next(Path(scratch).glob("*.whl"))
        _install_wheel(wheel, env, phase)
        status = _check(env)
        if status != 0:
            phase.outcome = f"does not run on this machine (status {status})"
            return False
        wheel.replace(store / wheel.name)
    return True


def _wheel_in(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob("*.whl"))), None)


def _install_kept(wheel: Path, options: BuildOptions, env: Environment, report: Reporter) -> None:
    """Install a wheel of the store and see it run. Raises InstallError where it does not."""
    with report.phase("llama.cpp: installing") as phase:
        _install_wheel(wheel, env, phase)
        status = _check(env)
    if status == -signal.SIGILL and options.native:
        raise InstallError(f"{wheel} was built for another CPU: delete it and run again")
    if status == -signal.SIGILL:
        raise InstallError(
            "this CPU lacks instructions that the portable llama.cpp build uses (AVX2 and FMA on x86-64). "
            f"{HOST_TYPE} INFERMESH_NATIVE=1, or with --engine sim"
        )
    if status == NUMPY_REFUSES:
        raise InstallError(
            f"this CPU lacks instructions that numpy needs (x86-64-v2, such as SSE4.2). {HOST_TYPE} --engine sim"
        )
    if status != 0:
        raise InstallError(f"{wheel} does not run (status {status}): delete it and run again; see {env.log}")


def _install_wheel(wheel: Path, env: Environment, phase: Phase) -> None:
    # Forced: another build of the same version may be installed.
    env.pip("install", "--no-deps", "--no-index", "--force-reinstall", wheel, phase=phase)


def _check(env: Environment) -> int:
    """Load the library in a process of its own; its exit status, negative for a signal (SIGILL: a foreign CPU).

    Raises InstallError when it hangs.
    """
    with env.log.open("a") as log:
        try:
            return subprocess.run(
                [env.python, "-c", CHECK],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env.environ,
                timeout=CHECK_TIMEOUT_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            raise InstallError(f"llama.cpp did not load within {CHECK_TIMEOUT_S:.0f} s; see {env.log}") from None
