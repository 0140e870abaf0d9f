from __future__ import annotations

import os
import stat
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from bus import identity as identity_module
from bus.credentials import IdentityError, read_credentials, write_secret
from bus.identity import create_mesh_identity, ensure_user, load_mesh_identity, mint_user
from bus.jwt import Key
from bus.permissions import Role
from schemas.bands import DEFAULT_NAMES, parse_bands
from schemas.names import InvalidName


def at(second: float) -> Callable[[], float]:
    """A clock that stands still."""
    return lambda: second


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def seeds_under(directory: Path) -> list[str]:
    return [path.read_text().strip() for path in directory.rglob("*.nk")]


@pytest.mark.parametrize(
    "role, name, inbox_prefix",
    [
        (Role.GATEWAY, "g1", "_IB.g1"),
        (Role.WORKER, "w1", "_IB.w1"),
        (Role.OPERATOR, "operator", "_INBOX.operator"),
        (Role.OBSERVER, "observer", "_INBOX.observer"),
    ],
)
def test_default_users_know_who_they_are(tmp_path: Path, role: Role, name: str, inbox_prefix: str) -> None:
    identity = create_mesh_identity(tmp_path)
    who = read_credentials(identity.credentials_path(role))
    assert (who.role, who.name, who.inbox_prefix, who.expires_at) == (role, name, inbox_prefix, None)
    assert who.user_key.startswith("U")


def test_secrets_are_for_their_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        identity = create_mesh_identity(tmp_path / "state")
        ensure_user(identity, role=Role.WORKER, name="w2")
    finally:
        os.umask(before)
    modes = {path: mode_of(path) for path in (identity.directory, *identity.directory.rglob("*"))}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}
    assert mode_of(tmp_path / "state") == 0o700


def test_a_second_start_loads_what_the_first_made(tmp_path: Path) -> None:
    first = create_mesh_identity(tmp_path)
    before = {path: path.read_bytes() for path in first.directory.rglob("*") if path.is_file()}
    assert create_mesh_identity(tmp_path) == first == load_mesh_identity(tmp_path)
    assert {path: path.read_bytes() for path in first.directory.rglob("*") if path.is_file()} == before


def test_many_at_once_agree_on_one_identity(tmp_path: Path) -> None:
    results = []
    start = threading.Barrier(8)

    def create() -> None:
        start.wait()
        results.append(create_mesh_identity(tmp_path))

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert set(results) == {load_mesh_identity(tmp_path)}
    assert [path.name for path in tmp_path.iterdir()] == ["identity"]


@pytest.mark.parametrize("writes", [0, 1, 7, 12])
def test_a_failure_in_the_middle_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    left = iter(range(writes))

    def fail_at_last(path: Path, text: str) -> None:
        if next(left, None) is None:
            raise IdentityError("disk full")
        write_secret(path, text)

    monkeypatch.setattr(identity_module, "write_secret", fail_at_last)
    with pytest.raises(IdentityError, match="disk full"):
        create_mesh_identity(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unusable_state_directory_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(IdentityError, match=r"cannot be written .* choose another state directory") as caught:
        create_mesh_identity(tmp_path / "file" / "state")
    assert "\n" not in str(caught.value)


def test_a_broken_key_is_named_and_not_quoted(tmp_path: Path) -> None:
    identity = create_mesh_identity(tmp_path)
    key = identity.directory / "keys" / "sign-worker.nk"
    seed = key.read_text().strip()
    write_secret(key, seed[:-8])
    with pytest.raises(IdentityError, match=r"sign-worker\.nk holds no nkey seed") as caught:
        mint_user(identity, role=Role.WORKER, name="w2")
    assert seed[:-8] not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "name", ["*", ">", "a.b", "any", "resume", "", "W1", "-w", "w_1", "w 1", "w1\n", "é", "x" * 64]
)
@pytest.mark.parametrize("role", list(Role))
def test_names_that_carry_others_rights_cannot_be_minted(tmp_path: Path, role: Role, name: str) -> None:
    identity = create_mesh_identity(tmp_path)
    with pytest.raises(InvalidName):
        mint_user(identity, role=role, name=name)
    with pytest.raises(InvalidName):
        ensure_user(identity, role=role, name=name)


def test_a_user_is_minted_once(tmp_path: Path) -> None:
    identity = create_mesh_identity(tmp_path)
    path = ensure_user(identity, role=Role.WORKER, name="w2")
    minted = path.read_text()
    assert ensure_user(identity, role=Role.WORKER, name="w2") == path
    assert path.read_text() == minted
    assert ensure_user(identity, role=Role.WORKER, name="w1") == identity.credentials_path(Role.WORKER)


def test_expiry_is_told_and_then_enforced(tmp_path: Path) -> None:
    identity = create_mesh_identity(tmp_path)
    path = tmp_path / "short.creds"
    write_secret(path, mint_user(identity, role=Role.WORKER, name="w2", expires_in_s=60, now=at(1_000_000)))
    assert read_credentials(path, now=at(1_000_059)).expires_at == 1_000_060
    with pytest.raises(IdentityError, match=r"expired at 1970-01-12 13:47:40 UTC: ask an operator for a new one"):
        read_credentials(path, now=at(1_000_060))


def test_another_role_than_the_needed_one_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = create_mesh_identity(tmp_path).credentials_path(Role.WORKER)
    assert read_credentials(path, needed=Role.WORKER) == read_credentials(path)
    with pytest.raises(IdentityError) as caught:
        read_credentials(path, needed=Role.GATEWAY)
    assert str(caught.value) == (
        f"{path} is of role worker: a gateway needs credentials of role gateway, mint them with "
        "'infermesh creds gateway NAME' on the machine that holds the mesh's keys"
    )


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o620])
def test_a_file_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = create_mesh_identity(tmp_path).credentials_path(Role.WORKER)
    path.chmod(mode)
    with pytest.raises(IdentityError, match=r"can be read by others: run `chmod 600 .*worker\.creds`"):
        read_credentials(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match=r"none\.creds does not exist: run `infermesh init`"):
        read_credentials(tmp_path / "none.creds")


