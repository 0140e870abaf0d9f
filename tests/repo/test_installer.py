"""The installer's promises: nothing done twice, nothing half done kept, no process left, errors that say what to do."""

from __future__ import annotations

import io
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.installer import llama
from tools.installer.__main__ import wanted_parts
from tools.installer.environment import Environment, exclusive, fingerprint
from tools.installer.errors import InstallError
from tools.installer.llama_build import BuildOptions, build_progress
from tools.installer.process import CommandFailed, run
from tools.installer.report import Reporter, elapsed

ROOT = Path(__file__).resolve().parents[2]
CHILD_TIMEOUT_S = 20.0


@pytest.fixture
def env(tmp_path: Path) -> Environment:
    """An environment with a stamp folder and nothing installed."""
    (tmp_path / ".venv" / "stamps").mkdir(parents=True)
    return Environment(tmp_path, environ={"PATH": os.environ["PATH"], "PYTHONPATH": "elsewhere"})


@pytest.fixture
def sdist_lock(tmp_path: Path) -> Path:
    lock = tmp_path / "llama-sdist.lock"
    lock.write_text("# comment\nllama-cpp-python==1.2.3 \\\n    --hash=sha256:00\n")
    return lock


class TestStamps:
    def test_a_part_is_held_once_its_installation_ended(self, env: Environment) -> None:
        with env.installing("part", "mark"):
            assert not env.holds("part", "mark")
        assert env.holds("part", "mark")
        assert not env.holds("part", "other mark")

    def test_an_interrupted_installation_does_not_count_even_over_an_old_one(self, env: Environment) -> None:
        with env.installing("part", "mark"):
            pass
        with pytest.raises(KeyboardInterrupt), env.installing("part", "mark"):
            raise KeyboardInterrupt
        assert not env.holds("part", "mark")

    def test_an_environment_that_was_moved_is_not_usable(self, env: Environment) -> None:
        with env.installing("venv", "/another/checkout/.venv"):
            pass
        assert not env.is_usable()

    def test_fingerprints_see_content_order_and_boundaries(self, tmp_path: Path) -> None:
        one, two = tmp_path / "one", tmp_path / "two"
        one.write_text("ab")
        two.write_text("c")
        marks = {
            fingerprint([one, two]),
            fingerprint([two, one]),
            fingerprint([one], "c", ""),
            fingerprint([one], "", "c"),
            fingerprint([], "a", "bc"),
        }
        assert len(marks) == 5


