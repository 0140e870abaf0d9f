"""Regular expressions: llama.cpp lets through what Python's `re` matches in full, and the rest is refused by name."""

from __future__ import annotations

import json
import re
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import ErrorCode, MeshError
from schemas.sampling import RegexGrammar, SchemaGrammar
from tests.support.grammar import LoadedGrammar, compiled, loaded


def grammar_of(pattern: str) -> LoadedGrammar:
    return loaded(compiled(RegexGrammar(pattern=pattern), param="guided_regex"))


def string_of(pattern: str) -> SchemaGrammar:
    return SchemaGrammar(schema=json.dumps({"type": "string", "pattern": pattern}))


def in_json(pattern: str) -> LoadedGrammar:
    return loaded(compiled(string_of(pattern)))


PATTERNS = [
    ("a+b?", ["a", "aab", "b", ""]),
    ("(ab|cd){2,3}x", ["ababx", "abcdabx", "abx", "ababababx"]),
    (r"\d{3}-\w+\s", ["123-ab ", "12-a ", "123-a"]),
    (r"[\w.-]+@[a-z]+\.com", ["a.b-c@x.com", "a@x.org"]),
    (r"^a$|^bc$", ["a", "bc", "ab", ""]),
    (r"(a*)*b", ["b", "aab", "a"]),
    (r"(?:a|b)*?".removesuffix("?"), ["", "abba", "c"]),
    (r"", ["", "a"]),
    (r"x{0}y", ["y", "xy"]),
    (r"\.\\\[\]\"", ['.\\[]"', "x"]),
    (r"[\]\-^]", ["]", "-", "^", "\\"]),
    (r"[^\]a-c]x", ["dx", "éx", "]x", "bx"]),
    (r"\D\W\S", ["a -", "1aa", "a-\u3000"]),
    (r"\u00e9|\x41|\t", ["é", "A", "\t", "e"]),
    (r"yes|no|a\+b\ \(c\)", ["yes", "a+b (c)", "aab (c)", "ye"]),
    ("ab\nc", ["ab\nc", "ab c"]),
    ("((a|b)c?){0,3}", ["", "acb", "acbca", "aaaa"]),
    ("[0-9]{1,3}(,[0-9]{3})*", ["1", "12,345", "1,23"]),
    ('say "hi"|tab\\\\', ['say "hi"', "tab\\", "tab"]),
]


@pytest.mark.parametrize("pattern, texts", PATTERNS)
def test_texts_are_let_through_as_python_matches_them(pattern: str, texts: list[str]) -> None:
    grammar = grammar_of(pattern)
    for text in texts:
        assert grammar.accepts(text) == (re.fullmatch(pattern, text) is not None), text


@pytest.mark.parametrize("pattern, texts", PATTERNS)
def test_strings_are_let_through_as_python_matches_them(pattern: str, texts: list[str]) -> None:
    grammar = in_json(pattern)
    for text in texts:
        found = re.search(pattern, text) is not None
        assert grammar.accepts(json.dumps(text, ensure_ascii=False)) == found, text


@pytest.mark.parametrize("pattern", [pattern for pattern, _ in PATTERNS])
def test_random_answers_match(pattern: str) -> None:
    grammar, random = grammar_of(pattern), Random(pattern)
    for _ in range(20):
        answer = grammar.random_answer(random)
        assert re.fullmatch(pattern, answer), answer


atoms = st.sampled_from(["a", "b", "[ab]", "-", '"', "ab"])
signs = st.sampled_from(["?", "*", "+", "{0,2}", "{1,3}", "{2}", "{2,}"])
expressions = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda each: f"({'|'.join(each)})"),
        st.tuples(inner, signs).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(expressions, st.lists(st.text('ab-"', max_size=7), min_size=6, max_size=6))