def test_a_directory_and_a_pipe_are_no_credentials(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(IdentityError, match=r"is not a file|cannot be read"):
            read_credentials(path)


def test_malformed_files_are_refused_without_quoting_them(tmp_path: Path) -> None:
    identity = create_mesh_identity(tmp_path)
    text = identity.credentials_path(Role.WORKER).read_text()
    lines = text.splitlines()
    token, seed = lines[1], next(line for line in lines if line.startswith("SU"))
    other_seed = next(
        line for line in identity.credentials_path(Role.GATEWAY).read_text().splitlines() if line.startswith("SU")
    )
    broken = {
        "empty": "",
        "no seed": text.replace(seed, ""),
        "no token": text.replace(token, ""),
        "a seed cut short": text.replace(seed, seed[:-4]),
        "a token cut short": text.replace(token, token[: len(token) // 2]),
        "two parts": text.replace(token, token.rpartition(".")[0]),
        "an account's token": text.replace(token, identity.mesh_jwt),
        "another's seed": text.replace(seed, other_seed),
        "binary": "\x00" * 100,
        "huge": text + " " * 70_000,
    }
    for kind, content in broken.items():
        path = tmp_path / "broken.creds"
        write_secret(path, content)
        with pytest.raises(IdentityError, match=r"broken\.creds (cannot be used|is larger)") as caught:
            read_credentials(path)
        told = "".join(traceback.format_exception(caught.value))
        assert "\n" not in str(caught.value), kind
        assert seed not in told, kind
        assert seed[:-4] not in told, kind


def test_a_token_without_a_role_of_the_mesh_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = create_mesh_identity(tmp_path)
    monkeypatch.setattr(identity_module, "ROLE_TAG", "part:")
    path = tmp_path / "foreign.creds"
    write_secret(path, mint_user(identity, role=Role.WORKER, name="w2"))
    with pytest.raises(IdentityError, match="names no role of a mesh"):
        read_credentials(path)


def test_the_bands_of_a_mesh_are_in_its_account_and_in_every_credentials_file(tmp_path: Path) -> None:
    bands = parse_bands("urgent,normal,bulk")
    identity = create_mesh_identity(tmp_path, bands=bands)
    assert identity.bands == bands == load_mesh_identity(tmp_path).bands == create_mesh_identity(tmp_path).bands
    write_secret(tmp_path / "w2.creds", mint_user(identity, role=Role.WORKER, name="w2"))
    for path in (identity.credentials_path(Role.GATEWAY), tmp_path / "w2.creds"):
        assert read_credentials(path).bands == bands


def test_the_bands_of_a_mesh_stay_as_its_keys_were_made(tmp_path: Path) -> None:
    bands = parse_bands("urgent,normal")
    create_mesh_identity(tmp_path, bands=bands)
    assert create_mesh_identity(tmp_path, bands=bands).bands == bands
    with pytest.raises(IdentityError, match=r"has the bands urgent,normal, .* choose another state directory"):
        create_mesh_identity(tmp_path, bands=parse_bands("normal,urgent"))


def test_a_mesh_made_before_bands_had_names_has_the_usual_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity_module, "BANDS_TAG", "of-another-version:")
    identity = create_mesh_identity(tmp_path)
    assert identity.bands == DEFAULT_NAMES
    assert read_credentials(identity.credentials_path(Role.WORKER)).bands == DEFAULT_NAMES
    assert create_mesh_identity(tmp_path, bands=DEFAULT_NAMES).bands == DEFAULT_NAMES


def test_credentials_with_bands_that_no_mesh_has_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = create_mesh_identity(tmp_path)
    monkeypatch.setattr(identity_module, "BANDS_TAG", "bands:*,")
    path = tmp_path / "foreign.creds"
    write_secret(path, mint_user(identity, role=Role.WORKER, name="w2"))
    with pytest.raises(IdentityError, match=r"foreign\.creds cannot be used, .*ask an operator for a new one"):
        read_credentials(path)


def test_seeds_show_nowhere(tmp_path: Path) -> None:
    identity = create_mesh_identity(tmp_path)
    seeds = seeds_under(identity.directory)
    assert len(seeds) == 3 + len(Role)
    shown = [
        repr(identity),
        repr(identity.signing_key(Role.WORKER)),
        repr(read_credentials(identity.credentials_path(Role.WORKER))),
        *(path.read_text() for path in (identity.directory / "jwt").iterdir()),
        *(path.read_text() for path in (identity.directory / "creds").iterdir()),
    ]
    assert not [seed for seed in seeds for text in shown if seed in text]


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("theirs")
    link.symlink_to(target)
    with pytest.raises(IdentityError, match="is a symbolic link: remove it"):
        write_secret(link, "secret")
    assert target.read_text() == "theirs"


def test_a_secret_replaces_the_old_one_or_leaves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    write_secret(path, "old")
    write_secret(path, "new")
    assert path.read_text() == "new"

    def fail(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(IdentityError, match="No space left on device"):
        write_secret(path, "newest")
    assert [(item.name, item.read_text()) for item in tmp_path.iterdir()] == [("secret", "new")]


def test_keys_are_told_apart_by_their_public_half(tmp_path: Path) -> None:
    identity = create_mesh_identity(tmp_path)
    publics = [Key(seed).public for seed in seeds_under(identity.directory)]
    assert len(set(publics)) == len(publics)
    assert sorted(public[0] for public in publics) == ["A"] * 7 + ["O"]