class TestLock:
    def test_a_second_installer_is_told_to_wait(self, tmp_path: Path) -> None:
        lock = tmp_path / "lock"
        holder = (
            "import fcntl, sys\n"
            f"lock = open({str(lock)!r}, 'w')\n"
            "fcntl.flock(lock, fcntl.LOCK_EX)\n"
            "print('held', flush=True)\n"
            "sys.stdin.read()\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            assert child.stdout.readline() == "held\n"
            # The holder lets go only when told that somebody waits: without that call this would never end.
            with exclusive(lock, on_wait=child.stdin.close):
                assert child.stdin.closed


class TestProcess:
    def test_output_goes_to_the_log_and_to_the_reader(self, tmp_path: Path) -> None:
        lines: list[str] = []
        log = tmp_path / "log"
        code = "import sys; print('out'); print('err', file=sys.stderr); print('no newline', end='')"
        run(
            [sys.executable, "-u", "-c", code],
            log=log,
            timeout_s=CHILD_TIMEOUT_S,
            environ=os.environ,
            on_line=lines.append,
        )
        assert lines == ["out", "err", "no newline"]
        assert log.read_text().splitlines()[1:] == lines

    def test_a_failure_carries_the_last_lines(self, tmp_path: Path) -> None:
        code = "import sys; [print(n) for n in range(100)]; sys.exit(3)"
        with pytest.raises(CommandFailed, match="exit status 3") as caught:
            run([sys.executable, "-c", code], log=tmp_path / "log", timeout_s=CHILD_TIMEOUT_S, environ=os.environ)
        assert caught.value.tail[-1] == "99"
        assert len(caught.value.tail) < 100

    def test_at_the_deadline_the_whole_process_group_ends(self, tmp_path: Path) -> None:
        grandchild = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(600)"
        code = f"import subprocess, sys; subprocess.run([sys.executable, '-uc', {grandchild!r}], close_fds=False)"
        lines: list[str] = []
        # Both inherit the writing end, so the pipe is at its end when neither is left.
        reading, writing = os.pipe()
        os.set_inheritable(writing, True)
        with open(reading, "rb") as pipe:
            with pytest.raises(CommandFailed, match="not finished after 2 s"):
                run(
                    [sys.executable, "-c", code],
                    log=tmp_path / "log",
                    timeout_s=2.0,
                    environ=os.environ,
                    on_line=lines.append,
                )
            os.close(writing)
            assert select.select([pipe], [], [], CHILD_TIMEOUT_S)[0]
            assert pipe.read() == b""
        assert lines == ["up"]


class TestBuildOptions:
    def test_the_default_is_portable_and_the_users_arguments_win(self, sdist_lock: Path) -> None:
        options = BuildOptions.read(sdist_lock, {"CMAKE_ARGS": "-DGGML_NATIVE=ON"})
        assert options.version == "1.2.3"
        assert options.cmake_args.startswith("-DGGML_NATIVE=OFF ")
        assert options.cmake_args.endswith(" -DGGML_NATIVE=ON")
        assert options.customized

    def test_builds_with_other_flags_never_share_a_wheel(self, sdist_lock: Path) -> None:
        environments: list[dict[str, str]] = [
            {},
            {"INFERMESH_NATIVE": "1"},
            {"CMAKE_ARGS": "-DGGML_CUDA=ON"},
            {"CFLAGS": "-march=native"},
        ]
        assert len({BuildOptions.read(sdist_lock, environ).key() for environ in environments}) == 4

    def test_only_the_default_build_may_come_prebuilt(self, sdist_lock: Path) -> None:
        assert not BuildOptions.read(sdist_lock, {}).customized
        assert BuildOptions.read(sdist_lock, {"INFERMESH_NATIVE": "1"}).customized

    @pytest.mark.parametrize(
        "line, progress",
        [
            ("  [12/142] /usr/bin/g++ -DGGML_BUILD -c ggml.cpp", "compiling 12/142"),
            ("[142/142] : && /usr/bin/g++", "compiling 142/142"),
            ("-- Configuring done", None),
            ("array[1/2] is no progress", None),
        ],
    )
    def test_progress_is_read_from_ninja(self, line: str, progress: str | None) -> None:
        assert build_progress(line) == progress


class TestWheelStore:
    def test_it_is_in_the_users_cache(self, tmp_path: Path) -> None:
        store = llama.wheel_store({"HOME": str(tmp_path)}, fallback=tmp_path / "fallback")
        assert store == tmp_path / ".cache" / "infermesh" / "wheels"
        assert store.is_dir()

    def test_without_a_home_it_is_in_the_environment(self, tmp_path: Path) -> None:
        assert llama.wheel_store({}, fallback=tmp_path) == tmp_path

    def test_a_home_that_cannot_hold_folders_is_no_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        assert llama.wheel_store({"XDG_CACHE_HOME": str(tmp_path / "file")}, fallback=tmp_path) == tmp_path


class TestReport:
    def test_a_phase_leaves_one_line(self) -> None:
        stream = io.StringIO()
        with Reporter(stream).phase("work") as phase:
            phase.step("half")
        assert stream.getvalue() == "work: done (0 s)\n"

    def test_a_terminal_sees_the_steps_in_one_line(self) -> None:
        stream = Terminal()
        with Reporter(stream).phase("work") as phase:
            phase.step("half")
        assert "\r\x1b[2Kwork: half (0 s)" in stream.getvalue()
        assert stream.getvalue().count("\n") == 1

    def test_a_phase_can_end_in_something_else_than_done(self) -> None:
        stream = io.StringIO()
        with Reporter(stream).phase("search") as phase:
            phase.outcome = "nothing found"
        assert stream.getvalue() == "search: nothing found (0 s)\n"

    def test_a_failed_phase_is_not_called_done(self) -> None:
        stream = io.StringIO()
        with pytest.raises(InstallError), Reporter(stream).phase("work"):
            raise InstallError("no")
        assert "done" not in stream.getvalue()

    @pytest.mark.parametrize("seconds, text", [(0.9, "0 s"), (59.9, "59 s"), (125.0, "2 min 05 s")])
    def test_elapsed(self, seconds: float, text: str) -> None:
        assert elapsed(seconds) == text


@pytest.mark.parametrize(
    "arguments, needs",
    [
        ([], ""),
        (["--workers", "2"], ""),
        (["--engine", "sim"], "--no-llama"),
        (["--port", "0", "--engine=sim"], "--no-llama"),
        (["--engine", "openai", "--url", "http://h"], "--no-llama"),
        (["--engine=openai"], "--no-llama"),
        (["--engine", "llama"], ""),
        (["--engine", "sim", "--engine", "llama"], ""),
        (["--model-id", "sim"], ""),
        (["--help"], "--no-llama"),
        (["-h", "--engine", "llama"], "--no-llama"),
    ],
)
def test_up_installs_llama_only_where_it_is_used(tmp_path: Path, arguments: list[str], needs: str) -> None:
    tools = tmp_path / "a checkout" / "tools"
    tools.mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "up", tools)
    (tools / "install").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tools / "install").chmod(0o700)
    result = subprocess.run(
        [tools / "up", *arguments], capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=True
    )
    command = [str(tools.parent / ".venv" / "bin" / "infermesh"), "up", *arguments]
    assert result.stdout.splitlines() == [*needs.split(), "--", *command]


