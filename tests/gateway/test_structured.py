"""What a client may demand of its answer's form, under every name that clients know for it."""

import json
import re
from typing import Any

import pytest

from gateway.dialects.chat_request import parse_chat
from gateway.settings import Limits
from schemas.errors import ErrorCode, MeshError
from schemas.sampling import GbnfGrammar, Grammar, JsonGrammar, RegexGrammar, SchemaGrammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
GBNF = 'root ::= "yes" | "no"'


def grammar_of(limits: Limits | None = None, **parameters: Any) -> Grammar | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **parameters}
    return parse_chat(json.dumps(body).encode(), limits=limits or Limits()).sampling.grammar


def refusal(limits: Limits | None = None, **parameters: Any) -> MeshError:
    with pytest.raises(MeshError) as caught:
        grammar_of(limits, **parameters)
    assert caught.value.traits.status == 400
    return caught.value


def schema_of(grammar: Grammar | None) -> object:
    assert isinstance(grammar, SchemaGrammar)
    return json.loads(grammar.schema)


@pytest.mark.parametrize("parameters", [{}, {"response_format": None}, {"response_format": {"type": "text"}}])
def test_without_a_demand_there_is_no_grammar(parameters: dict[str, Any]) -> None:
    assert grammar_of(**parameters) is None


@pytest.mark.parametrize(
    "parameters",
    [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}],
)
def test_any_json_object_may_be_demanded(parameters: dict[str, Any]) -> None:
    assert grammar_of(**parameters) == JsonGrammar()


@pytest.mark.parametrize(
    "parameters",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": False}}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"json_schema": SCHEMA},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_fallback": True}},
    ],
)
def test_a_schema_reaches_the_engine_as_it_was_written(parameters: dict[str, Any]) -> None:
    assert schema_of(grammar_of(**parameters)) == SCHEMA


@pytest.mark.parametrize("schema", [True, {}, {"type": "string"}])
def test_a_schema_need_not_be_one_of_an_object(schema: object) -> None:
    assert schema_of(grammar_of(guided_json=schema)) == schema


@pytest.mark.parametrize(
    "parameters",
    [{"guided_regex": "a+"}, {"structured_outputs": {"regex": "a+"}}],
)
def test_an_expression_is_passed_on(parameters: dict[str, Any]) -> None:
    assert grammar_of(**parameters) == RegexGrammar(pattern="a+")


@pytest.mark.parametrize(
    "parameters",
    [{"grammar": GBNF}, {"guided_grammar": GBNF}, {"structured_outputs": {"grammar": GBNF}}],
)
def test_a_grammar_is_passed_on(parameters: dict[str, Any]) -> None:
    assert grammar_of(**parameters) == GbnfGrammar(text=GBNF)


@pytest.mark.parametrize(
    "parameters, param",
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "response_format"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
        ({"grammar": GBNF}, "grammar"),
    ],
)
def test_the_engine_learns_which_parameter_makes_the_demand(parameters: dict[str, Any], param: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **parameters}
    assert parse_chat(json.dumps(body).encode(), limits=Limits()).sampling.grammar_param == param


@pytest.mark.parametrize("name", ["guided_choice", "structured_outputs"])
def test_choices_become_an_expression_that_matches_them_alone(name: str) -> None:
    choices = ["yes", "no", "a+b (c)", "x|y", "[z]\n", 'say "hi" \\ é']
    demand: Any = choices if name == "guided_choice" else {"choice": choices}
    grammar = grammar_of(**{name: demand})
    assert isinstance(grammar, RegexGrammar)
    pattern = re.compile(grammar.pattern)
    assert all(pattern.fullmatch(choice) for choice in choices)
    assert not any(pattern.fullmatch(text) for text in ["", "aab (c)", "x", "y", "z", "yesno"])


@pytest.mark.parametrize(
    "parameters, param",
    [
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": 5}}, "response_format.json_schema"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_choice": ["a", 5]}, "guided_choice[1]"),
        ({"grammar": {}}, "grammar"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": "json"}, "structured_outputs"),
    ],
)
def test_demands_of_another_shape_are_refused_by_path(parameters: dict[str, Any], param: str) -> None:
    error = refusal(**parameters)
    assert (error.code, error.param) == (ErrorCode.INVALID_VALUE, param)


@pytest.mark.parametrize("name", ["structural_tag", "whitespace_pattern"])
def test_demands_without_effect_are_refused(name: str) -> None:
    error = refusal(structured_outputs={"json": SCHEMA, name: "x"})
    assert (error.code, error.param) == (ErrorCode.UNSUPPORTED_PARAMETER, f"structured_outputs.{name}")


@pytest.mark.parametrize(
    "parameters, param",
    [
        ({"response_format": {"type": "json_object"}, "grammar": GBNF}, "grammar"),
        ({"guided_json": SCHEMA, "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex"),
    ],
)
def test_two_demands_at_once_are_refused(parameters: dict[str, Any], param: str) -> None:
    error = refusal(**parameters)
    assert (error.code, error.param) == (ErrorCode.INVALID_VALUE, param)
    assert "cannot be combined" in error.message


def test_text_can_stand_beside_a_demand() -> None:
    assert grammar_of(response_format={"type": "text"}, guided_regex="a") == RegexGrammar(pattern="a")


@pytest.mark.parametrize(
    "parameters, param, limit",
    [
        ({"guided_json": {"title": "é" * 50}}, "guided_json", "schema_bytes_max"),
        ({"guided_json": json.dumps({"title": "x" * 100})}, "guided_json", "schema_bytes_max"),
        ({"grammar": "x" * 101}, "grammar", "grammar_bytes_max"),
        ({"guided_regex": "é" * 51}, "guided_regex", "grammar_bytes_max"),
        ({"guided_choice": ["x" * 50, "y" * 50]}, "guided_choice", "grammar_bytes_max"),
    ],
)
def test_the_size_of_a_demand_is_bounded(parameters: dict[str, Any], param: str, limit: str) -> None:
    error = refusal(Limits(schema_bytes_max=100, grammar_bytes_max=100), **parameters)
    assert (error.code, error.param) == (ErrorCode.INVALID_VALUE, param)
    assert limit in error.message
    assert grammar_of(Limits(schema_bytes_max=100_000, grammar_bytes_max=100_000), **parameters) is not None
