"""Every struct of `schemas`: round trip, newer versions' fields tolerated, wrong types refused with the field's name.

The structs are found, not listed, and values are made from msgspec's own description of their fields.
"""

import functools
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

import schemas
from schemas.codec import Decoder, MalformedMessage, encode
from schemas.frames import PROMPT_TOKENS_MAX, Delta, Frame, PromptToken, PromptTokens
from schemas.job import Cancel, Job, Order, Prompt, Resend, Verdict
from schemas.names import InvalidName, check_model_id
from schemas.status import GatewayStatus, ReplicaStatus, WorkerStatus

EXAMPLES = settings(deadline=None, max_examples=40)
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def _structs_in(namespace: Any, module: str) -> Iterator[type[msgspec.Struct]]:
    for member in vars(namespace).values():
        if isinstance(member, type) and issubclass(member, msgspec.Struct) and member.__module__ == module:
            yield member
            yield from _structs_in(member, module)


def all_structs() -> list[type[msgspec.Struct]]:
    """The structs of all modules of `schemas`, nested ones included."""
    modules = [importlib.import_module(f"schemas.{found.name}") for found in pkgutil.iter_modules(schemas.__path__)]
    return [struct for module in modules for struct in _structs_in(module, module.__name__)]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(INT64_MIN, INT64_MAX) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def _is_model_id(text: str) -> bool:
    try:
        return check_model_id(text) == text
    except InvalidName:
        return False


OF_ITS_OWN: dict[tuple[type, str], st.SearchStrategy[Any]] = {
    (ReplicaStatus, "model"): st.text(min_size=1, max_size=16).filter(_is_model_id)
}
"""Fields with a rule that msgspec has no words for."""


def values_of(type_: inspect.Type) -> st.SearchStrategy[Any]:
    """Valid values of a described type. A kind of type that `schemas` does not use yet fails here."""
    match type_:
        case inspect.StructType(cls=cls, fields=fields):
            own = {name: values for (owner, name), values in OF_ITS_OWN.items() if owner is cls}
            return st.builds(cls, **{field.name: values_of(field.type) for field in fields} | own)
        case inspect.UnionType(types=types):
            return st.one_of([values_of(member) for member in types])
        case inspect.VarTupleType(item_type=item, min_length=least):
            return st.lists(values_of(item), min_size=least or 0, max_size=4).map(tuple)
        case inspect.TupleType(item_types=items):
            return st.tuples(*[values_of(item) for item in items])
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(values_of(key), values_of(value), max_size=3)
        case inspect.IntType(ge=ge, le=le):
            return st.integers(INT64_MIN if ge is None else ge, INT64_MAX if le is None else le)
        case inspect.FloatType(gt=gt, ge=ge, le=le):
            low = ge if gt is None else gt
            return st.floats(low, le, exclude_min=gt is not None, allow_nan=False, allow_infinity=False)
        case inspect.EnumType(cls=cls):
            return st.sampled_from(cls)
        case inspect.StrType(pattern=pattern):
            return st.text() if pattern is None else st.from_regex(pattern, fullmatch=True)
        case inspect.BytesType():
            return st.binary(max_size=16)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.AnyType():
            return JSON_VALUES
        case _:
            raise NotImplementedError(f"no values for {type_}")


@functools.cache
def instances(struct: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    return values_of(inspect.type_info(struct))


def described_fields(struct: type[msgspec.Struct]) -> tuple[inspect.Field, ...]:
    described = inspect.type_info(struct)
    assert isinstance(described, inspect.StructType)
    return described.fields


def fields_where(kind: tuple[type[inspect.Type], ...]) -> list[Any]:
    """A parameter (struct, field) for each field of one of the kinds of type."""
    return [
        pytest.param(struct, field, id=f"{struct.__qualname__}.{field.name}")
        for struct in STRUCTS
        for field in described_fields(struct)
        if isinstance(field.type, kind)
    ]


STRUCTS = all_structs()
every_struct = pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: str(struct.__qualname__))
every_field = pytest.mark.parametrize("struct, field", fields_where((inspect.Type,)))
every_number = pytest.mark.parametrize("struct, field", fields_where((inspect.IntType, inspect.FloatType)))


def test_the_structs_are_found() -> None:
    assert {Job, Delta, Cancel} <= set(STRUCTS)


@every_struct
@EXAMPLES
@given(data=st.data())
def test_round_trip(struct: type[msgspec.Struct], data: st.DataObject) -> None:
    message = data.draw(instances(struct))
    assert Decoder(struct)(encode(message)) == message


@every_struct
@EXAMPLES
@given(data=st.data())
def test_fields_of_a_newer_version_are_tolerated(struct: type[msgspec.Struct], data: st.DataObject) -> None:
    message = data.draw(instances(struct))
    newer = msgspec.json.decode(encode(message)) | {"of_a_newer_version": data.draw(JSON_VALUES)}
    assert Decoder(struct)(encode(newer)) == message


@every_field
@settings(deadline=None, max_examples=5)
@given(data=st.data())
def test_a_wrong_type_is_refused_with_the_name_of_its_field(
    struct: type[msgspec.Struct], field: inspect.Field, data: st.DataObject
) -> None:
    wrong = "yes" if isinstance(field.type, inspect.BoolType) else True
    broken = msgspec.json.decode(encode(data.draw(instances(struct)))) | {field.encode_name: wrong}
    with pytest.raises(MalformedMessage, match=rf"\$\.{field.encode_name}`"):
        Decoder(struct)(encode(broken))


