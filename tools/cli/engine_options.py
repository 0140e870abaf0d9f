"""Options that say which engine a worker runs, shared by `up` and `worker`, and what they come to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import click

from schemas.names import check_model_id
from tools.cli.openai_options import OPTIONS as OPENAI_OPTIONS
from tools.cli.openai_options import OpenAIChoice
from worker.engines.base import LoadError
from worker.engines.lora import SCALE_MAX, Lora, is_usable_scale, parse_lora
from worker.engines.setup import LlamaSetup, OpenAISetup, Setup, SimSetup
from worker.engines.sim import SimSettings
from worker.models import DEFAULT_MODEL_ID, ModelFileMissing, default_model_file, model_id_of_file

KvType = Literal["f32", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
PrefixCacheMode = Literal["off", "exact", "all"]
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
    decode_threads: int | None = None
    gpu_layers: int | None
    kv_type: KvType | None
    flash_attention: Literal["on", "off"] | None
    prefix_cache: PrefixCacheMode | None
    lora: tuple[str, ...] = ()
    mmproj: str | None = None
    sim_step_ms: float | None
    sim_prefill_tokens_per_s: float | None
    sim_contention: float | None
    sim_crash_seed: int | None
    openai: OpenAIChoice = field(default_factory=OpenAIChoice)

    def resolve(self) -> tuple[str, Setup]:
        """The logical id and the engine's setup. Raises `ModelFileMissing`, `InvalidName`, `LoadError`."""
        match self.engine:
            case "sim":
                return self._sim()
            case "openai":
                return self._openai()
            case _:
                return self._llama()

    def arguments(self) -> list[str]:
        """The same options for the command line of another process."""
        given = {
            "--engine": self.engine,
            "--model": self.model,
            "--model-id": self.model_id,
            "--slots": self.slots,
            "--context": self.context,
            "--threads": self.threads,
            "--decode-threads": self.decode_threads,
            "--gpu-layers": self.gpu_layers,
            "--kv-type": self.kv_type,
            "--flash-attention": self.flash_attention,
            "--prefix-cache": self.prefix_cache,
            "--mmproj": self.mmproj,
            "--sim-step-ms": self.sim_step_ms,
            "--sim-prefill-tokens-per-s": self.sim_prefill_tokens_per_s,
            "--sim-contention": self.sim_contention,
            "--sim-crash-seed": self.sim_crash_seed,
        }
        words = [text for option, value in given.items() if value is not None for text in (option, str(value))]
        adapters = [word for lora in self.lora for word in ("--lora", lora)]
        return words + adapters + self.openai.arguments()

    def _openai(self) -> tuple[str, Setup]:
        model_id = self.model_id or self.openai.upstream_model
        if model_id is None:
            raise LoadError("the openai engine needs --model-id, the id that clients use")
        settings = self.openai.settings(slots=self.slots, context=self.context)
        return check_model_id(model_id), OpenAISetup(settings)

    def _sim(self) -> tuple[str, Setup]:
        model_id = self.model_id or self.model or "sim"
        given: dict[str, Any] = {
            "slots": self.slots,
            "context": self.context,
            "step_ms": self.sim_step_ms,
            "prefill_tokens_per_s": self.sim_prefill_tokens_per_s,
            "contention": self.sim_contention,
            "crash_seed": self.sim_crash_seed,
        }
        settings = SimSettings(**{name: value for name, value in given.items() if value is not None})
        return check_model_id(model_id), SimSetup(settings)

    def _llama(self) -> tuple[str, Setup]:
        if self.mmproj is not None:
            raise LoadError("--mmproj is not built: images and audio are not read, leave it out to serve text")
        file, model_id = self._file()
        setup = LlamaSetup(
            file,
            context=self.context,
            slots=self.slots,
            threads=self.threads,
            gpu_layers=self.gpu_layers,
            kv_type=self.kv_type,
            flash_attention=None if self.flash_attention is None else self.flash_attention == "on",
            prefix_cache=self.prefix_cache,
            decode_threads=self.decode_threads or None,
            loras=self._loras(),
        )
        return check_model_id(self.model_id or model_id), setup

    def _loras(self) -> tuple[Lora, ...]:
        if self.lora and self.model_id is None:
            raise LoadError("a model with --lora needs --model-id: under its own name others may serve it without")
        loras = tuple(map(parse_lora, self.lora))
        for lora in loras:
            if not lora.file.is_file():
                raise ModelFileMissing(f"there is no LoRA adapter '{lora.file}': give the path of a GGUF file")
            if not is_usable_scale(lora.scale):
                raise LoadError(f"--lora {lora.file.name}: the scale must be -{SCALE_MAX:g} to {SCALE_MAX:g}")
        return tuple(Lora(lora.file.resolve(), lora.scale) for lora in loras)

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
        click.option(
            "--engine", type=click.Choice(["llama", "sim", "openai"]), default="llama", help="What generates."
        ),
        click.option("--model", help=f"A GGUF file, or {DEFAULT_MODEL_ID}. [default: {DEFAULT_MODEL_ID}]"),
        click.option("--model-id", help="Logical id clients use. [default: from the file's name]"),
        click.option(
            "--slots", type=click.IntRange(1, 4096), help="Requests decoded together. [default: 10, sim 64, openai 8]"
        ),
        click.option("--context", type=click.IntRange(16), help="Tokens per request. [default: up to 2048, sim: 8192]"),
        click.option("--threads", type=click.IntRange(1, 512), help="Compute threads. [default: physical cores]"),
        click.option(
            "--decode-threads",
            type=click.IntRange(0, 512),
            help="llama: threads for a token alone in its step, 0 = measured once. [default: 0]",
        ),
        click.option("--gpu-layers", type=click.IntRange(0, 10_000), help="llama: layers on a GPU. [default: all]"),
        click.option("--kv-type", type=click.Choice(get_args(KvType)), help="llama: KV memory's type. [default: f16]"),
        click.option(
            "--flash-attention", type=click.Choice(["on", "off"]), help="llama: attention kernel. [default: it decides]"
        ),
        click.option(
            "--prefix-cache",
            type=click.Choice(get_args(PrefixCacheMode)),
            help="llama: whether prompts reuse what was computed. [default: exact]",
        ),
        click.option("--lora", multiple=True, metavar="FILE[=SCALE]", help="llama: a LoRA adapter; may be repeated."),
        click.option("--mmproj", metavar="FILE", help="llama: a multimodal projector. Not built: refused."),
        click.option("--sim-step-ms", type=click.FloatRange(0), help="sim: one decode step. [default: 5]"),
        click.option(
            "--sim-prefill-tokens-per-s", type=click.FloatRange(0), help="sim: prefill rate. [default: 0, instant]"
        ),
        click.option(
            "--sim-contention", type=click.FloatRange(0), help="sim: slowdown per further sequence. [default: 0]"
        ),
        click.option(
            "--sim-crash-seed", type=click.IntRange(0), help="sim: a request with this seed crashes the engine."
        ),
        *OPENAI_OPTIONS,
    ]

    def with_choice(**given: Any) -> Any:
        openai = OpenAIChoice(**{name: given.pop(name) for name in OpenAIChoice.__dataclass_fields__})
        names = EngineChoice.__dataclass_fields__.keys() - {"openai"}
        choice = EngineChoice(openai=openai, **{name: given.pop(name) for name in names})
        return function(choice=choice, **given)

    wrapped: Any = with_choice
    wrapped.__name__, wrapped.__doc__ = function.__name__, function.__doc__
    wrapped.__click_params__ = getattr(function, "__click_params__", [])
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[no-any-return]
