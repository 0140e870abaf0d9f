"""A JSON schema as a document: read within its bounds, its references resolved, its keywords judged by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from worker.engines.llama.grammar.reading import pointer_part, read_json
from worker.engines.llama.grammar.refused import SchemaRefused
from worker.engines.llama_limits import GrammarLimits

TYPES: Final = ("object", "array", "string", "number", "integer", "boolean", "null")

OBJECT_KEYWORDS: Final = frozenset({"properties", "required", "additionalProperties", "minProperties", "maxProperties"})
ARRAY_KEYWORDS: Final = frozenset({"items", "prefixItems", "minItems", "maxItems"})
STRING_KEYWORDS: Final = frozenset({"minLength", "maxLength", "pattern", "format"})
NUMBER_KEYWORDS: Final = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
CONSTRAINTS: Final = (
    OBJECT_KEYWORDS
    | ARRAY_KEYWORDS
    | STRING_KEYWORDS
    | NUMBER_KEYWORDS
    | {"type", "nullable", "enum", "const", "anyOf", "oneOf"}
)

_NOT_BUILT: Final[dict[str, object]] = {
    "not": None,
    "if": None,
    "then": None,
    "else": None,
    "patternProperties": {},
    "propertyNames": True,
    "dependencies": {},
    "dependentRequired": {},
    "dependentSchemas": {},
    "unevaluatedProperties": True,
    "unevaluatedItems": True,
    "additionalItems": True,
    "contains": None,
    "minContains": None,
    "maxContains": None,
    "uniqueItems": False,
    "multipleOf": None,
    "contentSchema": None,
    "$dynamicRef": None,
    "$recursiveRef": None,
}
"""Keywords that constrain an instance and are refused, with a value that demands nothing. Other unknown keywords are
skipped, as the standard says: titles, descriptions, defaults, examples, extensions."""

_REF_SHOWN: Final = 100


class Unsatisfiable(SchemaRefused):
    """No JSON value fits here. Elsewhere, as one of several alternatives, it can be left out."""


@dataclass(frozen=True)
class Node:
    """A schema inside the document. `variant` tells apart what was made of one schema: it is empty for the schema as
    it was written. Equal identities stand for equal values."""

    path: str
    value: dict[str, Any] | bool
    variant: str = ""

    @property
    def identity(self) -> tuple[str, str]:
        """What tells this schema from all others."""
        return self.path, self.variant

    def altered(self, value: dict[str, Any], variant: str) -> Node:
        """This schema with another set of keywords, which `variant` has to determine."""
        return Node(self.path, value, self.variant + variant)

    def child(self, *keys: str | int) -> Node:
        """The schema under `keys`. Raises `SchemaRefused` if it is none."""
        value: Any = self.value
        for key in keys:
            value = value[key]
        return schema_node("/".join([self.path, *map(pointer_part, keys)]), value)

    def refuse(self, reason: str, *, unsupported: bool = False) -> SchemaRefused:
        """The refusal of this schema."""
        return SchemaRefused(self.path, reason, unsupported=unsupported)


class Document:
    """A parsed schema, the limits of its translation, and the account of the work that this takes."""

    def __init__(self, text: str, limits: GrammarLimits) -> None:
        self.limits = limits
        self._value = read_json(text, limits)
        self.root = schema_node("#", self._value)
        self._work = 0

    def work(self, amount: int) -> None:
        """Account for `amount` looks at keywords, properties or values. Raises `SchemaRefused` beyond the bound."""
        self._work += amount
        if self._work > self.limits.schema_work_max:
            reason = f"it is too large: more than {self.limits.schema_work_max} parts, counted where they are used"
            raise SchemaRefused("#", f"{reason} (engine.limits.grammar.schema_work_max)")

    def flatten(self, nodes: Iterable[Node]) -> tuple[Node, ...]:
        """What `nodes` demand together, without `$ref` and `allOf`: each demand once, none that demands nothing."""
        found: dict[tuple[str, str], Node] = {}
        for node in nodes:
            self._expand(node, found, ())
        return tuple(found.values())

    def _expand(self, node: Node, found: dict[tuple[str, str], Node], way: tuple[str, ...]) -> None:
        if node.path in way:
            raise node.refuse("it refers to itself with nothing in between")
        if len(way) == self.limits.schema_nesting_max:
            reason = f"more than {self.limits.schema_nesting_max} references in a row lead here"
            raise node.refuse(f"{reason} (engine.limits.grammar.schema_nesting_max)")
        if node.identity in found or node.value is True:
            return
        if node.value is False:
            raise Unsatisfiable(node.path, "nothing is allowed here")
        value = node.value
        assert isinstance(value, dict)
        self.work(1 + len(value))
        check_keywords(node)
        way = (*way, node.path)
        if any(keyword in CONSTRAINTS for keyword in value):
            demands = {key: value[key] for key in value if key in CONSTRAINTS}
            found[node.identity] = Node(node.path, demands, node.variant)
        if "$ref" in value:
            self._expand(self._resolve(value["$ref"], node), found, way)
        if "allOf" in value:
            for index in range(len(alternatives_of(node, "allOf"))):
                self._expand(node.child("allOf", index), found, way)

    def _resolve(self, ref: object, at: Node) -> Node:
        if not isinstance(ref, str):
            raise at.refuse("'$ref' must be a string")
        shown = ref if len(ref) <= _REF_SHOWN else ref[:_REF_SHOWN] + "..."
        if not ref.startswith("#") or (ref != "#" and not ref.startswith("#/")):
            raise at.refuse(f"the reference '{shown}' is not of the form '#/...'", unsupported=True)
        value: Any = self._value
        keys = [part.replace("~1", "/").replace("~0", "~") for part in unquote(ref).split("/")[1:]]
        for key in keys:
            if isinstance(value, dict) and key in value:
                value = value[key]
            elif isinstance(value, list) and key.isascii() and key.isdigit() and int(key[:9]) < len(value):
                value = value[int(key[:9])]
            else:
                raise at.refuse(f"the reference '{shown}' leads to nothing")
        return schema_node("/".join(["#", *map(pointer_part, keys)]), value)


def schema_node(path: str, value: object) -> Node:
    """`value` as a schema. Raises `SchemaRefused` if it is neither an object nor a boolean."""
    if not isinstance(value, dict | bool):
        raise SchemaRefused(path, "a schema must be an object or a boolean")
    return Node(path, value)


def alternatives_of(node: Node, keyword: str) -> list[object]:
    """The schemas of `anyOf`, `oneOf` or `allOf`, at least one."""
    assert isinstance(node.value, dict)
    found = node.value[keyword]
    if not isinstance(found, list) or not found:
        raise node.refuse(f"'{keyword}' must be an array of at least one schema")
    return found


def check_keywords(node: Node) -> None:
    """Raise `SchemaRefused` for the first keyword that demands what is not built."""
    assert isinstance(node.value, dict)
    for keyword, value in node.value.items():
        if keyword in _NOT_BUILT and (_NOT_BUILT[keyword] is None or value != _NOT_BUILT[keyword]):
            raise node.refuse(f"the keyword '{keyword}' is not supported", unsupported=True)
    if node.path != "#" and isinstance(node.value.get("$id"), str) and "$ref" in node.value:
        raise node.refuse("references under an '$id' of their own are not supported", unsupported=True)
