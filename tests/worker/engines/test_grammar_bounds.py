"""Grammars that would bring llama.cpp down, or hold up the requests beside them, are refused in time."""

from __future__ import annotations

import json
import time
from typing import Any

import llama_cpp.llama_grammar
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import ErrorCode, MeshError
from schemas.sampling import GbnfGrammar, Grammar, RegexGrammar, SchemaGrammar
from tests.support.grammar import LoadedGrammar, compiled, loaded
from tests.support.schemas import SCHEMAS, an_object
from tests.worker.engines.test_grammar_regex import PATTERNS

COMPILE_S = 0.25
"""Seconds that checking and translating one grammar may take on one core. The worst here takes 0.08 on an idle one, and
CPU time too is longer where others use caches and memory: 0.13 beside four busy processes on two cores."""


def schema(value: Any) -> SchemaGrammar:
    return SchemaGrammar(schema=json.dumps(value))


def cpu_s(grammar: Grammar) -> tuple[float, MeshError | None]:
    """Seconds of this process's CPU that a translation or refusal takes: the best of three."""
    best, refused = float("inf"), None
    for _ in range(3):
        begun = time.process_time()
        try:
            compiled(grammar)
        except MeshError as error:
            refused = error
        best = min(best, time.process_time() - begun)
    return best, refused


def names(count: int) -> list[str]:
    return [f"property number {i}" for i in range(count)]


def chained(count: int, link: Any) -> dict[str, Any]:
    """`count` definitions, each made of the reference to the next one by `link`."""
    definitions = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"$defs": {**definitions, f"d{count}": {"type": "null"}}, "$ref": "#/$defs/d0"}


# --- schemas ----------------------------------------------------------------------------------------------------------

LARGE = {
    "400 required members": an_object(*names(400), **{name: {"type": "string"} for name in names(400)}),
    "100 optional members": an_object(**{name: {"type": "integer"} for name in names(100)}),
    "60 members and others": {
        **an_object(**{name: {"type": "integer"} for name in names(60)}),
        "additionalProperties": {"type": "integer"},
    },
    "enum of 1,000": {"enum": [f"{i * 7919 % 100_003} of them" for i in range(1_000)]},
    "100 alternatives": {"anyOf": [an_object("k", "v", k={"const": f"c{i}"}, v={}) for i in range(100)]},
    "60 in a row": chained(60, lambda ref: an_object("a", a=ref)),
    "60 lengths": an_object(**{f"p{i}": {"type": "string", "maxLength": 100 + i} for i in range(60)}),
    "60 patterns": an_object(
        **{f"p{i}": {"type": "string", "pattern": f"^([a-z]{{2,{i + 3}}}|x)+$"} for i in range(60)}
    ),
    "long title": {"title": "x" * 250_000, "type": "integer"},
    "6,000 definitions": {"$defs": {f"d{i}": {"type": "integer"} for i in range(6_000)}, "type": "integer"},
    "members named as rules are": an_object(
        **{f"a-{i}": {"type": "integer", "maximum": i} for i in range(100, 160)},
        a=an_object(a=an_object(a={"type": "null"})),
    ),
    "items that nothing fits": {
        "type": "array",
        "prefixItems": [{"type": "array", "items": {"type": "boolean"}}],
        "items": {"type": "array", "prefixItems": [{"type": "array", "minItems": 2, "maxItems": 1}]},
    },
}


PATTERN_IN_VAIN = {
    **an_object("never", never=False, again={"$ref": "#"}),
    "type": ["string", "object"],
    "pattern": "([a-z]{2,9}x|y)" * 20,
}
LARGE["300 references to what accepts nothing"] = {
    "$defs": {"n": PATTERN_IN_VAIN},
    **an_object(**{name: {"$ref": "#/$defs/n"} for name in names(300)}),
}
LARGE["90 alternatives that accept nothing in the end"] = {
    "$defs": {"again": {**PATTERN_IN_VAIN, "required": [], "properties": {"again": {"$ref": "#"}}}},
    "anyOf": [
        *(an_object("again", "never", again={"$ref": "#/$defs/again"}, never=False) for _ in range(90)),
        {"type": "null"},
    ],
}


