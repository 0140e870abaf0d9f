"""Engine processes, real ones: started, fed, crashed, orphaned and closed."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from schemas.errors import ErrorCode, MeshError
from schemas.job import ChatPrompt, TextPrompt
from schemas.sampling import Sampling
from tests.support.tiny_gguf import write_tiny_gguf
from worker.engines.base import (
    Capabilities,
    Errored,
    Event,
    Finished,
    LoadError,
    LoadFailed,
    LoadProgress,
    Report,
    Step,
    Submit,
    Tokens,
)
from worker.engines.conversation import EngineDied
from worker.engines.host import EngineProcess, start_engine
from worker.engines.last_words import LastWords
from worker.engines.llama.texts import text_limit
from worker.engines.llama_limits import LlamaLimits
from worker.engines.openai.settings import OpenAISettings
from worker.engines.pipes import FRAME_BYTES_MAX, FrameReader, encode_frame
from worker.engines.setup import LlamaSetup, OpenAISetup, SimSetup
from worker.engines.sim import SimSettings

DEADLINE_S = 20.0
ORPHAN_DEADLINE_S = 2.0
ROOT = Path(__file__).resolve().parents[3]

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, waits on a pidfd")


class Collector:
    """Takes the steps of an engine; tests wait for a fact about their events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.numbers: list[int] = []
        self._changed = asyncio.Event()

    def __call__(self, step: Step) -> None:
        self.events += step.events
        self.numbers.append(step.number)
        self._changed.set()

    async def until(self, fact: Callable[[list[Event]], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not fact(self.events):
                self._changed.clear()
                await self._changed.wait()

    async def told(self, number: int) -> None:
        """Until the step of that number was reported."""
        await self.until(lambda events: bool(self.numbers) and self.numbers[-1] >= number)

    async def finished(self, *keys: int) -> None:
        await self.until(lambda events: set(keys) <= {event.key for event in events if isinstance(event, Finished)})

    def text(self, key: int) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Tokens) and event.key == key)


def sim(**settings: Any) -> SimSetup:
    return SimSetup(SimSettings(**{"step_ms": 1.0, **settings}))


def request(key: int, tokens: int) -> Submit:
    return Submit(key, TextPrompt("how are you"), Sampling(max_tokens=tokens, seed=0), 0.0)


def expected_text(tokens: int) -> str:
    return "".join(f" tok{number}" for number in range(1, tokens + 1))


