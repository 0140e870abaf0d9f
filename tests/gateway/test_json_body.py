"""What a refused body looks like to whoever reads the refusal, or a log of it."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from gateway.dialects.chat_request import parse_chat
from gateway.dialects.chat_wire import ChatBody
from gateway.dialects.completions_request import CompletionBody, parse_completion
from gateway.dialects.embeddings import EmbeddingBody, parse_embedding
from gateway.settings import Limits
from schemas.errors import MeshError

SECRET = "the-whale-is-white"
VALUES = (SECRET, [SECRET], {SECRET: SECRET}, [{SECRET: SECRET}], [[SECRET]], {SECRET: {SECRET: [SECRET]}})

Parse = Callable[..., Any]
PARSERS: list[tuple[Parse, type[msgspec.Struct], dict[str, Any]]] = [
    (parse_chat, ChatBody, {"messages": [{"role": "user", "content": "a"}]}),
    (parse_completion, CompletionBody, {"prompt": "a"}),
    (parse_embedding, EmbeddingBody, {"input": "a"}),
]


@pytest.mark.parametrize("parse, body, least", PARSERS)
def test_a_refusal_never_quotes_what_the_client_wrote(
    parse: Parse, body: type[msgspec.Struct], least: dict[str, Any]
) -> None:
    refusals = []
    for name in (field.encode_name for field in msgspec.structs.fields(body)):
        for value in VALUES:
            try:
                parse(json.dumps({"model": "m", **least, name: value}).encode(), limits=Limits())
            except MeshError as error:
                refusals.append(f"{error.message} {error.param}")
    assert len(refusals) > len(VALUES)
    assert [refusal for refusal in refusals if SECRET in refusal] == []
