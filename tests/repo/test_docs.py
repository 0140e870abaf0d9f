"""The documentation says what the code does: names, defaults and codes are compared, commands parsed, examples run."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import httpx
import msgspec
import pytest

from bus import subjects
from bus.permissions import Role, inbox_prefix, rights_of
from gateway.continuation import LossCause
from schemas.bands import BATCH
from schemas.errors import TRAITS
from schemas.job import Lane
from tests.support.mesh import Mesh, mesh_up
from tools.cli import main
from tools.cli.engine_settings import ENGINE_OPTIONS
from tools.cli.parts import BUS_OPTIONS, GATEWAY_OPTIONS, PARTS, SERVER_OPTIONS, TAKES
from worker.job import Disposition
from worker.models import DEFAULT_MODEL_ID

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
ADRS = sorted((DOCS / "adr").glob("[0-9]*.md"))
OPERATIONS = (DOCS / "operations.md").read_text()
DESIGN = (DOCS / "design.md").read_text()
README = (ROOT / "README.md").read_text()

SETTINGS = {
    "GatewaySettings": "gateway.settings",
    "QueueBounds": "bus.topology",
    "Limits": "gateway.settings",
    "WorkerSettings": "worker.settings",
    "LlamaSettings": "worker.engines.llama.settings",
    "LlamaLimits": "worker.engines.llama_limits",
    "GrammarLimits": "worker.engines.llama_limits",
    "SimSettings": "worker.engines.sim",
    "OpenAISettings": "worker.engines.openai.settings",
    "BusSettings": "bus.connection",
    "ServerSettings": "bus.server_config",
}
README_URL = "http://127.0.0.1:8000/v1"
ANSWER_WITHIN_S = 15.0


# --- reading the pages -----------------------------------------------------------------------------------------------


def section(page: str, heading: str) -> str:
    """What stands under `heading`, to the next heading of its own or a higher level."""
    start = re.search(rf"^(#+) {re.escape(heading)}$", page, re.MULTILINE)
    assert start is not None, f"there is no section '{heading}'"
    rest = page[start.end() :]
    end = re.search(rf"^#{{1,{len(start[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def rows(text: str) -> list[list[str]]:
    """The cells of all tables in `text`, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rulers = {at for at, line in enumerate(lines) if line.startswith("| ---")}
    body = [line for at, line in enumerate(lines) if at not in rulers and at + 1 not in rulers]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body]


def names_in(text: str) -> set[str]:
    """Everything in `text` that is set as code within a line."""
    return set(re.findall(r"`([^`\n]+)`", text))


def code_blocks(page: str, *, language: str = "") -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [block for its_language, block in found if its_language == language]


def commands(page: str, program: str) -> list[list[str]]:
    """The arguments of every call of `program` in the code blocks of `page`."""
    lines = "".join(code_blocks(page)).replace("\\\n", " ").splitlines()
    calls = [shlex.split(line, comments=True) for line in lines if re.match(rf"\S*\b{program}( |$)", line)]
    return [words[1:] for words in calls]


# --- settings, options, metrics, codes, subjects ---------------------------------------------------------------------


def settings_class(name: str) -> Any:
    return getattr(importlib.import_module(SETTINGS[name]), name)


def defaults(settings: Any) -> dict[str, object]:
    """Every field and how its default stands in the documentation; None where it is computed."""
    if issubclass(settings, msgspec.Struct):
        return {field.name: shown(field.name, field.default) for field in msgspec.structs.fields(settings)}
    return {
        field.name: None
        if field.default_factory is not dataclasses.MISSING
        else "required"
        if field.default is dataclasses.MISSING
        else shown(field.name, field.default)
        for field in dataclasses.fields(settings)
    }


def shown(name: str, value: object) -> str:
    match value:
        case None | ():
            return "none"
        case bool():
            return "on" if value else "off"
        case msgspec.Struct():
            return "see below"
        case int() if "bytes" in name and value % 2**30 == 0:
            return f"{value // 2**30} GiB"
        case int() if "bytes" in name and value % 2**20 == 0:
            return f"{value // 2**20} MiB"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:g}"
        case _:
            return str(value)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_documented_with_its_default(name: str) -> None:
    documented = {row[0].strip("`"): row[1] for row in rows(section(OPERATIONS, name))}
    expected = defaults(settings_class(name))
    assert documented.keys() == expected.keys()
    wrong = {field: text for field, text in documented.items() if expected[field] not in (None, text)}
    assert not wrong, f"the defaults are { ({field: expected[field] for field in wrong}) }"