def gone_within(pid: int, seconds: float) -> bool:
    """Whether the process ends in time; one that nobody has reaped yet counts as ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


def write_script(folder: Path, script: str) -> str:
    """An executable that ignores its arguments and runs `script` in a shell."""
    path = folder / "engine.sh"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return str(path)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replaces the engine process by a shell script."""
    return lambda script: monkeypatch.setattr(sys, "executable", write_script(tmp_path, script))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_an_engine_loads_generates_and_closes(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def story() -> None:
        steps = Collector()
        stages: list[LoadProgress] = []
        engine = await start_engine(sim(slots=8), on_step=steps, on_progress=stages.append)
        assert engine.capabilities.slots == 8
        assert engine.capabilities.decode_tokens_per_s > 0
        assert [progress.stage for progress in stages] == ["starting", "warming up"]
        for key in range(1, 13):
            engine.submit(request(key, 40))
        await steps.finished(*range(1, 13))
        for key in range(1, 13):
            assert steps.text(key) == expected_text(40)
        assert steps.numbers == list(range(1, len(steps.numbers) + 1))
        await engine.close()
        assert str(await engine.wait()) == "exit code 0"

    run(story())


async def test_an_aborted_request_falls_silent_and_others_go_on() -> None:
    steps = Collector()
    engine = await EngineProcess.start(sim(slots=2), on_step=steps)
    engine.submit(request(1, 5000))
    engine.submit(request(2, 5000))
    await steps.until(lambda events: {event.key for event in events} == {1, 2})
    engine.abort(1)
    engine.abort(99)
    engine.submit(request(3, 3))
    await steps.finished(3)
    seen = len(steps.events)
    engine.submit(request(4, 3))
    engine.abort(2)
    await steps.finished(4)
    assert 1 not in {event.key for event in steps.events[seen:]}
    assert steps.text(1) != expected_text(5000)
    await engine.close()


async def test_commands_are_answered_by_a_step_whatever_comes_of_them() -> None:
    steps = Collector()
    engine = await EngineProcess.start(sim(), on_step=steps)
    engine.submit(request(1, 5000))
    engine.abort(1)
    await steps.told(1)
    engine.abort(99)
    await steps.told(2)
    assert steps.numbers == list(range(1, len(steps.numbers) + 1))
    await engine.close()


async def test_a_crash_is_told_with_its_signal() -> None:
    steps = Collector()
    engine = await EngineProcess.start(sim(), on_step=steps)
    engine.submit(request(1, 5000))
    await steps.until(bool)
    os.kill(engine.pid, signal.SIGSEGV)
    async with asyncio.timeout(DEADLINE_S):
        end = await engine.wait()
    assert end.returncode == -signal.SIGSEGV
    assert str(end) == "SIGSEGV"
    with pytest.raises(MeshError) as refusal:
        engine.submit(request(2, 1))
    assert refusal.value.code is ErrorCode.DRAINING
    engine.abort(1)
    await engine.close()


async def test_a_text_that_recurses_for_each_character_leaves_engine_and_neighbours_alone(tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "tekken.gguf", context=2048, extra={"tokenizer.ggml.pre": "tekken"})
    steps = Collector()
    setup = LlamaSetup(model, slots=2, threads=1, decode_threads=1, context=2048)
    engine = await EngineProcess.start(setup, on_step=steps)
    sampling = Sampling(max_tokens=64, seed=1, ignore_eos=True)
    engine.submit(Submit(1, TextPrompt("hello"), sampling, 0.0))
    engine.submit(Submit(2, TextPrompt("a" * text_limit(LlamaLimits(), context=2048)), sampling, 0.0))
    await steps.finished(1)
    await steps.until(lambda events: any(isinstance(event, Errored) for event in events))
    (refused,) = [event for event in steps.events if isinstance(event, Errored)]
    assert (refused.key, refused.error.code) == (2, ErrorCode.CONTEXT_LENGTH_EXCEEDED)
    await engine.close()


async def test_a_cancelled_wait_leaves_the_engine_alone() -> None:
    steps = Collector()
    engine = await EngineProcess.start(sim(), on_step=steps)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.wait(), timeout=0)
    engine.submit(request(1, 3))
    await steps.finished(1)
    await engine.close()
    assert (await engine.wait()).returncode == 0


async def test_a_load_failure_gives_the_engines_reason() -> None:
    with pytest.raises(LoadError, match="at least 1 slot, not 0"):
        await start_engine(sim(slots=0), on_step=Collector())


async def test_death_while_loading_names_the_signal_and_keeps_the_last_words(
    stand_in: Callable[[str], None],
) -> None:
    stand_in("echo first >&2; echo out of tiles >&2; kill -ILL $$")
    with pytest.raises(EngineDied, match="SIGILL") as death:
        await start_engine(sim(), on_step=Collector())
    assert death.value.exit.returncode == -signal.SIGILL
    assert death.value.stderr == ("first", "out of tiles")


async def test_an_illegal_instruction_is_answered_by_one_start_on_plainer_ones(
    stand_in: Callable[[str], None], tmp_path: Path
) -> None:
    report = tmp_path / "report.py"
    report.write_text(
        "import os\n"
        "from worker.engines.base import LoadFailed\n"
        "from worker.engines.pipes import FrameReader, encode_frame\n"
        "from worker.engines.setup import LlamaSetup\n"
        "(setup,) = FrameReader(LlamaSetup).feed(os.read(0, 65536))\n"
        "os.write(1, encode_frame(LoadFailed(f'{setup.model} {setup.use_extra_bufts}')))\n"
    )
    first = tmp_path / "first"
    stand_in(f"[ -e {first} ] || {{ touch {first}; kill -ILL $$; }}\nexec {sys.executable} {report}")
    setup = LlamaSetup(Path("/models/a.gguf"))
    with pytest.raises(LoadError, match=r"^/models/a\.gguf False$"):
        await start_engine(setup, on_step=Collector())


