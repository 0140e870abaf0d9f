"""Every limit of the llama engine: what meets it is refused with its name as `--set` takes it, and passes a higher one.

The tables name each limit at least once: one that is in neither fails the first test.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from schemas.errors import ErrorCode, MeshError
from schemas.job import Prompt
from schemas.sampling import Dry, GbnfGrammar, Grammar, RegexGrammar, Sampling, SchemaGrammar
from tests.support.llama import CREATED, chat, no_progress, text
from tests.support.schemas import an_object
from tests.support.tiny_gguf import write_tiny_gguf
from tools.cli.settings import with_overrides
from worker.engines.base import Accepted, Errored, Submit
from worker.engines.llama import LlamaAdapter, LlamaSettings, load
from worker.engines.llama.grammar import compile_grammar
from worker.engines.llama.template import ChatTemplate, TemplateUnusable
from worker.engines.llama_limits import GrammarLimits, LlamaLimits
from worker.engines.pipes import encode_frame
from worker.engines.process import InputPipe, ReportPipe
from worker.engines.process import load as load_process
from worker.engines.setup import LlamaSetup

CONTEXT = 64
INVALID = ErrorCode.INVALID_VALUE
UNSUPPORTED = ErrorCode.UNSUPPORTED_PARAMETER
TOO_LONG = ErrorCode.CONTEXT_LENGTH_EXCEEDED


def limits_with(name: str, value: float) -> LlamaLimits:
    """The usual limits but for the one that `--set engine.limits.<name>` is about; the value has to be in its range."""
    setup = with_overrides(LlamaSetup(Path("model.gguf")), [f"limits.{name}={value}"])
    return setup.limits


def of(key: str) -> str:
    """The limit that a row is about: several rows of one limit have more in their keys."""
    return key.partition(",")[0]


# --- the forms of answers, and chat templates: no model needed --------------------------------------------------------


class Bound(NamedTuple):
    """`attempt` goes beyond the limit where that is `low`, and not where it is what it usually is."""

    low: float
    attempt: Callable[[LlamaLimits], object]
    code: ErrorCode
    param: str


def compiling(low: float, grammar: Grammar, code: ErrorCode = INVALID) -> Bound:
    return Bound(low, lambda limits: compile_grammar(grammar, limits=limits.grammar, param="p"), code, "p")


def schema(low: float, value: Any, code: ErrorCode = INVALID) -> Bound:
    return compiling(low, SchemaGrammar(schema=json.dumps(value)), code)


def gbnf(low: float, source: str) -> Bound:
    return compiling(low, GbnfGrammar(text=source))


def regex(low: float, pattern: str) -> Bound:
    return compiling(low, RegexGrammar(pattern=pattern))


def rendering(low: float, source: str) -> Bound:
    """A template whose every look at the clock is a tenth of a second after the one before it."""

    def attempt(limits: LlamaLimits) -> str:
        ticks = itertools.count(step=0.1)
        template = ChatTemplate(source, bos_token="", eos_token="", limits=limits, clock=lambda: next(ticks))
        return template.render([{"role": "user", "content": "hi"}], created=CREATED)

    return Bound(low, attempt, ErrorCode.TEMPLATE_REFUSED, "messages")


def in_a_row(count: int, link: Callable[[dict[str, str]], Any]) -> dict[str, Any]:
    """`count` definitions, each made of the reference to the next one by `link`."""
    definitions = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"$defs": {**definitions, f"d{count}": {"type": "null"}}, "$ref": "#/$defs/d0"}


DEEP = [an_object("a", a=an_object("b", b={"const": value})) for value in (1, 2)]

PURE = {
    "grammar.schema_bytes_max": schema(20, {"type": "integer", "title": "a number"}),
    "grammar.schema_nesting_max": schema(2, {"properties": {"a": {"type": "integer"}}}),
    "grammar.schema_nesting_max, values": schema(5, in_a_row(6, lambda ref: an_object("a", a=ref))),
    "grammar.schema_nesting_max, references": schema(5, in_a_row(6, lambda ref: {"allOf": [ref]})),
    "grammar.number_chars_max": schema(3, {"const": 1234}),
    "grammar.number_chars_max, fractions": schema(3, {"const": 1.25}),
    "grammar.schema_work_max": schema(2, an_object("a", "b", a={"type": "null"}, b={"type": "integer"})),
    "grammar.enum_max": schema(2, {"enum": [1, 2, 3]}),
    "grammar.alternatives_max": schema(2, {"anyOf": [{"const": i} for i in range(3)]}),
    "grammar.exclusion_depth_max": schema(1, {"oneOf": DEEP}, UNSUPPORTED),
    "grammar.name_chars_max": schema(
        3, {"properties": {"name": {}}, "additionalProperties": {"type": "integer"}}, UNSUPPORTED
    ),
    "grammar.pattern_bytes_max": regex(3, "a{4}"),
    "grammar.pattern_bytes_max, in a schema": schema(3, {"type": "string", "pattern": "a{4}"}),
    "grammar.gbnf_bytes_max": gbnf(10, 'root ::= "a"'),
    "grammar.gbnf_bytes_max, made": schema(60, an_object("a", a={"type": "integer"})),
    "grammar.groups_nested_max": gbnf(1, 'root ::= (("a" | "b") "c" | "d")'),
    "grammar.groups_nested_max, expression": regex(1, "((a|b)c|d)"),
    "grammar.repetitions_max": schema(128, {"type": "array", "items": {"type": "null"}, "minItems": 129}, UNSUPPORTED),
    "grammar.repetitions_max, expression": regex(128, "a{129}"),
    "grammar.repetitions_max, grammar": gbnf(128, 'root ::= "a"{129}'),
    "grammar.repetitions_max, nested": gbnf(128, 'root ::= ("a"{0,12} "b"){0,12}'),
    "grammar.elements_max": gbnf(5, 'root ::= "abcdef"'),
    "grammar.elements_max, of a schema": schema(5, {"type": "integer"}),
    "grammar.ways_max": gbnf(2, 'root ::= "a" | "b" | "c"'),
    "grammar.ways_max, of a schema": schema(2, {"type": ["integer", "string", "boolean"]}),
    "grammar.stacks_max": gbnf(2, 'root ::= "a" "b" | "a" "c" | "a" "d"'),
    "grammar.stacks_max, of a schema": schema(
        2, {"anyOf": [an_object("k", k={"type": t}) for t in ("null", "string")]}
    ),
    "grammar.paths_max": gbnf(2, 'root ::= ("a"? "b"?){0,2}'),
    "grammar.chain_max": gbnf(2, 'root ::= a\na ::= b\nb ::= "x"'),
    "grammar.passes_max": gbnf(2, 'root ::= "x" a\na ::= "(" b ")" | "a"\nb ::= "[" a "]"'),
    "grammar.visits_max": gbnf(5, 'root ::= a\na ::= b\nb ::= "x"'),
    "template_render_s_max": rendering(0.5, "{% for i in range(5) %}{{ i }}{% endfor %}"),
    "template_rendered_chars_max": rendering(3, "{{ messages[0].role }}"),
    "template_rendered_chars_max, on the way": rendering(6, "{{ (messages[0].role ~ messages[0].content ~ '!')[0] }}"),
    "template_items_max": rendering(3, "{{ [1, 2, 3, 4] | batch(1) | list }}"),
    "template_product_bits_max": rendering(8, "{% set n = 300 %}{{ n * n }}"),
}


@pytest.mark.parametrize("key", PURE)
def test_a_form_or_template_beyond_a_limit_is_refused_with_its_name(key: str) -> None:
    bound = PURE[key]
    with pytest.raises(MeshError) as caught:
        bound.attempt(limits_with(of(key), bound.low))
    error = caught.value
    assert (error.code, error.param) == (bound.code, bound.param)
    assert limits_named(error.message) == [of(key)], error.message
    assert bound.attempt(LlamaLimits())


# --- what needs a vocabulary ------------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """A request that goes beyond the limit where that is `low`, and not where it is what it usually is."""

    low: float
    prompt: Prompt
    code: ErrorCode
    param: str
    sampling: dict[str, Any] = {}  # noqa: RUF012 - read only


def breakers(low: float, *texts: str) -> Asked:
    dry = {"dry": Dry(multiplier=1.0, breakers=texts)}
    return Asked(low, text("hello"), INVALID, "dry_sequence_breakers", dry)


ASKED = {
    "text_bytes_max": Asked(8, text("Good morning"), TOO_LONG, "prompt"),
    "text_bytes_max, of messages": Asked(8, chat("Good morning"), TOO_LONG, "messages"),
    "text_bytes_per_token_max": Asked(1, text("Good morning. " * 6), TOO_LONG, "prompt"),
    "conversation_values_max": Asked(3, chat("hello"), INVALID, "messages"),
    "dry_breakers_max": breakers(1, "\n", "#"),
    "dry_overlaps_max": breakers(1, "User:"),
    "dry_holders_max": breakers(1, "\n"),
    "template_render_s_max": Asked(1e-9, chat("hello"), ErrorCode.TEMPLATE_REFUSED, "messages"),
    "grammar.enum_max": Asked(
        1, text("hello"), INVALID, "response_format", {"grammar": SchemaGrammar(schema='{"enum":[1,2]}')}
    ),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", context=CONTEXT)


@pytest.fixture
def loaded(tiny: Path) -> Iterator[Callable[[LlamaLimits], LlamaAdapter]]:
    """Loads engines with these limits; they need no warm-up to check requests."""
    adapters: list[LlamaAdapter] = []

    def make(limits: LlamaLimits) -> LlamaAdapter:
        adapter = load(LlamaSettings(model=tiny, threads=1, slots=1, waiting_per_slot=0, limits=limits), no_progress)
        assert isinstance(adapter, LlamaAdapter)
        adapters.append(adapter)
        return adapter

    yield make
    for adapter in adapters:
        adapter.close()


def asked(adapter: LlamaAdapter, prompt: Prompt, sampling: dict[str, Any]) -> Errored | Accepted:
    """What the engine says first of a request."""
    adapter.submit(Submit(1, prompt, Sampling(max_tokens=1, seed=1, **sampling), CREATED))
    event = adapter.step()[0]
    assert isinstance(event, Errored | Accepted)
    return event


@pytest.mark.parametrize("key", ASKED)
def test_a_request_beyond_a_limit_is_refused_with_its_name(
    key: str, loaded: Callable[[LlamaLimits], LlamaAdapter]
) -> None:
    bound = ASKED[key]
    refused = asked(loaded(limits_with(of(key), bound.low)), bound.prompt, bound.sampling)
    assert isinstance(refused, Errored)
    assert (refused.error.code, refused.error.param) == (bound.code, bound.param)
    assert limits_named(refused.error.message) == [of(key)], refused.error.message
    assert isinstance(asked(loaded(LlamaLimits()), bound.prompt, bound.sampling), Accepted)


def test_context_and_queue_are_named_as_settings_too(loaded: Callable[[LlamaLimits], LlamaAdapter]) -> None:
    adapter = loaded(LlamaLimits())
    too_long = asked(adapter, text("one two " * CONTEXT), {})
    assert isinstance(too_long, Errored)
    assert (too_long.error.code, too_long.error.param) == (TOO_LONG, "prompt")
    assert "(engine.context)" in too_long.error.message
    for key in (1, 2):
        adapter.submit(Submit(key, text("hello"), Sampling(max_tokens=1, seed=1), CREATED))
    refused = adapter.step()[0]
    assert isinstance(refused, Errored)
    assert (refused.key, refused.error.code) == (2, ErrorCode.OVERLOADED)
    assert "(engine.waiting_per_slot)" in refused.error.message


def test_a_template_that_is_too_long_itself_is_refused_with_the_limit() -> None:
    source = "{{ bos_token }}"
    with pytest.raises(TemplateUnusable) as caught:
        ChatTemplate(source, bos_token="", eos_token="", limits=limits_with("template_chars_max", len(source) - 1))
    assert limits_named(str(caught.value)) == ["template_chars_max"]
    template = ChatTemplate(source, bos_token="", eos_token="", limits=limits_with("template_chars_max", len(source)))
    assert template.render([], created=CREATED) == ""


AT_THE_START = ("template_chars_max",)


# --- all of them ------------------------------------------------------------------------------------------------------


def limits_named(message: str) -> list[str]:
    """The limits that a refusal names."""
    return [part.partition(")")[0] for part in message.split("(engine.limits.")[1:]]


def fields() -> dict[str, msgspec.structs.FieldInfo]:
    """Every limit under its name."""
    own = {field.name: field for field in msgspec.structs.fields(LlamaLimits) if field.name != "grammar"}
    return own | {f"grammar.{field.name}": field for field in msgspec.structs.fields(GrammarLimits)}


def test_every_limit_is_in_the_tables() -> None:
    assert {of(key) for key in (*PURE, *ASKED, *AT_THE_START)} == fields().keys()


@pytest.mark.parametrize("name", fields())
def test_the_usual_value_is_in_the_range_and_nothing_at_all_is_not(name: str) -> None:
    usual = fields()[name].default
    assert limits_with(name, usual) == LlamaLimits()
    with pytest.raises(Exception, match=f"--set limits.{name}: "):
        limits_with(name, 0)


def test_python_s_stack_has_room_for_the_deepest_schema() -> None:
    """As deep as the ranges allow in every way that adds up: values, and the groups of a pattern inside of them."""
    groups = "(ab" * 63 + "c" + "){1,2}" * 63
    deepest = in_a_row(63, lambda ref: an_object("a", a=ref))
    deepest["$defs"]["d63"] = {"type": "string", "pattern": f"^{groups}$"}
    limits = GrammarLimits(schema_nesting_max=64, groups_nested_max=64)
    assert compile_grammar(SchemaGrammar(schema=json.dumps(deepest)), limits=limits)


# --- from the command line to the engine ------------------------------------------------------------------------------


def test_limits_that_are_set_reach_the_engine(tiny: Path) -> None:
    overrides = ["limits.text_bytes_max=10", "limits.grammar.enum_max=1"]
    setup = with_overrides(LlamaSetup(tiny, slots=1, threads=1, context=CONTEXT), overrides, part="engine")
    from_worker, to_engine = os.pipe()
    from_engine, to_worker = os.pipe()
    try:
        os.write(to_engine, encode_frame(setup))
        commands, reports = InputPipe(from_worker), ReportPipe(to_worker)
        taken = commands.take_one()
        assert isinstance(taken, LlamaSetup)
        adapter = load_process(taken, no_progress, commands=commands, reports=reports)
        assert isinstance(adapter, LlamaAdapter)
    finally:
        for descriptor in (from_worker, to_engine, from_engine, to_worker):
            os.close(descriptor)
    for prompt, sampling, name in (
        (text("Good morning"), {}, "text_bytes_max"),
        (text("hello"), {"grammar": SchemaGrammar(schema='{"enum":[1,2]}')}, "grammar.enum_max"),
    ):
        refused = asked(adapter, prompt, sampling)
        assert isinstance(refused, Errored)
        assert limits_named(refused.error.message) == [name]
    adapter.close()
