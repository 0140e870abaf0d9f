"""JSON schemas: what llama.cpp lets through is accepted by the schema; what cannot be kept is refused by place."""

from __future__ import annotations

import json
from decimal import Decimal
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from schemas.errors import ErrorCode, MeshError
from schemas.sampling import JsonGrammar, SchemaGrammar
from tests.support.grammar import LoadedGrammar, compiled, loaded
from tests.support.schemas import SCHEMAS, an_object
from worker.engines.llama_limits import GrammarLimits

ANSWERS = 25


def translated(schema: Any) -> str:
    return compiled(SchemaGrammar(schema=json.dumps(schema)))


def refusal(schema: Any, *, text: str | None = None) -> MeshError:
    with pytest.raises(MeshError) as caught:
        compiled(SchemaGrammar(schema=json.dumps(schema) if text is None else text))
    assert caught.value.param == "response_format"
    return caught.value


def grammar_of(schema: Any) -> LoadedGrammar:
    return loaded(translated(schema))


def errors(answer: str, schema: Any) -> list[str]:
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    return [error.message for error in validator.iter_errors(json.loads(answer))]


# --- whatever comes out is valid --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_answers_are_accepted_by_the_schema(name: str) -> None:
    schema = SCHEMAS[name]
    grammar, random = grammar_of(schema), Random(f"seed of {name}")
    for _ in range(ANSWERS):
        answer = grammar.random_answer(random)
        assert errors(answer, schema) == [], answer


@pytest.mark.parametrize(
    "name, answers",
    [
        ("person", ['{"name": "Ann", "age": 7}', '{"name":"é\\"\\u00e9","age":150}']),
        ("optional members", ['{"b":"x"}', '{"a":true,"b":"x","d":1}', '{"b": "x", "c": null, "d": -1}']),
        ("only optional members", ["{}", '{"a":true}', '{"b":false,"c":true}', '{"a":true,"c":true}']),
        ("other members", ['{"id":1}', '{"id":1,"ie":true}', '{"id":1,"i":true,"idx":false,"x":true}']),
        ("map", ["{}", '{"a":1}', '{"a":1, "b": 2}']),
        ("recursive", ['{"v":1}', '{"v":1,"next":{"v":2,"next":{"v":3,"next":null}}}']),
        ("tree", ['{"n":1,"kids":[{"n":2},{"n":3,"kids":[]}]}']),
        ("expression", ["1", '{"op":"+","l":1,"r":{"op":"-","l":2,"r":3}}']),
        ("enum", ['"red"', '"reddish"', "7", "7.5", "null", "true", '{"a":[1,"x"]}', '["é","\\"\\n"]']),
        ("one of tagged", ['{"kind":"circle","r":1}', '{"kind":"square","w":1}']),
        ("tuple with a rest", ["[true,null]", "[true,null,null]"]),
        ("pattern of quotes", ['"\\"\\\\\\n"', '"\\t"']),
        ("number bounds", ["0", "1", "0.5", "0.000001", "0.0", "1.0"]),
        ("anything", ["1", '"x"', "[]", '{"a":{"b":[null]}}', "true", "-1.5e3"]),
    ],
)
def test_answers_that_a_model_would_give_are_let_through(name: str, answers: list[str]) -> None:
    grammar = grammar_of(SCHEMAS[name])
    for answer in answers:
        assert errors(answer, SCHEMAS[name]) == []
        assert grammar.accepts(answer), answer