async def test_a_host_that_refuses_instructions_is_remembered_and_the_status_says_so(
    stand_in: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    refusing = tmp_path / "refusing.py"
    starts = tmp_path / "starts"
    refusing.write_text(
        "import os, signal\n"
        "from worker.engines import process\n"
        "load = process._load_llama\n"
        "def load_refused(setup, progress):\n"
        f"    open({str(starts)!r}, 'a').write(f'{{setup.use_extra_bufts}}\\n')\n"
        "    adapter = load(setup, progress)\n"
        "    if setup.use_extra_bufts:\n"
        "        adapter.warm_up = lambda: os.kill(os.getpid(), signal.SIGILL)\n"
        "    return adapter\n"
        "process._load_llama = load_refused\n"
        "process.main()\n"
    )
    setup = LlamaSetup(write_tiny_gguf(tmp_path / "tiny.gguf"), slots=1, threads=1)
    stand_in(f"exec {sys.executable} {refusing}")
    for expected in (["True", "False"], ["True", "False", "False"]):
        engine = await start_engine(setup, on_step=Collector())
        assert engine.capabilities.build.endswith("without repacked weights (this CPU refused their instructions)")
        assert starts.read_text().split() == expected
        await engine.close()


@linux
async def test_the_kernel_takes_the_engine_before_its_worker() -> None:
    engine = await EngineProcess.start(sim(), on_step=Collector())
    proc = Path("/proc")
    mine, its = (int((proc / pid / "oom_score_adj").read_text()) for pid in ("self", str(engine.pid)))
    assert its == max(mine, 500)
    assert os.getsid(engine.pid) == engine.pid
    assert engine.memory_bytes is not None
    assert 2**20 < engine.memory_bytes < 2**30
    await engine.close()


async def test_an_engine_that_is_not_ready_in_time_is_a_load_failure(stand_in: Callable[[str], None]) -> None:
    stand_in("exec sleep 600")
    with pytest.raises(LoadError, match=r"not ready within 0\.1 s \(engine_load_timeout_s\)"):
        await start_engine(sim(), on_step=Collector(), load_timeout_s=0.1)


async def test_a_server_gets_less_time_than_its_engine_so_that_the_reason_is_told() -> None:
    setup = OpenAISetup(OpenAISettings(url="http://127.0.0.1:1", ready_within_s=900.0))
    with pytest.raises(LoadError, match=r"engine\.ready_within_s \(900\) .* engine_load_timeout_s \(900\)"):
        await start_engine(setup, on_step=Collector())


@linux
async def test_a_cancelled_start_leaves_no_process(stand_in: Callable[[str], None], tmp_path: Path) -> None:
    loading = tmp_path / "loading.py"
    loading.write_text(
        "import os, time\n"
        "from worker.engines.base import LoadProgress\n"
        "from worker.engines.pipes import encode_frame\n"
        "os.write(1, encode_frame(LoadProgress(str(os.getpid()), 0.5)))\n"
        "time.sleep(600)\n"
    )
    stand_in(f"exec {sys.executable} {loading}")
    progress: asyncio.Queue[LoadProgress] = asyncio.Queue()
    start = asyncio.create_task(start_engine(sim(), on_step=Collector(), on_progress=progress.put_nowait))
    async with asyncio.timeout(DEADLINE_S):
        pid = int((await progress.get()).stage)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert gone_within(pid, 0)


async def test_an_engine_that_speaks_nonsense_is_killed(stand_in: Callable[[str], None]) -> None:
    stand_in(r"printf '\377\377\377\377nonsense'; exec sleep 600")
    with pytest.raises(EngineDied, match="SIGKILL"):
        await start_engine(sim(), on_step=Collector())


async def test_an_engine_whose_step_was_not_taken_is_killed() -> None:
    def refuse(step: Step) -> None:
        raise RuntimeError("no")

    engine = await EngineProcess.start(sim(), on_step=refuse)
    engine.submit(request(1, 5))
    async with asyncio.timeout(DEADLINE_S):
        assert str(await engine.wait()) == "SIGKILL"


async def test_output_of_libraries_does_not_reach_the_reports(stand_in: Callable[[str], None], tmp_path: Path) -> None:
    noisy = tmp_path / "noisy.py"
    noisy.write_text(
        "import os\n"
        "from worker.engines import process, sim\n"
        "class Noisy(sim.SimAdapter):\n"
        "    def step(self):\n"
        "        print('noise', flush=True)\n"
        "        os.write(1, b'noise')\n"
        "        assert os.read(0, 1) == b''\n"
        "        return super().step()\n"
        "process.SimAdapter = Noisy\n"
        "process.main()\n"
    )
    stand_in(f"exec {sys.executable} {noisy}")
    steps = Collector()
    engine = await EngineProcess.start(sim(), on_step=steps)
    engine.submit(request(1, 5))
    await steps.finished(1)
    assert steps.text(1) == expected_text(5)
    await engine.close()


async def test_a_failing_step_ends_the_process_without_a_word_of_the_prompt(
    stand_in: Callable[[str], None], tmp_path: Path
) -> None:
    failing = tmp_path / "failing.py"
    failing.write_text(
        "from worker.engines import process, sim\n"
        "class Failing(sim.SimAdapter):\n"
        "    def submit(self, command):\n"
        "        if command.key > 1: raise ValueError(command.prompt.text)\n"
        "        super().submit(command)\n"
        "process.SimAdapter = Failing\n"
        "process.main()\n"
    )
    words = tmp_path / "stderr"
    stand_in(f"exec {sys.executable} {failing} 2> {words}")
    engine = await EngineProcess.start(sim(), on_step=Collector())
    engine.submit(request(2, 5))
    async with asyncio.timeout(DEADLINE_S):
        assert str(await engine.wait()) == "exit code 70"
    told = words.read_text()
    assert re.fullmatch(r"engine failed: ValueError at failing\.py:4( < (arrivals|process)\.py:\d+)+\n", told), told


async def test_a_request_beyond_the_pipes_limit_is_refused() -> None:
    steps = Collector()
    engine = await EngineProcess.start(sim(), on_step=steps)
    too_long = Submit(1, TextPrompt("x" * FRAME_BYTES_MAX), Sampling(max_tokens=1, seed=0), 0.0)
    with pytest.raises(MeshError) as refusal:
        engine.submit(too_long)
    assert refusal.value.code is ErrorCode.BODY_TOO_LARGE
    engine.submit(request(2, 2))
    await steps.finished(2)
    await engine.close()


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**4000])
async def test_a_number_that_the_pipe_cannot_carry_is_refused(number: int) -> None:
    steps = Collector()
    engine = await EngineProcess.start(sim(), on_step=steps)
    messages = ({"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {"n": number}}}]},)
    with pytest.raises(MeshError) as refusal:
        engine.submit(Submit(1, ChatPrompt(messages), Sampling(max_tokens=1, seed=0), 0.0))
    assert refusal.value.code is ErrorCode.INVALID_VALUE
    engine.submit(request(2, 2))
    await steps.finished(2)
    await engine.close()


async def test_a_backlog_beyond_its_limit_refuses_submits_and_not_aborts() -> None:
    steps = Collector()
    engine = await EngineProcess.start(sim(), on_step=steps, backlog_bytes_max=100_000)
    os.kill(engine.pid, signal.SIGSTOP)
    prompt = TextPrompt("x" * 50_000)
    taken = 0

    def submit_many() -> None:
        nonlocal taken
        for key in range(1, 101):
            engine.submit(Submit(key, prompt, Sampling(max_tokens=2, seed=0), 0.0))
            taken = key

    with pytest.raises(MeshError) as refusal:
        submit_many()
    assert refusal.value.code is ErrorCode.OVERLOADED
    assert "100000 bytes (worker.engine_backlog_bytes_max)" in refusal.value.message
    assert taken >= 2
    engine.abort(1)
    os.kill(engine.pid, signal.SIGCONT)
    await steps.finished(*range(2, taken + 1))
    await engine.close()


async def test_close_ends_a_process_that_does_not_listen() -> None:
    engine = await EngineProcess.start(sim(), on_step=Collector())
    os.kill(engine.pid, signal.SIGSTOP)
    await engine.close(grace_s=0.05, terminate_s=0.05)
    assert str(await engine.wait()) == "SIGKILL"


async def test_ctrl_c_in_a_terminal_does_not_reach_the_engine() -> None:
    steps = Collector()
    engine = await EngineProcess.start(sim(), on_step=steps)
    os.kill(engine.pid, signal.SIGINT)
    engine.submit(request(1, 5))
    await steps.finished(1)
    await engine.close()


@linux
async def test_an_engine_holds_no_secret_and_dumps_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "secret-key-value")
    engine = await EngineProcess.start(sim(context=4321), on_step=Collector())
    proc = Path("/proc") / str(engine.pid)
    environment = (proc / "environ").read_bytes()
    assert b"secret-key-value" not in environment
    assert b"GGML_NO_BACKTRACE=1" in environment.split(b"\0"), "a debugger would hold its prompts"
    assert (proc / "cmdline").read_bytes().split(b"\0")[1:-1] == [b"-P", b"-m", b"worker.engines.process"]
    assert resource.prlimit(engine.pid, resource.RLIMIT_CORE) == (0, 0)
    await engine.close()


WORKER_SCRIPT = """
import asyncio, sys
from schemas.job import TextPrompt
from schemas.sampling import Sampling
from worker.engines.base import Submit
from worker.engines.host import EngineProcess
from worker.engines.setup import SimSetup
from worker.engines.sim import SimSettings

async def main(tokens):
    begun = asyncio.Event()
    setup = SimSetup(SimSettings(step_ms=1, context=2**31))
    engine = await EngineProcess.start(setup, on_step=lambda step: begun.set())
    if tokens:
        engine.submit(Submit(2, TextPrompt(""), Sampling(max_tokens=tokens, seed=0), 0.0))
        await begun.wait()
    print(engine.pid, flush=True)
    await engine.wait()

tokens, sys.executable = int(sys.argv[1]), sys.argv[2]
asyncio.run(main(tokens))
"""


def assert_orphan_ends(*, tokens: int, python: str = sys.executable) -> None:
    """A worker with an engine that generates `tokens` is killed; the engine must end too."""
    with subprocess.Popen(
        [sys.executable, "-c", WORKER_SCRIPT, str(tokens), python], cwd=ROOT, stdout=subprocess.PIPE
    ) as worker:
        assert worker.stdout is not None
        engine_pid = int(worker.stdout.readline())
        assert not gone_within(engine_pid, 0)
        worker.kill()
        assert gone_within(engine_pid, ORPHAN_DEADLINE_S)


@linux
@pytest.mark.parametrize("tokens", [pytest.param(0, id="idle"), pytest.param(10**9, id="stepping")])
def test_a_worker_killed_takes_its_engine_along(tokens: int) -> None:
    assert_orphan_ends(tokens=tokens)


@linux
def test_a_worker_killed_takes_an_engine_along_that_is_deep_in_a_step(tmp_path: Path) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import time\n"
        "from worker.engines import process, sim\n"
        "class Slow(sim.SimAdapter):\n"
        "    def step(self):\n"
        "        if self._running and 2 in self._running: time.sleep(600)\n"
        "        return super().step()\n"
        "process.SimAdapter = Slow\n"
        "process.main()\n"
    )
    assert_orphan_ends(tokens=10**9, python=write_script(tmp_path, f"exec {sys.executable} {slow}"))