def test_a_missing_python_is_one_line(tmp_path: Path) -> None:
    result = install_script("--no-llama", INFERMESH_PYTHON=str(tmp_path / "python"))
    assert result.returncode == 1
    assert result.stderr.startswith("error: no Python 3.11 or newer found")
    assert result.stderr.count("\n") == 1


def test_a_missing_compiler_names_the_packages_and_the_way_without(env: Environment, sdist_lock: Path) -> None:
    (env.root / "requirements").mkdir()
    sdist_lock.rename(env.lock("llama-sdist"))
    bare = Environment(env.root, environ={"PATH": str(env.root), "HOME": str(env.root), "INFERMESH_PREBUILT": "0"})
    bare.python.parent.mkdir()
    bare.python.symlink_to(shutil.which("true") or "")  # stands in for the pip call that installs the dependencies
    with pytest.raises(InstallError, match=r"build-essential.*gcc-c\+\+.*xcode-select.*--engine sim"):
        llama.install(bare, Reporter(io.StringIO()))


@pytest.mark.parametrize(
    "native, ends, advice",
    [
        ("0", "kill -ILL $$", "that the portable.*CPU type 'host'.* Else run again with INFERMESH_NATIVE=1"),
        ("1", "kill -ILL $$", "built for another CPU: delete it"),
        ("0", f"exit {llama.NUMPY_REFUSES}", "that numpy needs.*CPU type 'host'.* Else run again with --engine sim"),
        ("0", "exit 1", "does not run .status 1.: delete it and run again"),
    ],
    ids=["portable", "native", "numpy", "broken"],
)
def test_a_wheel_for_another_cpu_is_told_from_a_broken_one(
    env: Environment, sdist_lock: Path, native: str, ends: str, advice: str
) -> None:
    (env.root / "requirements").mkdir()
    sdist_lock.rename(env.lock("llama-sdist"))
    environ = {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(env.root), "INFERMESH_NATIVE": native}
    store = llama.wheel_store(environ, fallback=env.root) / BuildOptions.read(env.lock("llama-sdist"), environ).key()
    store.mkdir()
    (store / "llama_cpp_python-1.2.3-py3-none-any.whl").write_text("")
    env.python.parent.mkdir()
    # Stands in for pip, which succeeds, and for loading the library, which does not.
    env.python.write_text(f'#!/bin/sh\n[ "$1" = -m ] || {ends}\n')
    env.python.chmod(0o700)
    with pytest.raises(InstallError, match=advice):
        llama.install(Environment(env.root, environ=environ), Reporter(io.StringIO()))


@pytest.mark.parametrize(
    "numpy, status", [("raise RuntimeError('built with baseline optimizations')", llama.NUMPY_REFUSES), ("", 0)]
)
def test_a_numpy_that_refuses_the_cpu_is_told_from_a_broken_library(tmp_path: Path, numpy: str, status: int) -> None:
    (tmp_path / "numpy.py").write_text(numpy)
    (tmp_path / "llama_cpp.py").write_text(
        "llama_backend_init = lambda: None\nllama_print_system_info = lambda: b'CPU'\n"
    )
    done = subprocess.run([sys.executable, "-c", llama.CHECK], env={"PYTHONPATH": str(tmp_path)}, check=False)
    assert done.returncode == status


# Stands in for Python: `-m pip download` puts a wheel into the folder after --dest, all other pip commands succeed, and
# loading the library (`-c`) ends with the status that is filled in.
PYTHON_WITH_AN_INDEX = """#!/bin/sh
[ "$1" = -c ] && exit {status}
while [ $# -gt 0 ]; do
    [ "$1" = --dest ] && : > "$2/llama_cpp_python-1.2.3-py3-none-any.whl"
    shift
done
exit 0
"""


