"""`--set PART.NAME=VALUE`: whose settings it reaches in each command, and that they arrive where they belong."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner

from bus.connection import PAYLOAD_BYTES_MAX, BusSettings
from bus.server_config import ServerSettings
from tools.cli import engine_options as engine_module
from tools.cli import up as up_module
from tools.cli.bus import bus
from tools.cli.engine_options import EngineChoice, engine_options
from tools.cli.engine_settings import OPTION_ENGINES, resolve_engine
from tools.cli.gateway import gateway
from tools.cli.parts import PARTS, arguments, bus_settings, by_part
from tools.cli.settings import with_overrides
from tools.cli.up import up
from tools.cli.worker import worker
from tools.supervisor.mesh import MeshSettings
from worker.engines.llama.settings import LlamaSettings
from worker.engines.llama_limits import GrammarLimits, LlamaLimits
from worker.engines.openai.settings import OpenAISettings
from worker.engines.setup import LlamaSetup, OpenAISetup, SimSetup
from worker.engines.sim import SimSettings

BUS = BusSettings(url="nats://h:1", credentials=Path("/c"))
SERVER = ServerSettings(state_dir=Path("/s"))
OPENAI = ("--engine", "openai", "--model-id", "m", "--url", "http://h:1")


def choose(*words: str) -> EngineChoice:
    """The choice of a command with these options."""
    taken: list[EngineChoice] = []

    @click.command()
    @engine_options
    def command(choice: EngineChoice) -> None:
        """A command."""
        taken.append(choice)

    assert CliRunner().invoke(command, list(words), catch_exceptions=False).exit_code == 0
    return taken[0]


def refused(attempt: Callable[[], object]) -> str:
    """What an attempt is refused with: one line."""
    with pytest.raises(click.UsageError) as caught:
        attempt()
    assert "\n" not in caught.value.message
    return caught.value.message


# --- whose settings --------------------------------------------------------------------------------------------------


def test_each_part_gets_its_own_and_hands_it_on_under_its_name() -> None:
    given = ("gateway.keep_alive_s=1.5", " engine.slots = 2", "bus.ping_interval_s=1", "gateway.queue.ack_wait_s=3")
    found = by_part(given, parts=PARTS)
    assert found == {
        "gateway": ["keep_alive_s=1.5", "queue.ack_wait_s=3"],
        "worker": [],
        "engine": ["slots = 2"],
        "bus": ["ping_interval_s=1"],
        "server": [],
    }
    words = [word for part, overrides in found.items() for word in arguments(part, overrides)]
    assert by_part(words[1::2], parts=PARTS) == found


def test_a_command_of_one_part_may_leave_its_name_out() -> None:
    given = ("drain_limit_s=1", "worker.flush_limit_s=2", "bands.batch.floor=0.1", "engine.slots=3")
    assert by_part(given, parts=("worker", "engine"), own="worker") == {
        "worker": ["drain_limit_s=1", "flush_limit_s=2", "bands.batch.floor=0.1"],
        "engine": ["slots=3"],
    }


@pytest.mark.parametrize("override", ["keep_alive_s=1", "disk.port=1", "", "gateway=1", "x=gateway.port"])
def test_up_says_whose_settings_it_takes(override: str) -> None:
    said = refused(lambda: by_part([override], parts=PARTS))
    assert all(f"{part}.NAME=VALUE" in said for part in PARTS)
    assert repr(override) in said


@pytest.mark.parametrize(
    "command, words, override, takes",
    [
        (gateway, ["--creds", "x"], "engine.slots=1", "NAME=VALUE or bus.NAME=VALUE"),
        (gateway, ["--creds", "x"], "server.port=1", "NAME=VALUE or bus.NAME=VALUE"),
        (worker, ["--creds", "x"], "server.port=1", "NAME=VALUE or engine.NAME=VALUE or bus.NAME=VALUE"),
        (worker, ["--creds", "x"], "gateway.port=1", "NAME=VALUE or engine.NAME=VALUE or bus.NAME=VALUE"),
        (bus, [], "bus.ping_interval_s=1", "NAME=VALUE"),
    ],
)
def test_a_command_refuses_what_it_does_not_start(
    monkeypatch: pytest.MonkeyPatch, command: click.Command, words: list[str], override: str, takes: str
) -> None:
    monkeypatch.setattr(f"tools.cli.{command.name}.configure_logs", lambda level: None)
    run = CliRunner().invoke(command, [*words, "--set", override])
    assert run.exit_code == 2
    assert run.output.endswith(f"Error: --set takes {takes} here, not '{override}'\n")


# --- the bus and its server ------------------------------------------------------------------------------------------


def test_a_connection_is_as_its_settings_say() -> None:
    changed = bus_settings("nats://h:1", Path("/c"), ["ping_interval_s=0.5", "pings_outstanding_max=1"])
    assert changed == dataclasses.replace(BUS, ping_interval_s=0.5, pings_outstanding_max=1)


def test_addresses_are_given_by_their_options_alone() -> None:
    assert refused(lambda: bus_settings("nats://h:1", Path("/c"), ["url=nats://h:2"])).endswith("--bus says otherwise")
    assert bus_settings("nats://h:1", Path("/c"), ["url=nats://h:1"]) == BUS


@pytest.mark.parametrize("settings", [BUS, SERVER], ids=["bus", "server"])
def test_no_bound_of_the_bus_may_be_nothing(settings: Any) -> None:
    """Zero would be "without end" to nats-py or the server, or a loop without a pause."""
    free = {"port", "monitor_port", "stop_timeout_s"}
    for field in dataclasses.fields(settings):
        if isinstance(getattr(settings, field.name), int | float) and field.name not in free:
            for value in ("0", "-1", "nan", "x"):
                said = refused(lambda text=f"{field.name}={value}": with_overrides(settings, [text], part="p"))  # type: ignore[misc]
                assert said.startswith(f"--set p.{field.name}: ")


@pytest.mark.parametrize("name", ["outbound_bytes_max", "subscription_bytes_max"])
def test_a_connection_holds_a_message_of_the_largest_size(name: str) -> None:
    assert name in refused(lambda: with_overrides(BUS, [f"{name}={PAYLOAD_BYTES_MAX - 1}"]))
    assert with_overrides(BUS, [f"{name}={PAYLOAD_BYTES_MAX + 1}"]) != BUS


# --- engines ---------------------------------------------------------------------------------------------------------


def test_the_chosen_engine_gets_its_settings() -> None:
    model_id, setup = resolve_engine(choose("--engine", "sim", "--slots", "3"), ["step_ms=2.5", "slots=3"])
    assert (model_id, setup) == ("sim", SimSetup(SimSettings(slots=3, step_ms=2.5)))
    _, setup = resolve_engine(choose(*OPENAI), ["busy_retries_max=0", "api_key_file=/k", "context=none"])
    assert setup == OpenAISetup(OpenAISettings(url="http://h:1", busy_retries_max=0, api_key_file=Path("/k")))
    _, setup = resolve_engine(choose(*OPENAI, "--metrics-name", "running=a"), ["metric_waiting=b"])
    assert setup == OpenAISetup(OpenAISettings(url="http://h:1", metric_running="a", metric_waiting="b"))


def test_llama_gets_what_has_no_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "default_model_file", lambda: tmp_path / "m.gguf")
    _, setup = resolve_engine(choose("--threads", "2"), ["prefill_chunk=64", "mmap=off", "threads=2"])
    assert setup == LlamaSetup(tmp_path / "m.gguf", threads=2, prefill_chunk=64, mmap=False)
    assert refused(lambda: resolve_engine(choose(), [f"model={tmp_path}/n.gguf"])).endswith("--model says otherwise")
    assert "option of its own" in refused(lambda: resolve_engine(choose(), ["loras=a.gguf"]))
    for text, value in (("on", True), ("off", False), ("none", None)):
        _, setup = resolve_engine(choose(), [f"flash_attention={text}"])
        assert setup == LlamaSetup(tmp_path / "m.gguf", flash_attention=value)


@pytest.mark.parametrize(
    "override, said",
    [
        ("limits.text_byte_max=1", "engine.limits.text_byte_max: there is no such setting; did you mean text_bytes"),
        ("limits.grammar.schema_nesting_max=65", "engine.limits.grammar.schema_nesting_max: Expected `int` <= 64"),
        ("limits.template_render_s_max=0", "engine.limits.template_render_s_max: Expected `float` > 0"),
        ("limits.grammar=1", "engine.limits.grammar: name one of its settings: "),
    ],
)
def test_limits_of_llama_lie_one_and_two_levels_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, said: str
) -> None:
    monkeypatch.setattr(engine_module, "default_model_file", lambda: tmp_path / "m.gguf")
    _, setup = resolve_engine(choose(), ["limits.text_bytes_max=1000", "limits.grammar.enum_max=10"])
    limits = LlamaLimits(text_bytes_max=1000, grammar=GrammarLimits(enum_max=10))
    assert setup == LlamaSetup(tmp_path / "m.gguf", limits=limits)
    assert said in refused(lambda: resolve_engine(choose(), [override]))


def test_every_setting_of_the_llama_engine_can_be_given() -> None:
    known = {field.name for field in dataclasses.fields(LlamaSettings)}
    assert {field.name for field in msgspec.structs.fields(LlamaSetup)} == known


@pytest.mark.parametrize(
    "words, override, said",
    [
        (("--engine", "sim", "--slots", "3"), "slots=4", "--set engine.slots: --slots says otherwise"),
        (("--engine", "sim", "--sim-step-ms", "5"), "step_ms=6", "--set engine.step_ms: --sim-step-ms says otherwise"),
        (OPENAI, "url=http://h:2", "--set engine.url: --url says otherwise"),
        ((*OPENAI, "--metrics-name", "running=a"), "metric_running=b", "--metrics-name says otherwise"),
        (("--engine", "sim"), "slot=4", "--set engine.slot: there is no such setting; did you mean slots?"),
        (
            ("--engine", "sim"),
            "prefill_chunk=4",
            "there are slots, step_ms, prefill_tokens_per_s, contention, ",
        ),
        (("--engine", "sim"), "slots=0", "at least 1 slot"),
        (("--engine", "sim"), "context=1", "at least 2 tokens"),
        (("--engine", "sim"), "step_ms=nan", "--set engine.step_ms: it must be a number, 0 or more"),
        (("--engine", "sim"), "slots=many", "--set engine.slots: Expected `int`, got `str`"),
        (OPENAI, "token_timeout_s=0", "--set engine.token_timeout_s: Expected `float` > 0.0"),
        (OPENAI, "slots=0", "--set engine.slots: Expected `int` >= 1"),
        (OPENAI, "busy_retries_max=-1", "--set engine.busy_retries_max: Expected `int` >= 0"),
        (OPENAI, "ready_within_s=0", "--set engine.ready_within_s: Expected `float` > 0.0"),
    ],
)
def test_what_an_engine_cannot_be_is_said_by_name(words: tuple[str, ...], override: str, said: str) -> None:
    assert said in refused(lambda: resolve_engine(choose(*words), [override]))


@pytest.mark.parametrize(
    "words, said",
    [
        (("--url", "http://h:1", "--model-id", "m"), "--url is for --engine openai; this is --engine llama"),
        (("--engine", "sim", "--lora", "x.gguf"), "--lora is for --engine llama; this is --engine sim"),
        (("--engine", "sim", "--kv-type", "f16"), "--kv-type is for --engine llama; this is --engine sim"),
        (("--engine", "sim", "--decode-threads", "0"), "--decode-threads is for --engine llama; this is --engine sim"),
        (("--engine", "sim", "--mmproj", "x"), "--mmproj is for --engine llama; this is --engine sim"),
        (("--sim-contention", "0"), "--sim-contention is for --engine sim; this is --engine llama"),
        (("--metrics-name", "running=a"), "--metrics-name is for --engine openai; this is --engine llama"),
        ((*OPENAI, "--model", "x"), "--model is for --engine llama and --engine sim; this is --engine openai"),
    ],
)
def test_an_option_of_another_engine_is_refused(words: tuple[str, ...], said: str) -> None:
    assert refused(lambda: resolve_engine(choose(*words), [])) == said


def test_options_of_several_engines_are_taken_by_each() -> None:
    shared = ("--model-id", "m", "--slots", "2", "--context", "64")
    assert resolve_engine(choose("--engine", "sim", "--model", "x", *shared), [])[0] == "m"
    assert resolve_engine(choose(*OPENAI, *shared), [])[0] == "m"


def test_every_option_of_an_engine_is_known_to_be_its_own() -> None:
    @click.command()
    @engine_options
    def command(choice: EngineChoice) -> None:
        """A command."""

    options = {name for parameter in command.params for name in parameter.opts}
    assert options - {"--engine", "--model-id"} == OPTION_ENGINES.keys()


# --- up --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., MeshSettings]:
    """The mesh that `infermesh up` with these arguments would run."""
    started: list[MeshSettings] = []

    class Mesh:
        def __init__(self, settings: MeshSettings, display: object) -> None:
            started.append(settings)

        async def run(self, stop: object, *, on_ready: object) -> None:
            """It is over at once."""

    monkeypatch.setattr(up_module, "Mesh", Mesh)
    monkeypatch.setattr(up_module, "configure_logs", lambda level: None)
    monkeypatch.setattr(up_module, "run_until_signal", lambda work: asyncio.run(work(asyncio.Event())))

    def run(*words: str) -> MeshSettings:
        where = ("--engine", "sim", "--bus-port", "0", "--port", "0", "--state-dir", str(tmp_path / "state"))
        result = CliRunner().invoke(up, [*where, *words])
        if result.exit_code:
            raise click.UsageError(result.output.splitlines()[-1])
        return started[-1]

    return run


def test_up_hands_each_setting_to_the_processes_it_concerns(start: Callable[..., MeshSettings]) -> None:
    settings = start(
        *("--set", "gateway.keep_alive_s=1", "--set", "worker.drain_limit_s=2", "--set", "engine.slots=3"),
        *("--set", "bus.ping_interval_s=4", "--set", "server.connections_max=5", "--slots", "3"),
    )
    bus_words = ("--set", "bus.ping_interval_s=4")
    assert settings.gateway_arguments == ("--set", "gateway.keep_alive_s=1", *bus_words)
    assert settings.worker_arguments == (
        *("--engine", "sim", "--slots", "3"),
        *("--set", "worker.drain_limit_s=2", "--set", "engine.slots=3", *bus_words),
    )
    assert settings.server.connections_max == 5


def test_addresses_of_up_may_be_settings_too(start: Callable[..., MeshSettings]) -> None:
    settings = start("--set", "gateway.admin_port=7001", "--set", "gateway.host=::1", "--set", "server.host=::1")
    assert (settings.host, settings.admin_port, settings.server.host) == ("::1", 7001, "::1")
    assert settings.gateway_arguments == (), "they reach the gateway as options"


@pytest.mark.parametrize(
    "override, said",
    [
        ("gateway.port=7000", "--set gateway.port: --port says otherwise"),
        ("server.port=7000", "--set server.port: --bus-port says otherwise"),
        ("server.state_dir=/x", "--set server.state_dir: --state-dir says otherwise"),
        ("bus.url=nats://h:1", "--set bus.url: the embedded server says otherwise"),
        ("bus.ping_interval_s=0", "--set bus.ping_interval_s: Expected `float` > 0.0"),
        ("gateway.keep_alive=1", "--set gateway.keep_alive: there is no such setting; did you mean keep_alive_s?"),
        ("worker.bands=x", "--set worker.bands: there is no band 'x' in this mesh"),
        ("server.payload_bytes_max=100000000", "payload_bytes_max must not exceed pending_bytes_max"),
        ("gateway.queue.queued_jobs_max", "--set takes gateway.NAME=VALUE, not 'gateway.queue.queued_jobs_max'"),
        ("worker.beat_interval_s=1.2", "worker.beat_interval_s * 3 <= gateway.worker_lost_after_s does not hold"),
    ],
)
def test_up_refuses_what_no_part_would_take(start: Callable[..., MeshSettings], override: str, said: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        start("--set", override)
    assert said in caught.value.message


def test_workers_of_up_may_beat_as_seldom_as_its_gateway_waits(start: Callable[..., MeshSettings]) -> None:
    settings = start("--set", "worker.beat_interval_s=2", "--set", "gateway.worker_lost_after_s=6")
    assert settings.worker_arguments[-2:] == ("--set", "worker.beat_interval_s=2")
