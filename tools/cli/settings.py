"""`--set NAME=VALUE`: any setting of a process from its command line, checked against the settings' own types."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import click
import msgspec

from gateway.settings import GatewaySettings
from schemas.bands import Band, Bands, bands_named, parse_bands
from worker.settings import WorkerSettings

T = TypeVar("T")
M = TypeVar("M", GatewaySettings, WorkerSettings)
F = TypeVar("F", bound=Callable[..., Any])


def set_option(example: str) -> Callable[[F], F]:
    """The option `--set`, which may be given more than once."""
    return click.option(
        "--set", "overrides", multiple=True, metavar="NAME=VALUE", help=f"A setting by name, such as {example}."
    )


def with_overrides(settings: T, overrides: Iterable[str]) -> T:
    """`settings` with each ``name=value`` applied; dots lead into what a setting holds (``queue.queued_jobs_max``,
    ``bands.batch.queue_timeout_s``), and ``bands=high,low`` names all bands anew.

    Raises `click.UsageError` naming the setting that does not exist, the value that does not fit, or the relation
    between settings that would not hold.
    """
    for override in overrides:
        name, separator, text = override.partition("=")
        if not separator:
            raise click.UsageError(f"--set takes NAME=VALUE, not {override[:80]!r}")
        try:
            settings = _replaced(settings, name.strip().split("."), text.strip(), name=name.strip())
        except ValueError as error:
            raise click.UsageError(f"--set {name.strip()}: {error}") from None
    return settings


def member_settings(settings: M, overrides: Iterable[str], *, bands: tuple[Band, ...]) -> M:
    """`settings` of a member of the mesh that has `bands`, with each ``name=value`` applied.

    Raises `click.UsageError` as `with_overrides` does, and for a band that the mesh has not: the bus would refuse it.
    """
    changed = with_overrides(dataclasses.replace(settings, bands=bands_named(bands)), overrides)
    for band in changed.bands:
        if band not in bands:
            raise click.UsageError(f"--set bands: there is no band '{band}' in this mesh, which has {', '.join(bands)}")
    return changed


def for_part(overrides: Iterable[str], part: str) -> list[str]:
    """Of ``part.name=value`` overrides, those of `part`, as arguments for its command line."""
    mine = [override.removeprefix(f"{part}.") for override in overrides if override.startswith(f"{part}.")]
    return [argument for override in mine for argument in ("--set", override)]


def check_parts(overrides: Iterable[str], parts: tuple[str, ...]) -> None:
    """Raise `click.UsageError` for an override that names none of `parts`."""
    for override in overrides:
        if override.partition(".")[0] not in parts:
            known = " or ".join(f"{part}.NAME=VALUE" for part in parts)
            raise click.UsageError(f"--set takes {known}, not {override[:80]!r}")


def _replaced(holder: Any, path: list[str], text: str, *, name: str) -> Any:
    """A copy of `holder` in which what `path` leads to is `text`, read as the type that belongs there."""
    key, *rest = path
    members = _members(holder)
    if key not in members:
        near = difflib.get_close_matches(key, members, n=1)
        raise ValueError(f"there is no such setting{f'; did you mean {near[0]}?' if near else ''}")
    value, type_ = members[key]
    if rest:
        if not _members(value):
            raise ValueError(f"'{key}' holds no other settings")
        new = _replaced(value, rest, text, name=name)
    elif type_ != Bands and _members(value):
        raise ValueError(f"name one of its settings: {', '.join(_members(value))}")
    else:
        new = _read(text, type_)
    if isinstance(holder, Mapping):
        return {**holder, key: new}
    if isinstance(holder, msgspec.Struct):
        return msgspec.convert({**msgspec.structs.asdict(holder), key: new}, type(holder))
    return dataclasses.replace(holder, **{key: new})


def _members(holder: Any) -> dict[str, tuple[Any, Any]]:
    """What `holder` holds: name to value and type; nothing for a plain value."""
    if isinstance(holder, Mapping):
        return {str(key): (value, type(value)) for key, value in holder.items()}
    if isinstance(holder, msgspec.Struct):
        names = [field.name for field in msgspec.structs.fields(holder)]
    elif dataclasses.is_dataclass(holder):
        names = [field.name for field in dataclasses.fields(holder)]
    else:
        return {}
    hints = get_type_hints(type(holder), include_extras=True)
    return {each: (getattr(holder, each), hints[each]) for each in names}


def _read(text: str, type_: Any) -> Any:
    """`text` as a value of `type_`; several values of a set are separated by commas, and so are the names of bands.
    No setting is negative or without end."""
    if type_ == Bands:
        return bands_named(parse_bands(text))
    choices = get_args(type_) if get_origin(type_) in (Union, types.UnionType) else (type_,)
    if text == "none" and type(None) in choices:
        return None
    for choice in choices:
        if get_origin(choice) is frozenset:
            return msgspec.convert([part.strip() for part in text.split(",") if part.strip()], choice, strict=False)
    value = msgspec.convert(text, type_, strict=False)
    if isinstance(value, int | float) and not 0 <= value < math.inf:
        raise ValueError("it must be a number, 0 or more")
    return value