@pytest.mark.parametrize(
    "name, answer",
    [
        ("person", '{"age":7,"name":"Ann"}'),
        ("person", '{"name":"Ann","age":151}'),
        ("person", '{"name":"Ann"}'),
        ("strict", '{"city":"x","more":1}'),
        ("other members", '{"id":1,"id":true}'),
        ("names that begin alike", '{"a":1,"ab":2,"abc":true}'),
        ("names that begin alike", '{"a":1,"ab":2,"ab":true}'),
        ("one of tagged", '{"r":1}'),
        ("tuple", '[1,"a",2]'),
        ("open tuple", "[null]"),
        ("length", '"ab"'),
        ("pattern", '"ABCD-1234"'),
        ("date", '"2024-02-30"'),
        ("number bounds", "1.000001"),
        ("open number bounds", "12.5"),
        ("integer from below", "-2"),
        ("member that can never be", '{"a":1}'),
    ],
)
def test_answers_that_do_not_fit_are_held_back(name: str, answer: str) -> None:
    assert not grammar_of(SCHEMAS[name]).accepts(answer)


def test_an_object_is_any_object() -> None:
    grammar = loaded(compiled(JsonGrammar()))
    for answer in ["{}", '{"a":1}', '{"a": [1, "x", {"b": null}], "c": -0.5e-3}']:
        assert grammar.accepts(answer)
    for answer in ["", "[]", "1", '{"a":1', '{"a":01}', '{"a":"\n"}', '{"a":"\\ud800"}', "{} "]:
        assert not grammar.accepts(answer)
    random = Random(1)
    assert all(isinstance(json.loads(grammar.random_answer(random)), dict) for _ in range(ANSWERS))


def test_white_space_is_limited() -> None:
    grammar = grammar_of(SCHEMAS["person"])
    assert grammar.accepts('{"name": "a", "age": 1}')
    for answer in ['{ "name": "a", "age": 1}', '{"name":  "a", "age": 1}', '{"name":\n"a","age":1}']:
        assert not grammar.accepts(answer)


def test_a_null_that_openapi_allows_is_let_through() -> None:
    grammar = grammar_of(an_object("a", a={"type": "integer", "nullable": True}))
    assert grammar.accepts('{"a":null}')
    assert grammar.accepts('{"a":1}')


def test_a_member_that_only_one_alternative_may_have_tells_them_apart() -> None:
    having, lacking = an_object("a", a={"type": "integer"}), an_object(a=False, b={"type": "integer"})
    schema = {"oneOf": [having, lacking]}
    for answer in ['{"a":1}', '{"b":1}', "{}"]:
        assert errors(answer, schema) == []
        assert grammar_of(schema).accepts(answer)
    assert grammar_of(an_object(x=schema)).accepts('{"x":{"a":1}}')
    assert not grammar_of(schema).accepts('{"a":1,"b":1}')


@pytest.mark.parametrize("never", [False, {"allOf": [True, False]}, {"allOf": [{"const": 1}, {"const": 2}]}])
def test_a_member_that_one_alternative_refuses_tells_them_apart(never: Any) -> None:
    having = an_object("a", a={"type": "integer"}, b={"type": "null"})
    schema = {"oneOf": [having, an_object("b", a=never, b={"type": "integer"})]}
    assert grammar_of(schema).accepts('{"a":1}')
    assert grammar_of(schema).accepts('{"b":1}')


# --- numbers ----------------------------------------------------------------------------------------------------------

bounds = st.one_of(st.integers(-2000, 2000), st.integers(-(10**17), 10**17))


@settings(max_examples=60, deadline=None)
@given(bounds, bounds, st.data())
def test_integers_are_let_through_exactly_within_their_bounds(one: int, other: int, data: st.DataObject) -> None:
    low, high = sorted((one, other))
    grammar = grammar_of({"type": "integer", "minimum": low, "maximum": high})
    near = st.sampled_from([low, high]).flatmap(lambda bound: st.integers(bound - 12, bound + 12))
    for value in data.draw(st.lists(st.one_of(near, st.integers(low, high)), min_size=8, max_size=8)):
        assert grammar.accepts(str(value)) == (low <= value <= high)


decimals = st.decimals(-1500, 1500, places=3)