@pytest.mark.parametrize("runs", [True, False], ids=["runs", "does not run"])
def test_a_prebuilt_wheel_is_kept_if_it_runs_and_else_one_is_built(
    env: Environment, sdist_lock: Path, runs: bool
) -> None:
    (env.root / "requirements").mkdir()
    sdist_lock.rename(env.lock("llama-sdist"))
    env.python.parent.mkdir()
    env.python.write_text(PYTHON_WITH_AN_INDEX.format(status=0 if runs else 1))
    env.python.chmod(0o700)
    without_compiler = Environment(env.root, environ={"PATH": str(env.root), "XDG_CACHE_HOME": str(env.root)})
    output = io.StringIO()
    if runs:
        llama.install(without_compiler, Reporter(output))
        assert "prebuilt wheel: done" in output.getvalue()
    else:
        with pytest.raises(InstallError, match="needs a C and C"):
            llama.install(without_compiler, Reporter(output))
        assert "prebuilt wheel: does not run on this machine (status 1)" in output.getvalue()
    assert len(list((env.root / "infermesh").rglob("*.whl"))) == (1 if runs else 0)


@pytest.mark.parametrize("folder, taken", [("", False), (llama.BUILT_FOLDER, True)], ids=["prebuilt", "built here"])
def test_only_wheels_built_here_are_taken_where_prebuilt_ones_are_not_wanted(
    env: Environment, sdist_lock: Path, folder: str, taken: bool
) -> None:
    (env.root / "requirements").mkdir()
    sdist_lock.rename(env.lock("llama-sdist"))
    env.python.parent.mkdir()
    env.python.write_text(PYTHON_WITH_AN_INDEX.format(status=0))
    env.python.chmod(0o700)
    environ = {"PATH": str(env.root), "XDG_CACHE_HOME": str(env.root)}
    store = llama.wheel_store(environ, fallback=env.root) / BuildOptions.read(env.lock("llama-sdist"), environ).key()
    (store / folder).mkdir(parents=True)
    (store / folder / "llama_cpp_python-1.2.3-py3-none-any.whl").write_text("")
    output = io.StringIO()
    llama.install(Environment(env.root, environ=environ), Reporter(output))
    assert f"using the wheel {'built' if taken else 'kept'} before, {store}" in output.getvalue()
    unwanted = Environment(env.root, environ=environ | {"INFERMESH_PREBUILT": "0"})
    if taken:
        llama.install(unwanted, Reporter(output))
    else:
        with pytest.raises(InstallError, match="needs a C and C"):
            llama.install(unwanted, Reporter(output))


def test_an_installation_with_a_prebuilt_wheel_does_not_count_where_none_is_wanted() -> None:
    def mark(**environ: str) -> str:
        parts = wanted_parts(Environment(ROOT, environ=environ), dev=False, with_llama=True)
        return next(part.mark for part in parts if part.name == "llama")

    assert mark() == mark(INFERMESH_PREBUILT="1") != mark(INFERMESH_PREBUILT="0")


BECOME = """
import os, pathlib, sys
from tools.installer import __main__ as installer
installer.ROOT = pathlib.Path(sys.argv[1])
installer.ensure = installer.wanted_parts = lambda *_, **__: None
sys.exit(installer.main(["--", *sys.argv[2:]]))
"""
"""The installer with nothing to install."""


def test_a_command_is_found_in_the_environment_and_sees_it_first(env: Environment) -> None:
    env.python.parent.mkdir()
    program = env.python.parent / "infermesh"
    program.write_text('#!/bin/sh\necho "$0 $1 $PYTHONPATH $PATH"\n')
    program.chmod(0o700)
    found = become(env, "infermesh", "x")
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout == f"{program} x  {env.python.parent}:{os.environ['PATH']}\n"


def test_a_command_that_is_not_there_is_one_line(env: Environment) -> None:
    missing = become(env, "no-such-command")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr == "error: cannot run no-such-command: No such file or directory\n"


def become(env: Environment, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BECOME, env.root, *command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=CHILD_TIMEOUT_S,
        check=False,
    )


def test_pip_errors_show_their_last_lines_and_the_log(env: Environment) -> None:
    env.python.parent.mkdir()
    env.python.write_text("#!/bin/sh\necho the reason\nexit 1\n")
    env.python.chmod(0o700)
    with Reporter(io.StringIO()).phase("work") as phase, pytest.raises(InstallError) as caught:
        env.pip("install", "x", phase=phase)
    assert "the reason" in str(caught.value)
    assert str(env.log) in str(caught.value)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def install_script(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "tools" / "install", *arguments],
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=CHILD_TIMEOUT_S,
        check=False,
    )
