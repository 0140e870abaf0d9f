"""`--set NAME=VALUE`: any setting of a process from its command line, checked against the settings' own types."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

import click
import msgspec

from gateway.settings import GatewaySettings
from schemas.bands import Band, Bands, bands_named, parse_bands
from worker.settings import WorkerSettings

T = TypeVar("T")
M = TypeVar("M", GatewaySettings, WorkerSettings)
F = TypeVar("F", bound=Callable[..., Any])

_SWITCH: Final = {"on": "true", "off": "false"}


def set_option(example: str) -> Callable[[F], F]:
    """The option `--set`, which may be given more than once."""
    return click.option(
        "--set", "overrides", multiple=True, metavar="NAME=VALUE", help=f"A setting by name, such as {example}."
    )


def with_overrides(
    settings: T, overrides: Iterable[str], *, part: str | None = None, options: Mapping[str, str] | None = None
) -> T:
    """`settings` with each ``name=value`` applied; dots lead into what a setting holds (``queue.queued_jobs_max``,
    ``bands.batch.queue_timeout_s``), and ``bands=high,low`` names all bands anew.

    `part` stands before the names in what is said of them. `options`: settings that the command line gives by an
    option of their own. Raises `click.UsageError` naming the setting that does not exist, the value that does not fit,
    the option that gives another one, or the relation between settings that would not hold.
    """
    for override in overrides:
        name, separator, text = (each.strip() for each in override.partition("="))
        shown = f"{part}.{name}" if part else name
        if not separator:
            raise click.UsageError(f"--set takes NAME=VALUE, not {override[:80]!r}")
        try:
            changed = _replaced(settings, name.split("."), text)
        except ValueError as error:
            raise click.UsageError(f"--set {shown}: {error}") from None
        option = (options or {}).get(name)
        if option is not None and getattr(changed, name) != getattr(settings, name):
            raise click.UsageError(f"--set {shown}: {option} says otherwise")
        settings = changed
    return settings


def member_settings(
    settings: M,
    overrides: Iterable[str],
    *,
    bands: tuple[Band, ...],
    part: str | None = None,
    options: Mapping[str, str] | None = None,
) -> M:
    """`settings` of a member of the mesh that has `bands`, with each ``name=value`` applied.

    Raises `click.UsageError` as `with_overrides` does, and for a band that the mesh has not: the bus would refuse it.
    """
    named = dataclasses.replace(settings, bands=bands_named(bands))
    changed = with_overrides(named, overrides, part=part, options=options)
    for band in changed.bands:
        if band not in bands:
            shown = f"{part}.bands" if part else "bands"
            raise click.UsageError(
                f"--set {shown}: there is no band '{band}' in this mesh, which has {', '.join(bands)}"
            )
    return changed


def _replaced(holder: Any, path: list[str], text: str) -> Any:
    """A copy of `holder` in which what `path` leads to is `text`, read as the type that belongs there."""
    key, *rest = path
    members = _members(holder)
    if key not in members:
        near = difflib.get_close_matches(key, members, n=1)
        known = f"did you mean {near[0]}?" if near else f"there are {', '.join(members)}"
        raise ValueError(f"there is no such setting; {known}")
    value, type_ = members[key]
    if rest:
        if not _members(value):
            raise ValueError(f"'{key}' holds no other settings")
        new = _replaced(value, rest, text)
    elif type_ != Bands and _members(value):
        raise ValueError(f"name one of its settings: {', '.join(_members(value))}")
    else:
        new = _read(text, type_)
    if isinstance(holder, Mapping):
        return {**holder, key: new}
    if isinstance(holder, msgspec.Struct):
        return msgspec.structs.replace(holder, **{key: new})
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
    if bool in choices:
        return _read_switch(text, type_)
    if Path in choices:
        return Path(text).expanduser().absolute()
    for choice in choices:
        if get_origin(choice) is frozenset:
            return msgspec.convert([part.strip() for part in text.split(",") if part.strip()], choice, strict=False)
        if get_origin(choice) is tuple:
            raise ValueError("it is given by an option of its own alone")
    value = msgspec.convert(text, type_, strict=False)
    if isinstance(value, int | float) and not 0 <= value < math.inf:
        raise ValueError("it must be a number, 0 or more")
    return value


def _read_switch(text: str, type_: Any) -> Any:
    """`text` as a bool, `on` or `off` as the settings are documented."""
    try:
        return msgspec.convert(_SWITCH.get(text.lower(), text), type_, strict=False)
    except msgspec.ValidationError:
        raise ValueError(f"write on or off (or true, false), not {text[:40]!r}") from None