@settings(max_examples=80, deadline=None)
@given(decimals, decimals, st.booleans(), st.booleans(), st.data())
def test_numbers_are_let_through_exactly_within_their_bounds(
    one: Decimal, other: Decimal, low_open: bool, high_open: bool, data: st.DataObject
) -> None:
    low, high = sorted((float(one), float(other)))
    schema = {
        "type": "number",
        "exclusiveMinimum" if low_open else "minimum": low,
        "exclusiveMaximum" if high_open else "maximum": high,
    }
    if low == high and (low_open or high_open):
        assert "no number lies between its bounds" in refusal(schema).message
        return
    grammar = grammar_of(schema)
    ten_thousandths = st.integers(-10_000, 10_000).map(lambda number: Decimal(number) / 10_000)
    near = st.builds(lambda bound, away: bound + away, st.sampled_from([one, other]), ten_thousandths)
    for value in data.draw(st.lists(near, min_size=8, max_size=8)):
        for text in (_shortest(value), _shortest(Decimal(int(value)))):
            assert grammar.accepts(text) == (errors(text, schema) == []), text


def _shortest(value: Decimal) -> str:
    return f"{value.normalize():f}" if value else "0"


@pytest.mark.parametrize(
    "schema, reason",
    [
        ({"type": "integer", "maximum": 10**30}, "more than 18 digits"),
        ({"type": "number", "minimum": -(10**30)}, "more than 12 digits"),
        ({"type": "number", "minimum": 0.1234567}, "digits after its point"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "the minimum is above the maximum"),
        ({"type": "integer", "minimum": 0.2, "maximum": 0.8}, "no integer lies between"),
        ({"type": "integer", "exclusiveMinimum": True, "minimum": 1}, "must be a number"),
        ({"type": "integer", "minimum": "1"}, "must be a number"),
    ],
)
def test_bounds_that_cannot_be_kept_are_refused(schema: Any, reason: str) -> None:
    assert reason in refusal(schema).message


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keyword, value",
    [
        ("not", {"const": 1}),
        ("if", {"type": "string"}),
        ("patternProperties", {"^a": {}}),
        ("propertyNames", {"maxLength": 3}),
        ("dependentRequired", {"a": ["b"]}),
        ("dependentSchemas", {"a": {}}),
        ("unevaluatedProperties", False),
        ("contains", {"const": 1}),
        ("uniqueItems", True),
        ("multipleOf", 5),
        ("$dynamicRef", "#x"),
    ],
)
def test_keywords_that_are_not_built_are_refused_by_name_and_place(keyword: str, value: Any) -> None:
    error = refusal(an_object(a={keyword: value}))
    assert error.code is ErrorCode.UNSUPPORTED_PARAMETER
    assert f"#/properties/a: the keyword '{keyword}'" in error.message


@pytest.mark.parametrize("keyword, value", [("uniqueItems", False), ("patternProperties", {}), ("propertyNames", True)])
def test_keywords_that_demand_nothing_are_skipped(keyword: str, value: Any) -> None:
    assert translated({"type": "integer", keyword: value}) == translated({"type": "integer"})


