"""Compiles llama-cpp-python from its locked source into a wheel."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.installer.environment import Environment, fingerprint
from tools.installer.errors import InstallError
from tools.installer.process import CommandFailed, run
from tools.installer.report import Phase, Reporter

BUILD_TIMEOUT_S = 3600.0
VENV_TIMEOUT_S = 60.0

PORTABLE_ARGS = "-DGGML_NATIVE=OFF"
NATIVE_ARGS = "-DGGML_NATIVE=ON"
# The multimodal library is a quarter of the build, and no engine of ours calls it.
TEXT_ONLY_ARGS = "-DLLAVA_BUILD=OFF"
# Holds the reason for another quarter.
LLAMA_ONLY = Path(__file__).with_name("llama_only.cmake")
COMPILER_VARIABLES = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS")

WITHOUT_LLAMA = "; or do without it: ./tools/up --engine sim"
NO_COMPILER = (
    "building llama.cpp needs a C and C++ compiler: apt install build-essential (Debian, Ubuntu), "
    "dnf install gcc-c++ (Fedora), xcode-select --install (macOS)" + WITHOUT_LLAMA
)


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """How llama.cpp is compiled. Builds with equal options can take each other's place on this machine."""

    version: str
    cmake_args: str
    native: bool
    compiler: tuple[str, ...]
    customized: bool

    @staticmethod
    def read(lock: Path, environ: Mapping[str, str]) -> BuildOptions:
        """The version from the lock file, the rest from CMAKE_ARGS, INFERMESH_NATIVE and the compiler's variables.

        The user's CMAKE_ARGS come last, and CMake lets the last one win.
        """
        found = re.search(r"^llama-cpp-python==(\S+)", lock.read_text(), re.MULTILINE)
        assert found is not None, f"{lock} does not pin llama-cpp-python"
        native = environ.get("INFERMESH_NATIVE", "0") == "1"
        own = environ.get("CMAKE_ARGS", "")
        compiler = tuple(f"{name}={environ[name]}" for name in COMPILER_VARIABLES if environ.get(name))
        return BuildOptions(
            version=found[1],
            cmake_args=" ".join(filter(None, (NATIVE_ARGS if native else PORTABLE_ARGS, TEXT_ONLY_ARGS, own))),
            native=native,
            compiler=compiler,
            customized=native or bool(own) or bool(compiler),
        )

    def key(self) -> str:
        """The folder of such a build in the cache. A native build belongs to one machine: home folders are shared."""
        host = platform.node() if self.native else ""
        where = (sysconfig.get_platform(), *platform.libc_ver())
        return f"{self.version}-{fingerprint([LLAMA_ONLY], self.cmake_args, host, *where, *self.compiler)[:16]}"


def require_compiler(environ: Mapping[str, str]) -> None:
    """Raise InstallError, naming the packages to install, where there is no C or C++ compiler."""
    for variable, names in (("CC", ("cc", "gcc", "clang")), ("CXX", ("c++", "g++", "clang++"))):
        candidates = (environ[variable].split()[0],) if environ.get(variable, "").strip() else names
        if not any(shutil.which(name, path=environ.get("PATH")) for name in candidates):
            raise InstallError(NO_COMPILER)


def build(store: Path, options: BuildOptions, env: Environment, report: Reporter) -> Path:
    """Compile the source, whose hash is checked, with tools whose hashes are checked, and keep the wheel."""
    with (
        tempfile.TemporaryDirectory(dir=store) as scratch,
        report.phase(f"llama.cpp: building {options.version}") as phase,
    ):
        workshop = Path(scratch)
        python = _build_environment(workshop / "venv", env, phase)

        phase.step("fetching the source")
        # The build tools are in place, so pip neither isolates the build nor fetches tools without a hash.
        pip: list[str | Path] = [env.python, "-m", "pip", "--python", python]
        fetch = [*pip, "download", "--no-deps", "--no-build-isolation", "--no-binary", "llama-cpp-python"]
        fetch += ["--require-hashes", "--dest", workshop, "-r", env.lock("llama-sdist")]
        make = [*pip, "wheel", "--verbose", "--no-deps", "--no-index", "--no-build-isolation", "--no-cache-dir"]
        make += ["--wheel-dir", workshop]
        environ = {
            **env.environ,
            "CMAKE_ARGS": f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={shlex.quote(str(LLAMA_ONLY))} {options.cmake_args}",
            "CMAKE_BUILD_PARALLEL_LEVEL": env.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1)),
            # Inside the scratch folder: it goes with it when the build is interrupted.
            "TMPDIR": str(workshop),
            "PATH": f"{python.parent}{os.pathsep}{env.environ.get('PATH', os.defpath)}",
        }

        def show(line: str) -> None:
            progress = build_progress(line)
            if progress is not None:
                phase.step(progress)

        try:
            run(fetch, log=env.log, timeout_s=BUILD_TIMEOUT_S, environ=environ, on_tick=phase.tick)
            phase.step("configuring")
            source = next(workshop.glob("*.tar.gz"))
            run(
                [*make, source],
                log=env.log,
                timeout_s=BUILD_TIMEOUT_S,
                environ=environ,
                on_line=show,
                on_tick=phase.tick,
            )
        except CommandFailed as failure:
            raise env.failure("building llama.cpp failed", failure, advice=WITHOUT_LLAMA) from None
        wheel = next(workshop.glob("*.whl"))
        return wheel.replace(store / wheel.name)


def _build_environment(folder: Path, env: Environment, phase: Phase) -> Path:
    """A throw-away environment with the locked build tools; returns its Python."""
    phase.step("installing the build tools")
    try:
        run(
            [env.python, "-m", "venv", "--without-pip", folder],
            log=env.log,
            timeout_s=VENV_TIMEOUT_S,
            environ=env.environ,
        )
    except CommandFailed as failure:
        raise env.failure("cannot create the build environment", failure) from None
    python = folder / "bin" / "python"
    env.pip("install", "--require-hashes", "-r", env.lock("llama-build"), phase=phase, into=python)
    return python


def build_progress(line: str) -> str | None:
    """What a line of the build's output says about its progress: ninja begins its lines with `[12/142]`."""
    found = re.match(r"\s*\[(\d+)/(\d+)\] ", line)
    return f"compiling {found[1]}/{found[2]}" if found else None