def test_expressions_that_can_be_read_in_several_ways_are_rewritten_to_the_same(pattern: str, texts: list[str]) -> None:
    try:
        whole, inside = compiled(RegexGrammar(pattern=pattern)), compiled(string_of(pattern))
    except MeshError as error:
        assert "may be empty is repeated without limit" in error.message  # noqa: PT017
        return
    for gbnf, written, match in ((whole, str, re.fullmatch), (inside, json.dumps, re.search)):
        grammar = LoadedGrammar(gbnf)
        for text in texts:
            assert grammar.accepts(written(text)) == (match(pattern, text) is not None), text
        grammar.close()


def test_the_filling_of_a_rewritten_pattern_takes_every_escape() -> None:
    grammar = in_json("(a?b?){1,9}c")
    assert grammar.accepts('"\\u00e9 \\/\\n\\\\ é abc \\udEaD"'.replace("\\udEaD", "\\uD7aD"))
    for text in ['"c\\ud800"', '"c\\x"', '"c\n"', '"ab"']:
        assert not grammar.accepts(text)


@pytest.mark.parametrize("pattern", [r"[^\d]", r"[^\w]", r"[^\s]", r"\D", r"\W", r"\S", r"."])
def test_negations_let_through_only_what_all_dialects_match(pattern: str) -> None:
    ecma = {r"[^\d]": "[^0-9]", r"\D": "[^0-9]", r"[^\w]": "[^A-Za-z0-9_]", r"\W": "[^A-Za-z0-9_]"}.get(
        pattern, pattern
    )
    grammar = grammar_of(pattern)
    for char in "a1_ -é٣Ω\u3000\ufeff\u2028\n\t\x1c名":
        if grammar.accepts(char):
            assert re.fullmatch(pattern, char), char
            assert re.fullmatch(ecma, char), char
    assert grammar.accepts("-")


def test_a_pattern_that_is_not_anchored_may_be_found_anywhere() -> None:
    assert in_json("b").accepts('"abc"')
    assert in_json("^b").accepts('"bc"')
    assert not in_json("^b").accepts('"ab"')
    assert not in_json("b$").accepts('"bc"')
    assert not grammar_of("b").accepts("abc")


@pytest.mark.parametrize(
    "pattern, name",
    [
        (r"(?<!a)b", "look-behind"),
        (r"(?<=a)b", "look-behind"),
        (r"(?=a)", "look-ahead"),
        (r"(?!a)", "look-ahead"),
        (r"(a)\1", "a back-reference"),
        (r"(?P<x>a)", "named groups"),
        (r"(?<x>a)\k<x>", "named groups"),
        (r"a*?", "a lazy repetition"),
        (r"a{1,2}?", "a lazy repetition"),
        (r"a++", "a possessive repetition"),
        (r"\bx", "a word boundary"),
        (r"x\B", "a word boundary"),
        (r"(?i)a", "a group with flags"),
        (r"\p{L}", r"the escape '\p'"),
        (r"\Aa", r"the escape '\A'"),
        (r"a^b", "'^' inside of it"),
        (r"(^a|b)", "'^' inside of it"),
        (r"(a$)b", "'$' inside of it"),
        (r"(a|b?)*", "may be empty is repeated without limit"),
    ],
)
def test_what_is_not_built_is_refused_by_name(pattern: str, name: str) -> None:
    with pytest.raises(MeshError) as caught:
        grammar_of(pattern)
    assert (caught.value.code, caught.value.param) == (ErrorCode.UNSUPPORTED_PARAMETER, "guided_regex")
    assert name in caught.value.message


UNFINISHED = ["[", "[a", "(", "a)", "a{", "\\", "\\x1"]
MEANINGLESS = ["*a", "a|*", "a**", "a{2,1}", "a{,3}", "[z-a]", "[a-\\d]", "[]", "[[a]"]


@pytest.mark.parametrize("pattern", UNFINISHED + MEANINGLESS)
def test_broken_expressions_are_refused(pattern: str) -> None:
    with pytest.raises(MeshError) as caught:
        grammar_of(pattern)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_VALUE, "guided_regex")
    assert "near its character" in caught.value.message
