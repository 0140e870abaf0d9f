"""What a client demands of its answer's form to the grammar that llama.cpp keeps it with, or the reason why not."""

from __future__ import annotations

from typing import Final

from schemas.errors import ErrorCode, MeshError
from schemas.sampling import GRAMMAR_PARAM, GbnfGrammar, Grammar, JsonGrammar, RegexGrammar, SchemaGrammar
from worker.engines.llama.grammar.check import NeverEnds, TooManyWays, check_gbnf
from worker.engines.llama.grammar.document import Document
from worker.engines.llama.grammar.gbnf import Rules
from worker.engines.llama.grammar.growth import StaysOpen
from worker.engines.llama.grammar.json_rules import JsonRules
from worker.engines.llama.grammar.paths import PathsMultiply
from worker.engines.llama.grammar.refused import GrammarRefused, SchemaRefused
from worker.engines.llama.grammar.regex import parse_regex
from worker.engines.llama.grammar.regex_gbnf import RegexWriter
from worker.engines.llama.grammar.schema import SchemaWriter
from worker.engines.llama_limits import GrammarLimits

_NAMES: Final[dict[type[Grammar], str]] = {
    JsonGrammar: "The answer's form",
    SchemaGrammar: "The JSON schema",
    GbnfGrammar: "The grammar",
    RegexGrammar: "The regular expression",
}


def compile_grammar(grammar: Grammar, *, limits: GrammarLimits, param: str = GRAMMAR_PARAM) -> str:
    """The grammar as GBNF, with the rule `root`. llama.cpp can load it, and no answer begun in it is a dead end.

    `param` is the client's parameter that demands it.

    Pure, and bounded in time and size by `limits`. Raises `MeshError`: `invalid_value` for what is wrong or too large,
    `unsupported_parameter` for what may be right and cannot be kept; its message says where and why.
    """
    try:
        return _compile(grammar, limits)
    except GrammarRefused as error:
        name = _NAMES[type(grammar)]
        code = ErrorCode.UNSUPPORTED_PARAMETER if error.unsupported else ErrorCode.INVALID_VALUE
        raise MeshError(code, f"{name} cannot be used: {error.reason}.", param=param) from None


def _compile(grammar: Grammar, limits: GrammarLimits) -> str:
    match grammar:
        case GbnfGrammar(text=text):
            return _checked(text, limits)
        case SchemaGrammar(schema=schema):
            return _from_schema(schema, limits)
        case RegexGrammar(pattern=pattern):
            rules = Rules(limits)
            root = rules.reserve("root")
            rules.define(root, RegexWriter(rules, json=False).write(parse_regex(pattern, limits), any_char=None))
            return _checked(rules.text(), limits)
        case JsonGrammar():
            rules = Rules(limits)
            root = rules.reserve("root")
            rules.define(root, JsonRules(rules).object())
            return _checked(rules.text(), limits)


def _from_schema(schema: str, limits: GrammarLimits) -> str:
    document, rules = Document(schema, limits), Rules(limits)
    root = rules.reserve("root")
    writer = SchemaWriter(document, rules)
    rules.define(root, writer.write([document.root]))
    text = rules.text()
    try:
        return _checked(text, limits)
    except GrammarRefused as error:
        place = writer.places.get(error.rule or "", "#")
        raise SchemaRefused(place, _in_terms_of_schemas(error, limits)) from None


def _in_terms_of_schemas(error: GrammarRefused, limits: GrammarLimits) -> str:
    match error:
        case NeverEnds():
            return "each value of it would have to contain another one without an end"
        case TooManyWays():
            return (
                "optional members, alternatives or patterns leave more than "
                f"{limits.ways_max} ways to go on at one point (engine.limits.grammar.ways_max)"
            )
        case StaysOpen():
            return f"{error.reason}: alternatives that begin alike contain others of that kind"
        case PathsMultiply():
            return f"{error.reason}: parts of patterns or alternatives that match the same follow each other"
        case _:
            return f"its grammar is too large: {error.reason}"


def _checked(text: str, limits: GrammarLimits) -> str:
    check_gbnf(text, limits)
    return text
