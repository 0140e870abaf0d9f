"""The form that a client demands of its answer, under the names of OpenAI, llama-server and vLLM, to one grammar.

Only the shape of these parameters is judged here. Whether a schema, an expression or a grammar is one that can be kept
is for the engine to say, before the request is accepted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from msgspec import Raw

from gateway.dialects.refusal import check_bytes, invalid, unsupported
from gateway.settings import Limits
from schemas.sampling import GbnfGrammar, Grammar, JsonGrammar, RegexGrammar, SchemaGrammar

NO_JSON: Final = Raw(b"null")
RESPONSE_FORMATS: Final = ("text", "json_object", "json_schema")


class JsonSchemaFormat(msgspec.Struct, frozen=True):
    """OpenAI's wrapping of a schema. Every schema is kept strictly here, whatever `strict` says."""

    name: str | None = None
    description: str | None = None
    schema: Raw = NO_JSON
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """`response_format` of OpenAI. `schema` beside ``json_object`` is an extension of llama-server."""

    type: str | None = None
    json_schema: JsonSchemaFormat | None = None
    schema: Raw = NO_JSON


class StructuredOutputs(msgspec.Struct, frozen=True):
    """`structured_outputs` of vLLM. Its hints to a backend are skipped."""

    json: Raw = NO_JSON
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: Any = None


class StructuredBody(msgspec.Struct, frozen=True):
    """The part of a request's body that says what its answer must look like.

    `grammar` and `json_schema` are llama-server's, `guided_*` and `structured_outputs` vLLM's.
    """

    response_format: ResponseFormat | None = None
    json_schema: Raw = NO_JSON
    grammar: str | None = None
    guided_json: Raw = NO_JSON
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None


def read_grammar(body: StructuredBody, *, limits: Limits) -> tuple[str, Grammar] | None:
    """What the answer must match, behind the parameter that demands it; None where nothing is demanded.

    Raises `MeshError` naming the parameter, also when two are given.
    """
    demanded = list(_demanded(body, limits))
    if len(demanded) > 1:
        raise invalid(demanded[1][0], f"it cannot be combined with '{demanded[0][0]}'")
    return demanded[0] if demanded else None


def _demanded(body: StructuredBody, limits: Limits) -> Iterator[tuple[str, Grammar]]:
    """Every demand with the parameter that makes it."""
    if body.response_format is not None:
        grammar = _response_format(body.response_format, limits)
        if grammar is not None:
            yield "response_format", grammar
    if body.json_schema != NO_JSON:
        yield "json_schema", _schema("json_schema", body.json_schema, limits)
    if body.grammar is not None:
        yield "grammar", _gbnf("grammar", body.grammar, limits)
    if body.guided_json != NO_JSON:
        yield "guided_json", _schema("guided_json", body.guided_json, limits)
    if body.guided_regex is not None:
        yield "guided_regex", _regex("guided_regex", body.guided_regex, limits)
    if body.guided_choice is not None:
        yield "guided_choice", _choice("guided_choice", body.guided_choice, limits)
    if body.guided_grammar is not None:
        yield "guided_grammar", _gbnf("guided_grammar", body.guided_grammar, limits)
    if body.structured_outputs is not None:
        yield from _structured_outputs(body.structured_outputs, limits)


def _response_format(wanted: ResponseFormat, limits: Limits) -> Grammar | None:
    match wanted.type:
        case "text":
            return None
        case "json_object" if wanted.schema != NO_JSON:
            return _schema("response_format.schema", wanted.schema, limits)
        case "json_object":
            return JsonGrammar()
        case "json_schema":
            schema = NO_JSON if wanted.json_schema is None else wanted.json_schema.schema
            return _schema("response_format.json_schema.schema", schema, limits)
        case _:
            raise invalid("response_format.type", f"expected one of {', '.join(RESPONSE_FORMATS)}")


def _structured_outputs(wanted: StructuredOutputs, limits: Limits) -> Iterator[tuple[str, Grammar]]:
    at = "structured_outputs"
    for name in ("structural_tag", "whitespace_pattern"):
        if getattr(wanted, name) is not None:
            raise unsupported(f"{at}.{name}", "it has no effect on this server; leave it out")
    empty = True
    if wanted.json != NO_JSON:
        empty = False
        yield f"{at}.json", _schema(f"{at}.json", wanted.json, limits)
    if wanted.regex is not None:
        empty = False
        yield f"{at}.regex", _regex(f"{at}.regex", wanted.regex, limits)
    if wanted.choice is not None:
        empty = False
        yield f"{at}.choice", _choice(f"{at}.choice", wanted.choice, limits)
    if wanted.grammar is not None:
        empty = False
        yield f"{at}.grammar", _gbnf(f"{at}.grammar", wanted.grammar, limits)
    if wanted.json_object:
        empty = False
        yield f"{at}.json_object", JsonGrammar()
    if empty:
        raise invalid(at, "expected one of json, regex, choice, grammar, json_object")


def _schema(param: str, raw: Raw, limits: Limits) -> SchemaGrammar:
    """The schema as JSON text. It may come as JSON, or as a string that holds JSON (vLLM takes both)."""
    text = bytes(raw).decode()
    if text.startswith('"'):
        text = msgspec.json.decode(text, type=str)
    elif not text.startswith(("{", "true", "false")):
        raise invalid(param, "expected a JSON schema")
    check_bytes(param, text, limits.schema_bytes_max, "schema_bytes_max")
    return SchemaGrammar(schema=text)


def _gbnf(param: str, text: str, limits: Limits) -> GbnfGrammar:
    check_bytes(param, text, limits.grammar_bytes_max, "grammar_bytes_max")
    return GbnfGrammar(text=text)


def _regex(param: str, pattern: str, limits: Limits) -> RegexGrammar:
    check_bytes(param, pattern, limits.grammar_bytes_max, "grammar_bytes_max")
    return RegexGrammar(pattern=pattern)


def _choice(param: str, choices: list[str], limits: Limits) -> RegexGrammar:
    """Exactly one of `choices`, as the expression that every engine with regular expressions understands."""
    if not choices or not all(choices):
        raise invalid(param, "expected at least one string, and none that is empty")
    return _regex(param, "|".join(re.escape(choice) for choice in choices), limits)
