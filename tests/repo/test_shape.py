"""The repository's own shape: what a clone, a release and a reader rely on."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))
SCRIPTS = ("tools/up", "tools/test", "tools/install", "tools/lock", ".ci/run")
COMMAND_TIMEOUT_S = 30.0

# Folders of the machines that the project was written on: nothing in the repository may depend on one.
MACHINE_PATHS = re.compile(rb"(?<![\w.])/(?:work|tmp/w)/")
MACHINE_PATHS_ALLOWED_IN = frozenset({"tests/repo/test_shape.py"})


@pytest.fixture(scope="session")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_the_newest_entry_of_the_changelog(project: dict[str, Any]) -> None:
    entries = re.findall(r"^## (\S+) \((\d{4}-\d{2}-\d{2})\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert entries, "CHANGELOG.md has no entry of the form `## 0.1.0 (2026-11-29)`"
    assert entries[0][0] == project["project"]["version"]
    assert [date for _, date in entries] == sorted((date for _, date in entries), reverse=True)


def test_the_llama_extra_is_what_the_installer_builds(project: dict[str, Any]) -> None:
    assert project["project"]["optional-dependencies"]["llama"] == project["dependency-groups"]["llama"]


def test_every_import_package_is_shipped_and_checked(project: dict[str, Any]) -> None:
    packages = {folder.parent.name for folder in ROOT.glob("*/__init__.py")}
    assert set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == packages
    assert set(project["tool"]["importlinter"]["root_packages"]) == packages
    assert set(project["tool"]["mypy"]["files"]) == packages | {"tests"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_executable_bash(script: str) -> None:
    path = ROOT / script
    assert os.access(path, os.X_OK)
    assert path.read_text().startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in path.read_text()


def test_scripts_pass_shellcheck() -> None:
    result = subprocess.run(
        ["shellcheck", *SCRIPTS], cwd=ROOT, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_ci_runs_the_test_script_and_nothing_else() -> None:
    commands = [line for line in (ROOT / ".ci/run").read_text().splitlines() if line and not line.startswith("#")]
    assert commands[-1] == "exec ./tools/test"
    assert len(commands) == 3


def test_the_test_script_leaves_no_test_out() -> None:
    runs = re.findall(r' pytest (\S+) -m "(.*?)"', (ROOT / "tools/test").read_text())
    assert runs == [(paths, mark) for paths in ("--ignore=tests/e2e", "tests/e2e") for mark in ("not alone", "alone")]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_locks_pin_and_hash_every_requirement(lock: Path) -> None:
    lines = lock.read_text().replace("\\\n", " ").splitlines()
    requirements = [line for line in lines if line and not line.startswith("#")]
    assert requirements
    for requirement in requirements:
        assert re.match(r"[a-z0-9-]+==\S+ ", requirement), requirement
        assert "--hash=sha256:" in requirement, requirement


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_locks_name_no_index_and_no_machine(lock: Path) -> None:
    text = lock.read_text()
    assert "://" not in text
    assert "--index" not in text
    assert "--find-links" not in text


def test_locks_agree_where_they_meet_in_one_environment() -> None:
    pins: dict[str, dict[str, str]] = {}
    for name in ("bootstrap", "runtime", "llama", "dev"):
        for requirement in re.findall(
            r"^[^#\s].*?==.*?(?= \\$)", (ROOT / f"requirements/{name}.lock").read_text(), re.M
        ):
            package, version = requirement.split("==", 1)
            pins.setdefault(package, {})[name] = version.split(" ;")[0]
    numpy_by_python = {"numpy"}  # one pin per Python version, in the llama lock alone
    clashes = {package: seen for package, seen in pins.items() if len(set(seen.values())) > 1}
    assert not clashes.keys() - numpy_by_python, clashes


def test_no_file_names_a_folder_of_one_machine() -> None:
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        timeout=COMMAND_TIMEOUT_S,
        check=True,
    )
    names = [name for name in listing.stdout.decode().split("\0") if name]
    assert names
    found = [
        name
        for name in names
        if name not in MACHINE_PATHS_ALLOWED_IN
        and (ROOT / name).is_file()
        and MACHINE_PATHS.search((ROOT / name).read_bytes())
    ]
    assert not found