@pytest.mark.parametrize("name", LARGE)
def test_large_schemas_are_translated_in_time_and_load(name: str) -> None:
    took_s, refused = cpu_s(schema(LARGE[name]))
    assert refused is None
    assert took_s < COMPILE_S
    loaded(compiled(schema(LARGE[name])))


BOMBS = {
    "enum of 100,000": ({"enum": list(range(100_000))}, "bytes"),
    "enum of 1,001": ({"enum": list(range(1_001))}, "'enum' has 1001 values"),
    "101 alternatives": ({"anyOf": [{"const": i} for i in range(101)]}, "has 101 alternatives"),
    "cross product": (
        {"allOf": [{"anyOf": [an_object(f"p{i}-{j}") for j in range(10)]} for i in range(6)]},
        "it is too large",
    ),
    "doubled 60 times": (chained(60, lambda ref: {"allOf": [ref, ref]}), "references in a row"),
    "500 in a row": (chained(500, lambda ref: an_object("a", a=ref)), "nested more than 64 deep before they recur"),
    "200 optional members": (an_object(**{name: {} for name in names(200)}), "more than 128 ways"),
    "2,000 members": (an_object(**{name: {} for name in names(2_000)}), "it is too large"),
    "lengths": (
        an_object(**{f"p{i}": {"type": "string", "maxLength": 2_000 - i} for i in range(60)}),
        "repetitions written out",
    ),
    "words with one beginning": ({"enum": ["a" * i for i in range(500)]}, "ways to go on"),
    "pattern": ({"type": "string", "pattern": "^((a{0,50}b?){0,50}c?){0,50}$"}, "more than 128 ways"),
    "long pattern": ({"type": "string", "pattern": "a" * 9_000}, "8192 are allowed"),
    "nested pattern": ({"type": "string", "pattern": "(" * 1_000 + ")" * 1_000}, "groups are nested more than 64"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_among_schemas_are_refused_in_time(name: str) -> None:
    value, reason = BOMBS[name]
    took_s, refused = cpu_s(schema(value))
    assert refused is not None
    assert reason in refused.message
    assert took_s < COMPILE_S


@pytest.mark.parametrize("opening, closing", [("[", ""), ("[", "]"), ('{"not":', ""), ('{"a":', "1}")])
def test_deeply_nested_text_is_refused_before_it_is_parsed(opening: str, closing: str) -> None:
    text = opening * 20_000 + closing * 20_000
    took_s, refused = cpu_s(SchemaGrammar(schema=text))
    assert refused is not None
    assert "nested more than 64 deep" in refused.message
    assert took_s < COMPILE_S


TOO_LONG = "more than 100 characters"
TOO_FAR = "an exponent beyond -324 to 308"


@pytest.mark.parametrize(
    "text, place, reason",
    [
        ('{"enum":[1,1e200000],"type":"integer"}', "#/enum/1", TOO_FAR),
        ('{"properties":{"a/b":{"minimum":1e9999999}}}', "#/properties/a~1b/minimum", TOO_FAR),
        ('{"minLength":-1e309}', "#/minLength", TOO_FAR),
        ('{"type":"number","maximum":1e-325}', "#/maximum", TOO_FAR),
        ('{"const":1e99999999999999999999}', "#/const", TOO_FAR),
        (f'{{"maximum":{"1" * 101}}}', "#/maximum", TOO_LONG),
        (f'{{"maximum":0.{"1" * 200_000}}}', "#/maximum", TOO_LONG),
        (f'{{"const":{"1" * 101},"maximum":1e309}}', "#/const", TOO_LONG),
        (f'{{"maximum":1e309,"const":{"1" * 101}}}', "#/maximum", TOO_FAR),
    ],
)
def test_numbers_that_arithmetic_takes_long_for_are_refused_in_their_place(text: str, place: str, reason: str) -> None:
    took_s, refused = cpu_s(SchemaGrammar(schema=text))
    assert refused is not None
    assert refused.code is ErrorCode.INVALID_VALUE
    assert f"{place}: a number has {reason}" in refused.message
    assert took_s < COMPILE_S


def test_numbers_up_to_those_bounds_are_written() -> None:
    text = '{"enum":[1e308,-5e-324,0e9999999,0e-99999999999],"type":"number"}'
    grammar = loaded(compiled(SchemaGrammar(schema=text)))
    assert all(grammar.accepts(number) for number in ("1E+308", "-5E-324", "0"))


# --- GBNF -------------------------------------------------------------------------------------------------------------

GIVEN = [name for name in dir(llama_cpp.llama_grammar) if name.endswith("_GBNF")]


@pytest.mark.parametrize("name", GIVEN)
def test_grammars_that_come_with_llama_cpp_are_taken_as_they_are(name: str) -> None:
    text = getattr(llama_cpp.llama_grammar, name)
    assert compiled(GbnfGrammar(text=text)) == text
    loaded(text)


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "a" | "b"',
        'root ::= [^"\\\\]+ "x"{2,3} # a comment\n',
        'root ::= (\n "a" |\n "b" )* end\r\nend ::= "."',
        'root ::= "" | "a"',
        'root ::= item{0,2000}\nitem ::= "x"',
        "root ::= [a-] [-a] [\\-a] [\\x41-\\u00e9\\U0001F600]",
        'root ::= "a" root | ""',
        'root ::= "a" {2} "b" { 1 , 2 }',
        "root ::= .*",
    ],
)
def test_what_is_taken_loads(text: str) -> None:
    loaded(compiled(GbnfGrammar(text=text)))