@every_number
@settings(deadline=None, max_examples=5)
@given(data=st.data())
def test_a_number_out_of_range_is_refused_with_the_name_of_its_field(
    struct: type[msgspec.Struct], field: inspect.Field, data: st.DataObject
) -> None:
    assert isinstance(field.type, inspect.IntType | inspect.FloatType)
    bounds = {"below": field.type.ge, "at": field.type.gt, "above": field.type.le}
    beyond = {"below": -1, "at": 0, "above": 1}
    good = msgspec.json.decode(encode(data.draw(instances(struct))))
    for side, bound in bounds.items():
        if bound is not None:
            with pytest.raises(MalformedMessage, match=rf"\$\.{field.encode_name}`"):
                Decoder(struct)(encode(good | {field.encode_name: bound + beyond[side]}))


@every_struct
@EXAMPLES
@given(data=st.data())
def test_required_fields_are_required_by_name(struct: type[msgspec.Struct], data: st.DataObject) -> None:
    message = msgspec.json.decode(encode(data.draw(instances(struct))))
    for field in described_fields(struct):
        lacking = {name: value for name, value in message.items() if name != field.encode_name}
        if field.required:
            with pytest.raises(MalformedMessage, match=f"`{field.encode_name}`"):
                Decoder(struct)(encode(lacking))
        else:
            assert Decoder(struct)(encode(lacking)) is not None


@every_struct
def test_structs_are_frozen_and_say_what_they_are(struct: type[msgspec.Struct]) -> None:
    assert struct.__struct_config__.frozen
    assert not struct.__struct_config__.forbid_unknown_fields
    assert struct.__doc__


@pytest.mark.parametrize("union", [Frame, Prompt, Verdict, Order])
def test_members_of_a_union_are_told_apart(union: Any) -> None:
    described = inspect.type_info(union)
    assert isinstance(described, inspect.UnionType)
    members = [member for member in described.types if isinstance(member, inspect.StructType)]
    assert len({member.tag_field for member in members}) == 1
    assert len({member.tag for member in members}) == len(members)

    decode = Decoder(union)
    tag_field = members[0].tag_field
    with pytest.raises(MalformedMessage, match=rf"\$\.{tag_field}`"):
        decode(encode({tag_field: "of_a_newer_version"}))
    with pytest.raises(MalformedMessage, match=f"`{tag_field}`"):
        decode(b"{}")


@EXAMPLES
@given(st.lists(values_of(inspect.type_info(Frame)), max_size=5))
def test_frames_of_one_step_travel_as_a_list(frames: list[Frame]) -> None:
    decode: Decoder[Any] = Decoder(list[Frame])
    assert decode(encode(frames)) == frames


@pytest.mark.parametrize("count", [0, PROMPT_TOKENS_MAX + 1])
def test_a_frame_of_a_prompt_has_some_tokens_and_not_too_many(count: int) -> None:
    frame = PromptTokens(1, 0, 0, (PromptToken(1, b"\xff", None, ()),) * count)
    with pytest.raises(MalformedMessage, match=r"\$\.tokens`"):
        Decoder(PromptTokens)(encode(frame))


def test_the_path_of_a_nested_fault_is_named() -> None:
    faulty = {"kind": "done", "handle": 1, "seq": 0, "finish_reasons": ["stop", 5], "usage": {}}
    decode: Decoder[Any] = Decoder(list[Frame])
    with pytest.raises(MalformedMessage, match=r"\$\[0\]\.finish_reasons\[1\]`"):
        decode(encode([faulty]))


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"\xff", b'{"handle":NaN}', b"[" * 100_000, b'{"x":' + b"[" * 100_000]
)
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    frame: Any = Frame
    with pytest.raises(MalformedMessage):
        Decoder(frame)(data)


NO_MEMBERS = ("", "*", "W1", "a b", "w1\n", "any", "resume", "a" * 64)
NAMED = [(Job, "gateway"), (Cancel, "gateway"), (Resend, "gateway"), (WorkerStatus, "name"), (GatewayStatus, "name")]


@pytest.mark.parametrize("struct, field", NAMED, ids=lambda part: getattr(part, "__name__", part))
@settings(deadline=None, max_examples=5)
@given(data=st.data())
def test_the_name_of_no_member_is_refused_where_it_is_read(
    struct: type[msgspec.Struct], field: str, data: st.DataObject
) -> None:
    message = msgspec.to_builtins(data.draw(instances(struct)))
    for name in ("w1", "resume-2", "0"):
        assert getattr(Decoder(struct)(msgspec.json.encode(message | {field: name})), field) == name
    for name in NO_MEMBERS:
        with pytest.raises(MalformedMessage, match=f"at `\\$.{field}`"):
            Decoder(struct)(msgspec.json.encode(message | {field: name}))


@pytest.mark.parametrize("model", ["", "x" * 129, "\u00e9" * 65, "a\nb"])
def test_the_id_of_no_model_is_refused_where_it_is_read(model: str) -> None:
    replica = {"model": model, "state": "ready", "engine": "sim", "slots": 1, "busy": 0, "context": 1}
    with pytest.raises(MalformedMessage, match="model id is not valid"):
        Decoder(ReplicaStatus)(msgspec.json.encode(replica))


def test_bands_that_are_none_are_refused_in_a_beat() -> None:
    beat = {"name": "w1", "instance": "i", "version": "0", "pid": 1, "host": "h", "replicas": []}
    for bands in (["A"], ["a.b"], ["a"] * 17):
        with pytest.raises(MalformedMessage, match="bands"):
            Decoder(WorkerStatus)(msgspec.json.encode(beat | {"bands": bands}))
