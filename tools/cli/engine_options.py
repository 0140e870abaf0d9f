"""Options that say which engine a worker runs, shared by `up` and `worker`, and what they come to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from schemas.names import check_model_id
from worker.engines.setup import LlamaSetup, Setup, SimSetup
from worker.engines.sim import SimSettings
from worker.models import DEFAULT_MODEL_ID, ModelFileMissing, default_model_file, model_id_of_file

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """The options as given; None = not given."""

    engine: str
    model: str | None
    model_id: str | None
    slots: int | None
    context: int | None
    threads: int | None
    sim_step_ms: float
    sim_prefill_tokens_per_s: float
    sim_contention: float

    def resolve(self) -> tuple[str, Setup]:
        """The logical id and the engine's setup. Raises `ModelFileMissing`, `InvalidName`."""
        return self._sim() if self.engine == "sim" else self._llama()

    def arguments(self) -> list[str]:
        """The same options for the command line of another process."""
        given = {
            "--engine": self.engine,
            "--model": self.model,
            "--model-id": self.model_id,
            "--slots": self.slots,
            "--context": self.context,
            "--threads": self.threads,
            "--sim-step-ms": self.sim_step_ms,
            "--sim-prefill-tokens-per-s": self.sim_prefill_tokens_per_s,
            "--sim-contention": self.sim_contention,
        }
        return [text for option, value in given.items() if value is not None for text in (option, str(value))]

    def _sim(self) -> tuple[str, Setup]:
        model_id = self.model_id or self.model or "sim"
        settings = SimSettings(
            slots=self.slots or 64,
            step_ms=self.sim_step_ms,
            context=self.context or 8192,
            prefill_tokens_per_s=self.sim_prefill_tokens_per_s,
            contention=self.sim_contention,
        )
        return check_model_id(model_id), SimSetup(settings)

    def _llama(self) -> tuple[str, Setup]:
        file, model_id = self._file()
        setup = LlamaSetup(file, context=self.context, slots=self.slots, threads=self.threads)
        return check_model_id(self.model_id or model_id), setup

    def _file(self) -> tuple[Path, str]:
        if self.model is None or self.model == DEFAULT_MODEL_ID:
            return default_model_file(), DEFAULT_MODEL_ID
        file = Path(self.model).expanduser()
        if not file.is_file():
            raise ModelFileMissing(
                f"there is no model '{self.model}': give the path of a GGUF file, or {DEFAULT_MODEL_ID}"
            )
        return file.resolve(), model_id_of_file(file)


def engine_options(function: F) -> F:
    """Add the options; they arrive as one `choice`."""
    options = [
        click.option("--engine", type=click.Choice(["llama", "sim"]), default="llama", help="What generates."),
        click.option("--model", help=f"A GGUF file, or {DEFAULT_MODEL_ID}. [default: {DEFAULT_MODEL_ID}]"),
        click.option("--model-id", help="Logical id clients use. [default: from the file's name]"),
        click.option("--slots", type=click.IntRange(1, 4096), help="Requests decoded together. [default: 10, sim: 64]"),
        click.option("--context", type=click.IntRange(16), help="Tokens per request. [default: up to 2048, sim: 8192]"),
        click.option("--threads", type=click.IntRange(1, 512), help="Compute threads. [default: physical cores]"),
        click.option("--sim-step-ms", type=click.FloatRange(0), default=5.0, help="sim: one decode step."),
        click.option(
            "--sim-prefill-tokens-per-s", type=click.FloatRange(0), default=0.0, help="sim: prefill rate, 0 = instant."
        ),
        click.option(
            "--sim-contention", type=click.FloatRange(0), default=0.0, help="sim: slowdown per further sequence."
        ),
    ]

    def with_choice(**given: Any) -> Any:
        names = EngineChoice.__dataclass_fields__
        choice = EngineChoice(**{name: given.pop(name) for name in names})
        return function(choice=choice, **given)

    wrapped: Any = with_choice
    wrapped.__name__, wrapped.__doc__ = function.__name__, function.__doc__
    wrapped.__click_params__ = getattr(function, "__click_params__", [])
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[no-any-return]