@pytest.mark.parametrize(
    "schema, place, reason",
    [
        ({"type": "object", "properties": {"foo": "bar"}}, "#/properties/foo", "must be an object or a boolean"),
        ({"type": "object", "properties": []}, "#", "'properties' must be an object"),
        ({"type": "object", "required": "a"}, "#", "'required' must be an array"),
        ({"type": "text"}, "#", "'type' must be one or several of"),
        ({"type": []}, "#", "'type' must be one or several of"),
        ({"enum": []}, "#", "'enum' must be an array of at least one"),
        ({"anyOf": {}}, "#", "'anyOf' must be an array of at least one"),
        ({"type": "array", "minItems": 3, "maxItems": 1}, "#", "at least 3 items are demanded, and at most 1"),
        ({"type": "array", "minItems": -1}, "#", "'minItems' must be an integer of 0 or more"),
        ({"type": "string", "minLength": 3, "maxLength": 1}, "#", "'minLength' is above 'maxLength'"),
        ({"type": "string", "pattern": 5}, "#", "'pattern' must be a string"),
        ({"type": "string", "pattern": "["}, "#", "in 'pattern', a class has no end"),
        (False, "#", "nothing is allowed here"),
        (an_object("a", a=False), "#/properties/a", "nothing is allowed here"),
        ({**an_object("b", a={}), "additionalProperties": False}, "#/additionalProperties", "nothing is allowed here"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "#/allOf/0", "exclude each other"),
        ({"enum": ["a"], "type": "integer"}, "#", "no value of 'enum' or 'const' fits"),
        ({"anyOf": [{"type": "integer", "enum": ["a"]}, False]}, "#", "none of the alternatives of 'anyOf'"),
        ({"$ref": "#/$defs/no"}, "#", "the reference '#/$defs/no' leads to nothing"),
        ({"$ref": 5}, "#", "'$ref' must be a string"),
        ({"properties": {"a": 1}, "$ref": "#/properties/a"}, "#/properties/a", "must be an object or a boolean"),
        ({"$ref": "#"}, "#", "refers to itself with nothing in between"),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "#", "refers to itself with nothing in between"),
        (an_object("a", a={"$ref": "#"}), "#", "each value of it would have to contain another one"),
        ({"const": "\ud800"}, "", "it needs a character that no text can have"),
    ],
)
def test_broken_schemas_are_refused_by_place(schema: Any, place: str, reason: str) -> None:
    error = refusal(schema)
    assert error.code is ErrorCode.INVALID_VALUE
    assert f"{place}: " in error.message or not place
    assert reason in error.message


@pytest.mark.parametrize(
    "schema, reason",
    [
        ({"$ref": "https://example.org/s"}, "the reference 'https://example.org/s' is not of the form"),
        ({"$ref": "#anchor"}, "the reference '#anchor' is not of the form"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "alternatives 0 and 1 of 'oneOf' may both accept"),
        ({"oneOf": [an_object("a", a={}), an_object("b", b={}), an_object(c={})]}, "of 'oneOf' may both accept"),
        ({"type": "array", "items": [{}]}, "use 'prefixItems'"),
        ({"type": "string", "maxLength": GrammarLimits().repetitions_max + 1}, "'maxLength' is 2001; at most 2000"),
        ({"type": "array", "minItems": 10**30}, "'minItems' is more than 10^9"),
        ({"type": "string", "format": "ipv6"}, "this format is not supported"),
        ({"type": "string", "pattern": "a", "format": "date"}, "several patterns or formats"),
        ({"type": "string", "pattern": "^a*$", "minLength": 3}, "beside 'pattern' is only supported where it follows"),
        ({"type": "string", "pattern": "(?<=a)b"}, "in 'pattern', look-behind"),
        ({"type": "string", "enum": ["a"], "minLength": 1}, "'minLength' beside 'enum' or 'const'"),
        ({"type": "object", "minProperties": 1}, "'minProperties' above"),
        ({"type": "object", "maxProperties": 1}, "'maxProperties' below"),
    ],
)
def test_what_may_be_right_and_is_not_built_is_refused_as_such(schema: Any, reason: str) -> None:
    error = refusal(schema)
    assert error.code is ErrorCode.UNSUPPORTED_PARAMETER
    assert reason in error.message


@pytest.mark.parametrize(
    "text, reason",
    [
        ("", "it is not JSON"),
        ("{", "it is not JSON"),
        ("[1]", "must be an object"),
        ('{"const": NaN}', "NaN is no JSON number"),
        ('{"const": ' + "1" * 101 + "}", "a number has more than 100 characters"),
    ],
)
def test_text_that_is_no_schema_is_refused(text: str, reason: str) -> None:
    assert reason in refusal(None, text=text).message
