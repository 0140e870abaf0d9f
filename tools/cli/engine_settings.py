"""`--set engine.NAME=VALUE`: settings of the engine that `--engine` chooses, beside the options that they have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import click

from tools.cli.engine_options import EngineChoice
from tools.cli.settings import with_overrides
from worker.engines.base import LoadError
from worker.engines.setup import LlamaSetup, OpenAISetup, Setup, SimSetup
from worker.engines.sim import check_settings

_COMMON: Final = {"slots": "--slots", "context": "--context"}
ENGINE_OPTIONS: Final = {
    "llama": {
        **_COMMON,
        "model": "--model",
        "threads": "--threads",
        "decode_threads": "--decode-threads",
        "gpu_layers": "--gpu-layers",
        "kv_type": "--kv-type",
        "flash_attention": "--flash-attention",
        "prefix_cache": "--prefix-cache",
        "loras": "--lora",
    },
    "sim": {
        **_COMMON,
        "step_ms": "--sim-step-ms",
        "prefill_tokens_per_s": "--sim-prefill-tokens-per-s",
        "contention": "--sim-contention",
        "crash_seed": "--sim-crash-seed",
    },
    "openai": {
        **_COMMON,
        "url": "--url",
        "upstream_model": "--upstream-model",
        "api_key_file": "--api-key-file",
        "command": "--command",
        "ready_within_s": "--ready-within-s",
        "first_token_timeout_s": "--first-token-timeout-s",
        "token_timeout_s": "--token-timeout-s",
        "metric_running": "--metrics-name",
        "metric_waiting": "--metrics-name",
        "metric_kv_usage": "--metrics-name",
    },
}
"""By engine: the settings that have an option of their own."""

_NO_SETTINGS: Final = {"llama": ("--mmproj",), "sim": ("--model",), "openai": ()}
"""By engine: options of it that stand for no setting. `--model-id` is of all engines."""

OPTION_ENGINES: Final = {
    option: tuple(
        engine for engine in ENGINE_OPTIONS if option in (*ENGINE_OPTIONS[engine].values(), *_NO_SETTINGS[engine])
    )
    for engine in ENGINE_OPTIONS
    for option in (*ENGINE_OPTIONS[engine].values(), *_NO_SETTINGS[engine])
}
"""By option: the engines that know it."""

_DECIDED: Final = {"model", "url"}
"""What an engine is about: given by the option or its default before any setting is looked at."""


def resolve_engine(choice: EngineChoice, overrides: Iterable[str]) -> tuple[str, Setup]:
    """The logical id and the engine's setup with each ``name=value`` applied.

    The ranges of the `llama` engine's settings are its own affair: it refuses what is outside of them, by name, before
    it looks at the model. Raises what `EngineChoice.resolve` raises, and `click.UsageError`, also for an option that
    only another engine knows.
    """
    for option in _given(choice):
        engines = OPTION_ENGINES.get(option, (choice.engine,))
        if choice.engine not in engines:
            known = " and ".join(f"--engine {engine}" for engine in engines)
            raise click.UsageError(f"{option} is for {known}; this is --engine {choice.engine}")
    model_id, setup = choice.resolve()
    options = {
        setting: option
        for setting, option in ENGINE_OPTIONS[choice.engine].items()
        if setting in _DECIDED or _gives(choice, option, setting)
    }
    match setup:
        case SimSetup():
            simulated = with_overrides(setup.settings, overrides, part="engine", options=options)
            try:
                check_settings(simulated)
            except LoadError as error:
                raise click.UsageError(f"--set engine: {error}") from None
            return model_id, SimSetup(simulated)
        case OpenAISetup():
            return model_id, OpenAISetup(with_overrides(setup.settings, overrides, part="engine", options=options))
        case LlamaSetup():
            return model_id, with_overrides(setup, overrides, part="engine", options=options)


def _gives(choice: EngineChoice, option: str, setting: str) -> bool:
    """Whether the command line gives `setting` by `option`, which may be about several of them."""
    if option == "--metrics-name":
        meaning = setting.removeprefix("metric_")
        return any(name.startswith(f"{meaning}=") for name in choice.openai.metrics_name)
    return option in _given(choice)


def _given(choice: EngineChoice) -> list[str]:
    """The options that the command line gives; each of them has a value."""
    return choice.arguments()[::2]
