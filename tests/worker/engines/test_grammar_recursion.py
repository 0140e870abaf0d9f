"""Schemas that refer to each other in a circle, some of which accept no value: their rules mean what they say."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from schemas.errors import MeshError
from schemas.sampling import SchemaGrammar
from tests.support.grammar import LoadedGrammar, compiled, loaded
from tests.support.schemas import an_object

NEVER = {"allOf": [{"type": "string"}, {"type": "integer"}]}
NULL = {"type": "null"}
X = {"$ref": "#/$defs/X"}
N = {"$ref": "#/$defs/N"}
IN_VAIN = {"N": an_object("child", "bad", child=X, bad=NEVER), "X": {"anyOf": [NULL, N]}}
"""X is first written for N, which accepts nothing: X is null alone."""


def grammar_of(schema: Any) -> LoadedGrammar:
    return loaded(compiled(SchemaGrammar(schema=json.dumps(schema))))


def test_the_rule_of_an_unsatisfiable_schema_is_not_taken_for_another_one() -> None:
    tried = {"anyOf": [an_object("n", n=N), {"type": "string"}]}
    schema = {"$defs": IN_VAIN, **an_object("p", "n", "other", p=tried, n={"type": "integer"}, other=X)}
    grammar = grammar_of(schema)
    assert grammar.accepts('{"p":"x","n":1,"other":null}')
    assert not grammar.accepts('{"p":"x","n":1,"other":5}')


def test_a_schema_that_referred_to_an_unsatisfiable_one_is_written_again() -> None:
    schema = {"$defs": IN_VAIN, "anyOf": [an_object("n", n=N), an_object("x", x=X)]}
    grammar = grammar_of(schema)
    assert grammar.accepts('{"x":null}')
    assert not grammar.accepts('{"x":{"child":null,"bad":1}}')


def test_what_refers_to_what_referred_to_an_unsatisfiable_one_is_written_again() -> None:
    further = {"Y": an_object("x", x=X), "N": an_object("y", "bad", y={"$ref": "#/$defs/Y"}, bad=NEVER)}
    schema = {"$defs": {**IN_VAIN, **further}, "anyOf": [N, {"$ref": "#/$defs/Y"}]}
    grammar = grammar_of(schema)
    assert grammar.accepts('{"x":null}')
    assert not grammar.accepts('{"x":{"y":{"x":null},"bad":1}}')


def test_a_circle_outside_of_an_unsatisfiable_schema_stays() -> None:
    linked = {"L": an_object("bad", "next", next={"anyOf": [NULL, {"$ref": "#/$defs/L"}]}, bad={"type": "integer"})}
    schema = {"$defs": linked, **an_object("l", l={"$ref": "#/$defs/L"}, m=an_object("l", "n", l=N, n=NEVER))}
    schema["$defs"]["N"] = {"$ref": "#/$defs/L"}
    grammar = grammar_of(schema)
    assert grammar.accepts('{"l":{"next":{"next":null,"bad":1},"bad":2}}')
    assert not grammar.accepts('{"l":{"next":null,"bad":1},"m":{"l":{"next":null,"bad":1},"n":"x"}}')


def test_references_are_found_among_literals_and_classes() -> None:
    names = an_object('n"]', n=N, **{'n"]': {"type": "string", "pattern": r'^(n|"bad"|[\]{n}]){1,2}$'}})
    grammar = grammar_of({"$defs": IN_VAIN, **names})
    assert grammar.accepts('{"n\\"]":"n]"}')
    assert not grammar.accepts('{"n\\"]":"b"}')


REFERENCES = st.sampled_from([{"$ref": f"#/$defs/{name}"} for name in "ABC"])
SCHEMAS = st.recursive(
    REFERENCES | st.sampled_from([NULL, NEVER]),
    lambda inner: (
        st.builds(lambda either: {"anyOf": either}, st.lists(inner, min_size=2, max_size=3))
        | st.builds(lambda members: an_object(*members, **members), st.dictionaries(st.sampled_from("abc"), inner))
        | st.builds(lambda members: an_object(**members), st.dictionaries(st.sampled_from("abc"), inner))
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(st.fixed_dictionaries(dict.fromkeys("ABC", SCHEMAS)), st.permutations("ABC"), st.integers())
def test_whatever_refers_to_what_accepts_nothing_an_answer_is_accepted_by_the_schema(
    definitions: dict[str, Any], order: list[str], seed: int
) -> None:
    a, *others = ({"$ref": f"#/$defs/{name}"} for name in order)
    in_vain = an_object("a", "never", a=definitions[order[0]], never=NEVER)
    schema = {"$defs": {**definitions, order[0]: in_vain}, **an_object(*"xyz", x={"anyOf": [a, NULL]})}
    schema["properties"].update(zip("yz", others, strict=True))
    try:
        text = compiled(SchemaGrammar(schema=json.dumps(schema)))
    except MeshError as error:
        if "is not defined" in error.message:
            raise
        return
    grammar, validator = LoadedGrammar(text), Draft202012Validator(schema)
    try:
        answer = grammar.random_answer(Random(seed), steps_max=200)
    except AssertionError as error:
        if "no end after" not in str(error):
            raise
        return
    finally:
        grammar.close()
    assert validator.is_valid(json.loads(answer)), answer