def start_directly(setup: SimSetup, *commands: Submit) -> subprocess.Popen[bytes]:
    """An engine process without a host, past its loading."""
    engine = subprocess.Popen(
        [sys.executable, "-m", "worker.engines.process"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert engine.stdin is not None
    assert engine.stdout is not None
    engine.stdin.write(b"".join(encode_frame(message) for message in (setup, *commands)))
    engine.stdin.flush()
    reader: FrameReader[Report] = FrameReader(Report)
    while not any(isinstance(report, Capabilities) for report in reader.feed(os.read(engine.stdout.fileno(), 65536))):
        assert engine.poll() is None
    return engine


def test_an_idle_engine_ends_with_its_input() -> None:
    with start_directly(sim()) as engine:
        assert engine.stdin is not None
        engine.stdin.close()
        assert engine.wait(ORPHAN_DEADLINE_S) == 0


def test_a_stepping_engine_ends_with_its_input() -> None:
    with start_directly(sim(), request(1, 8000)) as engine:
        assert engine.stdin is not None
        engine.stdin.close()
        assert engine.wait(ORPHAN_DEADLINE_S) == 0


def test_an_engine_blocked_on_its_reports_ends_with_the_reader() -> None:
    with start_directly(sim(step_ms=0.0, context=2**31), request(1, 2**30)) as engine:
        assert engine.stdin is not None
        assert engine.stdout is not None
        engine.stdout.close()
        assert engine.wait(ORPHAN_DEADLINE_S) == 0


def test_a_command_before_the_setup_is_a_load_failure() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "worker.engines.process"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as engine:
        assert engine.stdin is not None
        assert engine.stdout is not None
        engine.stdin.write(encode_frame(request(1, 1)))
        engine.stdin.flush()
        reader: FrameReader[Report] = FrameReader(Report)
        (report,) = reader.feed(engine.stdout.read())
        assert isinstance(report, LoadFailed)
        assert "before its setup" in report.reason
        assert engine.wait(DEADLINE_S) == 1


def test_last_words_are_bounded_and_forgotten() -> None:
    words = LastWords()
    words.feed(b"".join(b"line %d\n" % number for number in range(1000)) + b"unfin")
    words.feed(b"ished " + b"x" * 100_000)
    assert words.lines()[0] == "line 980"
    assert words.lines()[-1].startswith("unfinished xxx")
    assert sum(map(len, words.lines())) < 10_000
    words.forget()
    words.feed(b"a prompt\n")
    assert words.lines() == ()
