"""Bounds are settings. One that is a constant says beside its name why it is none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(path for part in ("gateway", "bus", "schemas", "worker") for path in (ROOT / part).rglob("*.py"))


def constants(module: ast.Module) -> Iterator[tuple[str, bool]]:
    """Names assigned at the top level, and whether the text after them, or after those right below, speaks of them."""
    names: list[str] = []
    line = 0
    for statement in module.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                if statement.lineno > line + 1:
                    yield from ((each, False) for each in names)
                    names = []
                names.append(name)
            case ast.Expr(value=ast.Constant(value=str())):
                yield from ((each, True) for each in names)
                names = []
            case _:
                yield from ((each, False) for each in names)
                names = []
        line = statement.end_lineno or 0
    yield from ((each, False) for each in names)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_bound_that_is_no_setting_says_why(path: Path) -> None:
    found = constants(ast.parse(path.read_text()))
    assert [name for name, explained in found if name.endswith("_MAX") and not explained] == []


def test_a_bound_without_a_word_is_found() -> None:
    source = 'A_MAX = 1\nB_MAX: int = 2\n"""Why."""\nC_MAX = 3\n\nD_MAX = 4\n"""Why."""\nE_MAX = 5\nx = 6\n'
    assert [name for name, explained in constants(ast.parse(source)) if not explained] == ["C_MAX", "E_MAX", "x"]