@pytest.mark.parametrize(
    "text, reason",
    [
        ("", "no rule 'root'"),
        ('start ::= "a"', "no rule 'root'"),
        ("root ::= missing", "'missing' is not defined"),
        ('root ::= "a"\nroot ::= "b"', "line 2: the rule 'root' is defined twice"),
        ('root ::= root "a" | "b"', "'root' begins with itself"),
        ('root ::= a root "x" | "y"\na ::= b\nb ::= "" | "z"', "'root' begins with itself"),
        ("root ::= a\na ::= b\nb ::= a | root", "can never end"),
        ('root ::= "a" root', "can never end"),
        ('root ::= "a" | "b" dead\ndead ::= "c" dead', "can never end"),
        ('root ::= ("a"?)*', "may be empty is repeated without limit"),
        ('root ::= "a"{3,1}', "maximum is below its minimum"),
        ('root ::= "a"{1,3000}', "repeated more than 2000 times"),
        ('root ::= "a"{99999999999999999999}', "repeated more than 2000 times"),
        ('root ::= ("a"{0,100}){0,100}', "nested repetitions come to more than 2000"),
        ("root ::= []", "a class of characters is empty"),
        ("root ::= [z-a]", "no character that a text can have"),
        ("root ::= [^\\x00-\\U0010FFFF]", "no character that a text can have"),
        ('root ::= "\\x00"', "a character that no text can have"),
        ('root ::= "\\uD800"', "a character that no text can have"),
        ('root ::= "a\0b"', "a character that no text can have"),
        ('root ::= "\\q"', "line 1: there is an unknown escape"),
        ('root ::= "a', "an open literal or class"),
        ('root ::= ("a"', "expected ')'"),
        ('root ::= "a")', "expected the end of the line"),
        ('root ::= * "a"', "nothing before a repetition"),
        ('root ::= "a"\n| "b"', "line 2: expected a rule's name"),
        ('root\n::= "a"', "expected '::='"),
        ("root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000, "groups are nested more than 64 deep"),
        ("root ::= " + "(" * 65 + '"a"' + ")" * 65, "groups are nested more than 64 deep"),
        ("root ::= " + " | ".join(f'"w{i}"' for i in range(200)), "'root' can begin in more than 128 ways"),
        (
            "root ::= a0\n" + "\n".join(f"a{i} ::= a{i + 1} | a{i + 1}" for i in range(60)) + '\na60 ::= "x"',
            "can begin in more than 128 ways",
        ),
        (
            "root ::= a0\n" + "\n".join(f"a{i} ::= a{i + 1}" for i in range(2_000)) + '\na2000 ::= "x"',
            "more than 1000 rules begin with each other",
        ),
        ('root ::= "a" ' + "x{2000} " * 200 + '\nx ::= "a"', "more than 200000 elements"),
        ('root ::= "' + "a" * 200_000 + '"', "131072 are allowed"),
    ],
)
def test_grammars_that_would_bring_llama_cpp_down_are_refused_in_time(text: str, reason: str) -> None:
    took_s, refused = cpu_s(GbnfGrammar(text=text))
    assert refused is not None
    assert (refused.code, refused.param) == (ErrorCode.INVALID_VALUE, "response_format")
    assert reason in refused.message
    assert took_s < COMPILE_S


# --- ways to read one text --------------------------------------------------------------------------------------------

NODE = {"$ref": "#/$defs/node"}


def either_of(*alternatives: Any) -> dict[str, Any]:
    return {"$defs": {"node": {"anyOf": list(alternatives)}}, **NODE}


DOUBLING = {
    "definitions in a row": chained(
        20, lambda ref: {"anyOf": [an_object("c", "a", c=ref, a={}), an_object("c", c=ref)]}
    ),
    "recursive arrays": {"anyOf": [{"type": "array", "items": {"$ref": "#"}, "maxItems": n} for n in (2, 3)]},
    "recursive objects": either_of(
        an_object("left", "a", left=NODE, a={}), an_object("left", "b", left=NODE, b={}), {"type": "null"}
    ),
}


@pytest.mark.parametrize("name", DOUBLING)
def test_alternatives_that_double_with_each_level_are_refused_in_time(name: str) -> None:
    took_s, refused = cpu_s(schema(DOUBLING[name]))
    assert refused is not None
    assert "can be read in more than 256 ways at once" in refused.message
    assert took_s < COMPILE_S


@pytest.mark.parametrize(
    "text", ['root ::= "a" root "b" | "a" root "c" | "a"', 'root ::= "[" root "]" | "[" root ")" | "x"']
)
def test_grammars_that_keep_ever_more_ways_open_are_refused(text: str) -> None:
    _, refused = cpu_s(GbnfGrammar(text=text))
    assert refused is not None
    assert "can be read in more than 256 ways at once" in refused.message


def test_alternatives_that_soon_tell_themselves_apart_are_taken() -> None:
    tagged = either_of(
        an_object("op", "l", "r", op={"const": "add"}, l=NODE, r=NODE),
        an_object("op", "l", "r", op={"const": "mul"}, l=NODE, r=NODE),
        {"type": "integer"},
    )
    assert loaded(compiled(schema(tagged))).accepts('{"op":"add","l":1,"r":{"op":"mul","l":2,"r":3}}')
    loaded(compiled(RegexGrammar(pattern="(a|a?b|aa)+(a|b)*[ab]{0,300}c")))


def test_rules_for_single_tokens_are_refused_by_name() -> None:
    for text in ("root ::= <think>", "root ::= !<[5]>"):
        _, refused = cpu_s(GbnfGrammar(text=text))
        assert refused is not None
        assert refused.code is ErrorCode.UNSUPPORTED_PARAMETER
        assert "tokens (<...>) are not read" in refused.message


def test_many_choices_share_their_beginnings() -> None:
    took_s, refused = cpu_s(RegexGrammar(pattern="|".join(f"choice number {i}" for i in range(400))))
    assert refused is None
    assert took_s < COMPILE_S


# --- paths through one token ------------------------------------------------------------------------------------------

ASKED_S = 0.2
"""Seconds that llama.cpp may take to ask the vocabulary of 49,152 tokens once. Usual grammars take 0.01 to 0.05."""

REWRITTEN = [
    "([a-z]?){0,100}",
    r"(\w{0,5}-?){0,30}",
    "([a-z]?[0-9]?){0,60}",
    r"(\w?-?){0,40}",
    r"(\w+\s?){1,20}",
    "( ?[a-rt-z]+)+",
    "(([a-rt-z]+)+ ?)+",
    "([ ]{1,3}){1,20}x",
    "hello ([a-z]+ ?)+",
    "[a-z]{0,100}[a-z]{0,100}[a-z]{0,100}",
    "(a|a?b|aa)+(a|b)*[ab]{0,300}c",
]
"""Expressions whose ways to read a token multiply as they are written."""


@pytest.mark.parametrize("pattern", REWRITTEN)
def test_expressions_with_many_readings_are_rewritten_and_cheap(pattern: str) -> None:
    in_json = {"type": "string", "pattern": f"^{pattern}$"}
    for grammar, begun in ((RegexGrammar(pattern=pattern), ""), (schema(in_json), '"')):
        took_s, refused = cpu_s(grammar)
        assert refused is None
        assert took_s < COMPILE_S
        assert loaded(compiled(grammar)).asked_s(begun) < ASKED_S


@pytest.mark.parametrize("count", [8, 12, 16, 20])
def test_expressions_too_large_to_rewrite_are_refused_in_time(count: int) -> None:
    pattern = f"([a-z]{{0,40}}[0-9]{{0,40}}){{0,{count}}}"
    for grammar in (RegexGrammar(pattern=pattern), schema({"type": "string", "pattern": f"^{pattern}$"})):
        took_s, refused = cpu_s(grammar)
        assert refused is not None
        assert "engine.limits.grammar.paths_max" in refused.message
        assert took_s < COMPILE_S


@pytest.mark.parametrize(
    "body",
    [
        '("a"?){0,100}',
        "([a-z]?){0,100}",
        '([a-z]{0,5} "-"?){0,20}',
        "([a-z]? [0-9]?){0,60}",
        '([a-z]? "-"?){0,40}',
        "([a-z]{0,40} [0-9]{0,40}){0,20}",
        '(" "? [a-rt-z]+)+ "."',
        '"hello " ([a-z]+ " "?)+',
        '([a-z]+ | [a-z]+ " ")* "x"',
        "w{0,100}\nw ::= v?\nv ::= [a-z]",
    ],
)
def test_grammars_whose_readings_of_a_token_multiply_are_refused_in_time(body: str) -> None:
    took_s, refused = cpu_s(GbnfGrammar(text=f"root ::= {body}"))
    assert refused is not None
    assert "engine.limits.grammar.paths_max" in refused.message
    assert took_s < COMPILE_S


USUAL = [
    r"[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,}",
    r"https?://[\w.-]+(:\d+)?(/[\w./%-]*)?(\?[\w=&%-]*)?(#\w*)?",
    r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])",
    r"\+?\d{1,3}[ -]?(\(\d{1,4}\))?([ -]?\d{2,4}){1,5}",
    r"[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}",
    "[a-z]{0,40}",
    "(a|b|c){0,100}",
    "([A-Z][a-z]+ ?){1,5}",
    r"\s*\w+(\s*,\s*\w+)*\s*",
    r".*\d+.*",
]
ITEMS = {
    "type": "array",
    "items": an_object(
        "id",
        id={"type": "string", "format": "uuid"},
        tags={"type": "array", "items": {"type": "string"}},
        mail={"type": "string", "format": "email"},
        site={"type": "string", "format": "uri"},
        score={"type": "number"},
    ),
}
ORDINARY: dict[str, tuple[Grammar, str]] = {
    **{pattern: (RegexGrammar(pattern=pattern), "") for pattern in [*USUAL, *(each for each, _ in PATTERNS)]},
    **{
        f"{pattern} in a string": (schema({"type": "string", "pattern": pattern}), '"')
        for pattern in [*USUAL, *(each for each, _ in PATTERNS)]
    },
    **{name: (schema(value), "") for name, value in {**LARGE, **SCHEMAS}.items()},
    "items": (schema(ITEMS), '[{"id":"00000000-0000-0000-0000-000000000000"'),
    "optional members, one given": (schema(LARGE["100 optional members"]), '{"property number 1":1'),
    **{name: (GbnfGrammar(text=getattr(llama_cpp.llama_grammar, name)), "") for name in GIVEN},
}


@pytest.mark.parametrize("name", ORDINARY)
def test_what_is_accepted_is_asked_in_time(name: str) -> None:
    grammar, begun = ORDINARY[name]
    assert loaded(compiled(grammar)).asked_s(begun) < ASKED_S


atoms = st.sampled_from(["[a-z]", r"\w", "[a-rt-z]", " ", "[0-9]", "-", "[ a-z]"])
repetitions = st.sampled_from(["", "?", "+", "{0,5}", "{1,20}", "{0,60}"])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(atoms, repetitions), min_size=1, max_size=3), repetitions, st.lists(atoms, max_size=1))
def test_whatever_expression_is_accepted_is_asked_in_time(
    parts: list[tuple[str, str]], repetition: str, end: list[str]
) -> None:
    pattern = f"({''.join(map(''.join, parts))}){repetition}{''.join(end)}"
    took_s, refused = cpu_s(RegexGrammar(pattern=pattern))
    assert took_s < COMPILE_S
    if refused is None:
        assert LoadedGrammar(compiled(RegexGrammar(pattern=pattern))).asked_s() < ASKED_S