OWN_OPTIONS: dict[str, dict[str, str]] = {
    "GatewaySettings": GATEWAY_OPTIONS,
    "QueueBounds": {},
    "Limits": {},
    "WorkerSettings": {},
    "LlamaSettings": ENGINE_OPTIONS["llama"],
    "LlamaLimits": {},
    "GrammarLimits": {},
    "SimSettings": ENGINE_OPTIONS["sim"],
    "OpenAISettings": ENGINE_OPTIONS["openai"],
    "BusSettings": BUS_OPTIONS,
    "ServerSettings": SERVER_OPTIONS,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_documented_with_the_option_it_has(name: str) -> None:
    found = {row[0].strip("`"): re.match(r"`(--[a-z-]+)`", row[3]) for row in rows(section(OPERATIONS, name))}
    assert {setting: option[1] for setting, option in found.items() if option} == OWN_OPTIONS[name]


def test_parts_are_documented_with_their_settings_and_commands() -> None:
    table = {row[0].strip("`"): row for row in rows(section(OPERATIONS, "Settings").partition("\n### ")[0])}
    assert tuple(table) == PARTS
    for name in OWN_OPTIONS.keys() - {"QueueBounds", "Limits", "LlamaLimits", "GrammarLimits"}:
        assert sum(f"[{name}]" in row[1] for row in table.values()) == 1, name
    takes = {command: tuple(part for part, row in table.items() if command in names_in(row[2])) for command in TAKES}
    assert takes == {command: tuple(part for part in PARTS if part in parts) for command, parts in TAKES.items()}
    assert TAKES.keys() == {
        name for name, command in COMMANDS.items() if any("--set" in p.opts for p in command.params)
    }


def test_every_class_of_settings_is_known_here() -> None:
    sources = [path.read_text() for package in ("bus", "gateway", "worker") for path in (ROOT / package).rglob("*.py")]
    found = {
        name for source in sources for name in re.findall(r"^class (\w*(?:Settings|Bounds|Limits))\b", source, re.M)
    }
    assert found == SETTINGS.keys()


def leaf_commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield " ".join(path), command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        assert inner is not None
        yield from leaf_commands(inner, (*path, name))


COMMANDS = dict(leaf_commands(main))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_every_command_is_documented(name: str) -> None:
    documented = {
        option
        for row in rows(section(OPERATIONS, f"infermesh {name}"))
        for option in re.findall(r"`(--[a-z-]+)`", row[0])
    }
    options = [option for option in COMMANDS[name].params if isinstance(option, click.Option) and not option.hidden]
    assert documented == {flag for option in options for flag in option.opts}
    required = {
        option
        for row in rows(section(OPERATIONS, f"infermesh {name}"))
        if row[1].startswith("required; ")
        for option in re.findall(r"`(--[a-z-]+)`", row[0])
    }
    assert required == {flag for option in options if option.required for flag in option.opts}


def test_error_codes_are_documented_as_clients_see_them() -> None:
    documented = {row[0].strip("`"): row[1:4] for row in rows(section(OPERATIONS, "Error codes"))}
    assert documented == {
        str(code): [str(traits.status), f"`{traits.kind}`", "yes" if traits.retryable else "no"]
        for code, traits in TRAITS.items()
    }


def test_causes_and_outcomes_are_documented() -> None:
    assert {str(cause) for cause in LossCause} <= names_in(section(OPERATIONS, "Metrics"))
    assert {str(outcome) for outcome in Disposition} <= names_in(section(OPERATIONS, "Logs"))


SUBJECT_ARGUMENTS: dict[str, object] = {
    "address": subjects.JobAddress("some-model", BATCH, Lane.ANY),
    "band": BATCH,
    "gateway": "g1",
    "worker": "w1",
    "name": "w1",
    "kind": "ready",
    "bucket": subjects.WORKERS_BUCKET,
    "key": "w1",
}
NO_SUBJECTS = {"encode_model", "decode_model", "parse_job", "sender"}


def documented_subjects() -> list[re.Pattern[str]]:
    """What the section names, as patterns in which each `<placeholder>` is one token."""
    names = names_in(section(DESIGN, "Subjects"))
    return [re.compile(re.sub(r"<\w+>", r"[^.]+", re.escape(name))) for name in names if " " not in name]


def test_every_subject_is_documented() -> None:
    made = {
        name: function(*(SUBJECT_ARGUMENTS[argument] for argument in inspect.signature(function).parameters))
        for name, function in inspect.getmembers(subjects, inspect.isfunction)
        if function.__module__ == subjects.__name__ and not name.startswith("_") and name not in NO_SUBJECTS
    }
    assert {"job", "claim", "reply", "orders", "event"} <= made.keys()
    patterns = documented_subjects()
    assert not {name: text for name, text in made.items() if not any(p.fullmatch(text) for p in patterns)}


def test_every_stream_and_bucket_is_documented() -> None:
    names = {value for name, value in vars(subjects).items() if name.isupper() and isinstance(value, str)}
    assert {subjects.EVENTS_STREAM, subjects.WORKERS_BUCKET} <= names
    documented = {name.replace("<name>", "*") for name in names_in(section(DESIGN, "Subjects"))}
    assert not names - documented


def test_rights_are_about_documented_subjects() -> None:
    heads = {".".join(name.split(".")[:2]) for name in names_in(section(DESIGN, "Subjects"))}
    rights = [subject for role in Role for subject in (*rights_of(role).publish, *rights_of(role).subscribe)]
    ours = {".".join(subject.split(".")[:2]) for subject in rights if subject.startswith("mesh.")}
    assert ours
    assert ours - {"mesh.beat"} <= heads
    assert set(Role) == {row[0] for row in rows(section(DESIGN, "Identity and rights"))}


# --- commands and links ----------------------------------------------------------------------------------------------


def parse(arguments: list[str]) -> None:
    """Have the command line parse `arguments` without running anything. Raises `click.UsageError`."""
    command: click.Command = main
    context = click.Context(main, info_name="infermesh")
    while isinstance(command, click.Group):
        name, *arguments = arguments
        inner = command.get_command(context, name)
        assert inner is not None, f"there is no command '{name}'"
        command = inner
    command.make_context(command.name, arguments, parent=context)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_code_blocks_are_accepted(page: Path) -> None:
    for arguments in commands(page.read_text(), "infermesh"):
        parse(arguments)
    for arguments in commands(page.read_text(), "tools/up"):
        parse(["up", *arguments])


def test_the_readme_has_the_two_commands_and_a_worker_from_elsewhere() -> None:
    assert commands(README, "tools/up")[0] == []
    assert commands(README, "tools/test") == [[]]
    assert {call[0] for call in commands(README, "infermesh")} >= {"up", "creds", "worker", "bench"}
    for script in re.findall(r"^\./(tools/\w+)", "".join(code_blocks(README)), re.MULTILINE):
        assert os.access(ROOT / script, os.X_OK), script


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{link} does not exist"
        assert target.is_relative_to(ROOT)
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            assert anchor in map(slug, headings), f"{link}: there is no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    source = re.compile(r"(?:schemas|bus|gateway|worker|tools|tests)/[\w/]+\.py|(?:gateway|worker|tools|tests)/[\w/.]+")
    missing = [name for name in names_in(page.read_text()) if source.fullmatch(name) and not (ROOT / name).exists()]
    assert not missing


def test_decisions_are_numbered_without_gaps_and_listed() -> None:
    assert [path.name[:4] for path in ADRS] == [f"{number:04}" for number in range(1, len(ADRS) + 1)]
    index = (DOCS / "adr/README.md").read_text()
    titles = {path.name: re.match(r"# ADR (\d{4}: .+)\n", path.read_text()) for path in ADRS}
    listed = [f"- [{title[1]}]({name})" for name, title in titles.items() if title]
    assert re.findall(r"^- .+$", index, re.MULTILINE) == listed


@pytest.mark.parametrize("path", ADRS, ids=lambda path: path.stem)
def test_decisions_have_context_decision_and_consequences(path: Path) -> None:
    headings = re.findall(r"^## (.+)$", path.read_text(), re.MULTILINE)
    assert headings == ["Context", "Decision", "Consequences"]
    assert path.read_text().startswith(f"# ADR {path.name[:4]}: ")


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    page = (DOCS / "adr/0009-dependencies.md").read_text()
    runtime = [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["llama"]]
    packages = {re.split(r"[=<>~! \[]", requirement)[0] for requirement in runtime}
    assert {row[0].split("`")[1] for row in rows(page)} == packages
    groups = project["dependency-groups"]
    others = {re.split(r"[=<>~! \[]", requirement)[0] for requirement in [*groups["dev"], *groups["model"]]}
    assert others <= names_in(page)


# --- a running mesh --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """A mesh that serves the README's model id, with the `sim` engine."""
    directory = tmp_path_factory.mktemp("mesh")
    with mesh_up(directory, "--engine", "sim", "--sim-step-ms", "0", "--model-id", DEFAULT_MODEL_ID) as mesh:
        yield mesh


def test_every_metric_is_documented(mesh: Mesh) -> None:
    answer = httpx.get(f"{mesh.file.admin_url}/metrics", timeout=ANSWER_WITHIN_S)
    types = dict(re.findall(r"^# TYPE (\w+) (\w+)$", answer.text, re.MULTILINE))
    scraped = {name: kind for name, kind in types.items() if not name.endswith("_created")}
    assert {row[0].strip("`"): row[1] for row in rows(section(OPERATIONS, "Metrics"))} == scraped


def test_every_endpoint_is_there(mesh: Mesh) -> None:
    endpoints = [row[0] for row in rows(section(OPERATIONS, "HTTP endpoints").partition("\n### ")[0])]
    assert len(endpoints) >= 7
    for endpoint in endpoints:
        request = re.match(r"`(GET|POST) (\S+)`( \(admin\))?", endpoint)
        assert request is not None, endpoint
        base = mesh.file.admin_url if request[3] else mesh.url.removesuffix("/v1")
        path = request[2].replace("{id}", DEFAULT_MODEL_ID)
        status = httpx.request(request[1], base + path, timeout=ANSWER_WITHIN_S).status_code
        assert status == (400 if request[1] == "POST" else 200), endpoint


def test_the_readme_s_python_example_runs(mesh: Mesh) -> None:
    (example,) = code_blocks(README, language="python")
    assert README_URL in example
    script = example.replace(README_URL, mesh.url)
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=ANSWER_WITHIN_S, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "".join(f" tok{number}" for number in range(1, 51)) + "\n"


def test_the_readme_s_curl_example_is_a_valid_request(mesh: Mesh) -> None:
    (arguments,) = commands(README, "curl")
    options = dict(zip(arguments[2::2], arguments[3::2], strict=True))
    assert arguments[0] == "-N"
    assert arguments[1].startswith(README_URL)
    name, _, value = options["-H"].partition(": ")
    answer = httpx.post(
        arguments[1].replace(README_URL, mesh.url),
        headers={name: value},
        content=options["-d"],
        timeout=ANSWER_WITHIN_S,
    )
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n")


def test_the_nats_examples_name_the_operator_s_file_and_inbox(mesh: Mesh) -> None:
    calls = commands(README, "nats") + [call for call in commands(OPERATIONS, "nats") if "--creds" in call]
    assert len(calls) >= 3
    for call in calls:
        creds = call[call.index("--creds") + 1]
        assert creds.startswith("$PWD/") == ("save" in call), "what is saved is used from any directory"
        assert (mesh.state_dir / Path(creds.removeprefix("$PWD/")).relative_to(".mesh")).is_file()
        assert call[call.index("--inbox-prefix") + 1] == inbox_prefix(Role.OPERATOR, "operator")


def test_the_state_directory_is_as_documented(mesh: Mesh) -> None:
    documented = {
        pattern.strip("/")
        for row in rows(section(OPERATIONS, "The state directory"))
        for pattern in re.findall(r"`([^`<]+)`", row[0])
    }
    missing = [pattern for pattern in documented if not list(mesh.state_dir.glob(pattern))]
    assert not missing
    described = {pattern.split("/")[0] for pattern in documented}
    assert {path.name for path in mesh.state_dir.iterdir()} == described
