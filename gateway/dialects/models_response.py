"""Answers to questions about models as bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from gateway.dialects.events import encode

OWNED_BY: Final = "infermesh"


class _Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = OWNED_BY


class _ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: tuple[_Model, ...]


def model_list(model_ids: Iterable[str], *, created: int) -> bytes:
    """The body of `GET /v1/models`."""
    return encode(_ModelList(data=tuple(_Model(id=model_id, created=created) for model_id in model_ids)))


def model_object(model_id: str, *, created: int) -> bytes:
    """The body of `GET /v1/models/{id}`."""
    return encode(_Model(id=model_id, created=created))
