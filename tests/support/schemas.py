"""JSON schemas as clients send them, each with the part of the translation that it is about. All answers end soon."""

from __future__ import annotations

from typing import Any

EXPRESSION = {"$ref": "#/$defs/e"}
SHORT = {"type": "string", "maxLength": 12}
POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x", "y"]}


def an_object(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


SCHEMAS: dict[str, Any] = {
    "person": an_object("name", "age", name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 150}),
    "strict": {**an_object("city", city=SHORT), "additionalProperties": False},
    "optional members": an_object("b", a={"type": "boolean"}, b=SHORT, c={"type": "null"}, d={"type": "integer"}),
    "only optional members": an_object(a={"type": "boolean"}, b={"type": "boolean"}, c={"type": "boolean"}),
    "no members": {"type": "object", "properties": {}},
    "undeclared but required": an_object("a", "b", a={"type": "integer"}, b={"type": "integer"}, c={"const": 1}),
    "other members": {**an_object("id", id={"type": "integer"}), "additionalProperties": {"type": "boolean"}},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "names that begin alike": {
        **an_object("a", "ab", a={"type": "integer"}, ab={"type": "integer"}, abc={"type": "integer"}),
        "additionalProperties": {"type": "boolean"},
    },
    "definitions": {
        "$defs": {"point": POINT, "name": SHORT},
        **an_object("from", "to", **{"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}}),
    },
    "old definitions": {"definitions": {"n": {"type": "integer"}}, "$ref": "#/definitions/n"},
    "reference into properties": an_object("a", "b", a=POINT, b={"$ref": "#/properties/a/properties/x"}),
    "escaped reference": {"$defs": {"a/b~c%": SHORT}, "$ref": "#/$defs/a~1b~0c%25"},
    "reference with more": {"$defs": {"p": an_object(a={"type": "integer"})}, "$ref": "#/$defs/p", "required": ["a"]},
    "references in arrays and anyOf": {
        "$defs": {
            "cat": an_object("meow", meow={"type": "boolean"}),
            "dog": an_object("bark", bark={"type": "integer"}),
        },
        "type": "array",
        "items": {"anyOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]},
        "minItems": 1,
        "maxItems": 3,
    },
    "recursive": {
        "$defs": {
            "node": an_object("v", v={"type": "integer"}, next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}),
        },
        "$ref": "#/$defs/node",
    },
    "tree": an_object("n", n={"type": "integer"}, kids={"type": "array", "items": {"$ref": "#"}, "maxItems": 2}),
    "expression": {
        "$defs": {
            "e": {
                "anyOf": [
                    {"type": "integer", "minimum": 0, "maximum": 9},
                    an_object(
                        "op", "l", "r", op={"enum": ["+", "-"]}, l={"$ref": "#/$defs/e"}, r={"$ref": "#/$defs/e"}
                    ),
                ]
            }
        },
        **EXPRESSION,
    },
    "enum": {"enum": ["red", "reddish", "green", 7, 7.5, None, True, {"a": [1, "x"]}, ["é", '"\n']]},
    "enum of a type": {"type": ["string", "null"], "enum": ["a", 1, None]},
    "const": an_object("kind", kind={"const": 'a \\ "b" \n'}),
    "several types": {"type": ["integer", "boolean", "null"]},
    "nullable by type": an_object("a", a={"type": ["string", "null"], "minLength": 2, "maxLength": 4}),
    "all of objects": {
        "allOf": [an_object("a", a={"type": "integer"}), an_object("b", b={"type": "integer", "minimum": 3})],
        "properties": {"b": {"maximum": 5}},
    },
    "all of numbers": {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 12}, {"exclusiveMaximum": 11}]},
    "one of tagged": {
        "oneOf": [
            an_object("r", kind={"const": "circle"}, r={"type": "integer"}),
            an_object("w", kind={"const": "square"}, w={"type": "integer"}),
        ]
    },
    "one of types": {
        "oneOf": [{"type": "integer"}, SHORT, {"type": "array", "items": {"type": "null"}, "maxItems": 2}]
    },
    "any of with more": {
        **an_object(a={"type": "integer"}, b={"type": "integer"}),
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "array": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 5}, "minItems": 2, "maxItems": 4},
    "empty array": {"type": "array", "maxItems": 0},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, SHORT], "minItems": 2},
    "tuple with a rest": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}],
        "items": {"type": "null"},
        "minItems": 2,
        "maxItems": 3,
    },
    "open tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}]},
    "nested arrays": {
        "type": "array",
        "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "maxItems": 2,
    },
    "length": {"type": "string", "minLength": 3, "maxLength": 6},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2,3}-\\d{4}$"},
    "pattern of quotes": {"type": "string", "pattern": '^["\\\\\\n\\t]{1,3}$'},
    "pattern at the beginning": {"type": "string", "pattern": "^ab"},
    "pattern with a length": {"type": "string", "pattern": "^[a-f]{2,4}$", "maxLength": 8, "minLength": 1},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date-time": {"type": "string", "format": "date-time"},
    "duration": {"type": "string", "format": "duration"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "hostname": {"type": "string", "format": "hostname"},
    "email": {"type": "string", "format": "email"},
    "uri": {"type": "string", "format": "uri"},
    "integer bounds": {"type": "integer", "minimum": -17, "exclusiveMaximum": 1203},
    "integer from below": {"type": "integer", "maximum": -3},
    "number bounds": {"type": "number", "minimum": 0, "maximum": 1},
    "open number bounds": {"type": "number", "exclusiveMinimum": -0.25, "exclusiveMaximum": 12.5},
    "number from above": {"type": "number", "exclusiveMinimum": 0},
    "member that can never be": {"type": "object", "properties": {"a": False, "b": {"type": "boolean"}}},
    "true": an_object("a", a=True),
    "anything": {},
    "annotations": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.org/s",
        "title": "T",
        "description": "D",
        "default": 1,
        "examples": [1],
        "x-order": 5,
        "type": "boolean",
    },
}
