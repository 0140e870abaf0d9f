"""Which engine the options mean, and that `up` hands them to its workers unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from schemas.names import InvalidName
from tools.cli import engine_options as module
from tools.cli.engine_options import EngineChoice, KvType, PrefixCacheMode, engine_options
from tools.cli.openai_options import OpenAIChoice
from worker.engines.base import LoadError
from worker.engines.llama.cache import PrefixCache
from worker.engines.llama.settings import KV_TYPE_BYTES
from worker.engines.lora import Lora
from worker.engines.openai.settings import OpenAISettings
from worker.engines.setup import LlamaSetup, OpenAISetup, SimSetup
from worker.models import DEFAULT_MODEL_ID, ModelFileMissing, default_model_file


def parse(*arguments: str) -> EngineChoice:
    """The choice that a command with these options gets."""
    taken: list[EngineChoice] = []

    @click.command()
    @engine_options
    @click.option("--other", default="x")
    def command(choice: EngineChoice, other: str) -> None:
        """A command."""
        taken.append(choice)

    result = CliRunner().invoke(command, list(arguments), catch_exceptions=False)
    if result.exit_code:
        raise ValueError(result.output)
    return taken[0]


def sim_setup(*arguments: str) -> tuple[str, SimSetup]:
    model_id, setup = parse("--engine", "sim", *arguments).resolve()
    assert isinstance(setup, SimSetup)
    return model_id, setup


def llama_setup(*arguments: str) -> tuple[str, LlamaSetup]:
    model_id, setup = parse(*arguments).resolve()
    assert isinstance(setup, LlamaSetup)
    return model_id, setup


def test_sim_without_more_is_the_model_sim_with_64_slots_and_5_ms_steps() -> None:
    model_id, setup = sim_setup()
    assert model_id == "sim"
    assert (setup.settings.slots, setup.settings.step_ms, setup.settings.context) == (64, 5.0, 8192)
    assert (setup.settings.prefill_tokens_per_s, setup.settings.contention) == (0.0, 0.0)


def test_sim_takes_what_is_given() -> None:
    model_id, setup = sim_setup(
        *("--slots", "3", "--context", "100", "--sim-step-ms", "0", "--model-id", "org/m"),
        *("--sim-prefill-tokens-per-s", "10", "--sim-contention", "0.5", "--sim-crash-seed", "7"),
    )
    settings = setup.settings
    assert model_id == "org/m"
    assert (settings.slots, settings.context, settings.step_ms) == (3, 100, 0.0)
    assert (settings.prefill_tokens_per_s, settings.contention, settings.crash_seed) == (10.0, 0.5, 7)


def test_sim_goes_by_the_model_where_no_id_is_given() -> None:
    assert sim_setup("--model", "big")[0] == "big"
    assert sim_setup("--model", "big", "--model-id", "small")[0] == "small"


@pytest.mark.parametrize("model", [[], ["--model", DEFAULT_MODEL_ID]], ids=["none", "by name"])
def test_llama_without_more_serves_the_default_model(
    model: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "default_model_file", lambda: tmp_path / "default.gguf")
    model_id, setup = llama_setup(*model)
    assert model_id == DEFAULT_MODEL_ID
    assert setup == LlamaSetup(tmp_path / "default.gguf")


@pytest.mark.parametrize(
    "name, model_id",
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct"),
        ("qwen3-0.6b-q8_0.gguf", "qwen3-0.6b"),
        ("Model-F16.gguf", "model"),
        ("Llama-3.2-1B-IQ4_XS.gguf", "llama-3.2-1b"),
        ("plain", "plain"),
        ("Q4_0.gguf", "q4_0"),
    ],
)
def test_a_file_gives_the_model_its_id(tmp_path: Path, name: str, model_id: str) -> None:
    file = tmp_path / name
    file.touch()
    assert llama_setup("--model", str(file))[0] == model_id
    assert llama_setup("--model", str(file), "--model-id", "mine")[0] == "mine"


def test_the_file_is_named_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").touch()
    monkeypatch.chdir(tmp_path)
    _, setup = llama_setup("--model", "m.gguf", "--slots", "2", "--context", "512", "--threads", "1")
    assert setup == LlamaSetup((tmp_path / "m.gguf").resolve(), context=512, slots=2, threads=1)


def test_what_llama_computes_with(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    _, setup = llama_setup(
        *("--model", str(tmp_path / "m.gguf"), "--gpu-layers", "0", "--kv-type", "q8_0", "--flash-attention", "on"),
        *("--prefix-cache", "all", "--threads", "4", "--decode-threads", "2"),
    )
    assert (setup.threads, setup.decode_threads) == (4, 2)
    assert (setup.gpu_layers, setup.kv_type, setup.flash_attention) == (0, "q8_0", True)
    assert setup.prefix_cache == "all"


def test_adapters_are_named_by_their_absolute_paths_with_their_scales(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("m.gguf", "a.gguf", "b=c.gguf"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    loras = ("--lora", "a.gguf", "--lora", "b=c.gguf=-0.5")
    _, setup = llama_setup("--model", "m.gguf", "--model-id", "adapted", *loras)
    root = tmp_path.resolve()
    assert setup.loras == (Lora(root / "a.gguf"), Lora(root / "b=c.gguf", -0.5))


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["--lora", "a.gguf"], "needs --model-id"),
        (["--model-id", "x", "--lora", "gone.gguf=1"], "there is no LoRA adapter 'gone.gguf'"),
        (["--model-id", "x", "--lora", "a.gguf=nan"], "--lora a.gguf: the scale must be -10 to 10"),
        (["--mmproj", "a.gguf"], "--mmproj is not built"),
    ],
)
def test_adapters_that_cannot_be_and_projectors_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], reason: str
) -> None:
    for name in ("m.gguf", "a.gguf"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises((LoadError, ModelFileMissing), match=reason) as caught:
        llama_setup("--model", "m.gguf", *arguments)
    assert "\n" not in str(caught.value)


def test_the_kv_types_are_those_of_the_engine() -> None:
    assert set(get_args(KvType)) == KV_TYPE_BYTES.keys()


def test_the_prefix_cache_modes_are_those_of_the_engine() -> None:
    assert set(get_args(PrefixCacheMode)) == set(PrefixCache)


def test_a_server_is_what_the_options_say_and_else_as_its_settings_are() -> None:
    base = ("--engine", "openai", "--model-id", "org/m", "--url", "http://h:1/v1")
    assert parse(*base).resolve() == ("org/m", OpenAISetup(OpenAISettings(url="http://h:1/v1")))
    _, setup = parse(
        *base,
        *("--upstream-model", "m", "--api-key-file", "/k", "--slots", "3", "--context", "99", "--command", "a 'b c'"),
        *("--metrics-name", "running=r", "--metrics-name", "kv_usage=k", "--token-timeout-s", "7"),
    ).resolve()
    assert setup == OpenAISetup(
        OpenAISettings(
            url="http://h:1/v1",
            upstream_model="m",
            api_key_file=Path("/k"),
            slots=3,
            context=99,
            command=("a", "b c"),
            metric_running="r",
            metric_kv_usage="k",
            token_timeout_s=7.0,
        )
    )


def test_a_server_goes_by_its_own_model_where_no_id_is_given() -> None:
    model_id, _ = parse("--engine", "openai", "--url", "http://h", "--upstream-model", "org/m").resolve()
    assert model_id == "org/m"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model-id", "m"],
        ["--url", "http://h"],
        ["--model-id", "m", "--url", "h"],
        ["--model-id", "m", "--url", "http://h", "--command", "'"],
        ["--model-id", "m", "--url", "http://h", "--command", " "],
        ["--model-id", "m", "--url", "http://h", "--metrics-name", "running"],
        ["--model-id", "m", "--url", "http://h", "--metrics-name", "walking=x"],
    ],
    ids=" ".join,
)
def test_a_server_that_is_not_described_is_told_in_one_line(arguments: list[str]) -> None:
    with pytest.raises(LoadError) as caught:
        parse("--engine", "openai", *arguments).resolve()
    assert "\n" not in str(caught.value)


def test_a_home_directory_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert llama_setup("--model", "~/m.gguf")[1].model == (tmp_path / "m.gguf").resolve()


@pytest.mark.parametrize("given", [[], ["--decode-threads", "0"]])
def test_decode_threads_are_measured_where_none_are_given(given: list[str], tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    assert llama_setup("--model", str(tmp_path / "m.gguf"), *given)[1].decode_threads is None


@pytest.mark.parametrize("model", ["no-such-model", "/no/such/file.gguf", ".", ""])
def test_a_model_that_is_not_there_is_told_in_one_line(model: str) -> None:
    with pytest.raises(ModelFileMissing, match="GGUF") as caught:
        parse("--model", model).resolve()
    assert "\n" not in str(caught.value)


def test_where_the_default_model_is_missing_the_installer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.models._DEFAULT_MODEL_DISTRIBUTION", "no-such-distribution")
    with pytest.raises(ModelFileMissing, match=r"run \./tools/install, or name a GGUF file"):
        default_model_file()


@pytest.mark.parametrize("model_id", ["x" * 129, "a\nb"])
@pytest.mark.parametrize("engine", ["sim", "llama"])
def test_an_id_that_may_not_be_is_refused(engine: str, model_id: str, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.touch()
    with pytest.raises(InvalidName):
        parse("--engine", engine, "--model", str(file), "--model-id", model_id).resolve()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--slots", "0"],
        ["--slots", "5000"],
        ["--context", "1"],
        ["--threads", "0"],
        ["--decode-threads", "-1"],
        ["--sim-step-ms", "-1"],
        ["--engine", "magic"],
    ],
    ids=" ".join,
)
def test_numbers_out_of_bounds_are_refused_by_the_command_line(arguments: list[str]) -> None:
    with pytest.raises(ValueError, match=arguments[0]):
        parse(*arguments)


words = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=20)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


@given(
    st.builds(
        EngineChoice,
        engine=st.sampled_from(["llama", "sim", "openai"]),
        model=maybe(words),
        model_id=maybe(words),
        slots=maybe(st.integers(1, 4096)),
        context=maybe(st.integers(16, 10**9)),
        threads=maybe(st.integers(1, 512)),
        decode_threads=maybe(st.integers(0, 512)),
        gpu_layers=maybe(st.integers(0, 10_000)),
        lora=st.lists(words, max_size=3).map(tuple),
        mmproj=maybe(words),
        sim_step_ms=st.floats(0, 1e9),
        sim_prefill_tokens_per_s=st.floats(0, 1e9),
        sim_contention=st.floats(0, 1e9),
        sim_crash_seed=maybe(st.integers(0, 2**32 - 1)),
        openai=st.builds(
            OpenAIChoice,
            url=maybe(words),
            upstream_model=maybe(words),
            api_key_file=maybe(words),
            command=maybe(words),
            metrics_name=st.lists(words, max_size=3).map(tuple),
            ready_within_s=maybe(st.floats(1, 890)),
            first_token_timeout_s=maybe(st.floats(1, 1e9)),
            token_timeout_s=maybe(st.floats(1, 1e9)),
        ),
    )
)
def test_a_choice_survives_the_way_to_another_process(choice: EngineChoice) -> None:
    assert parse(*choice.arguments()) == choice


def test_a_command_keeps_its_name_its_help_and_its_other_options() -> None:
    @click.command()
    @engine_options
    @click.option("--other")
    def some_command(choice: EngineChoice, other: str) -> None:
        """What it does."""

    assert some_command.name == "some" or some_command.name == "some-command"
    help_ = CliRunner().invoke(some_command, ["--help"]).output
    assert "What it does." in help_
    for option in ("--engine", "--model", "--slots", "--other"):
        assert option in help_
