"""The keys of a mesh: operator, system account, mesh account with one scoped signing key per role, and its users.

A layout under ``<state_dir>/identity``, directories 0700 and secrets 0600::

    keys/operator.nk  keys/system.nk  keys/mesh.nk  keys/sign-<role>.nk     seeds, needed to mint and revoke
    jwt/operator.jwt  jwt/system.jwt  jwt/mesh.jwt                          what a server needs; nothing secret
    creds/<role>.creds  creds/<role>-<name>.creds                           one per user
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from bus import subjects
from bus.credentials import (
    BANDS_TAG,
    ROLE_TAG,
    IdentityError,
    bands_in,
    format_credentials,
    read_secret,
    write_secret,
)
from bus.jwt import (
    InvalidToken,
    Key,
    KeyKind,
    account_claims,
    decode_claims,
    encode_claims,
    operator_claims,
    scoped_user_claims,
)
from bus.permissions import Role, rights_of
from schemas.bands import DEFAULT_NAMES, Band
from schemas.names import check_name

DIRECTORY_MODE: Final = 0o700
RESTORE: Final = "restore identity/ from a backup, or change all keys (Rotation in docs/operations.md)"
"""What to do about an identity of which a part is missing: keys cannot be made anew one by one."""
DEFAULT_USERS: Final[dict[Role, str]] = {
    Role.GATEWAY: "g1",
    Role.WORKER: "w1",
    Role.OPERATOR: "operator",
    Role.OBSERVER: "observer",
}


@dataclass(frozen=True, kw_only=True)
class MeshIdentity:
    """A mesh's public identity and where its secrets lie; seeds are read only when something is minted.

    `bands` are those whose streams its members have rights to, the highest first. They are as old as the keys.
    """

    directory: Path
    operator_jwt: str
    system_account: str
    system_jwt: str
    mesh_account: str
    mesh_jwt: str
    bands: tuple[Band, ...]

    def credentials_path(self, role: Role, name: str | None = None) -> Path:
        """Where the credentials file of `name` (the default user of `role` if None) lies or will lie."""
        default = DEFAULT_USERS.get(role)
        stem = str(role) if name is None or name == default else f"{role}-{name}"
        return self.directory / "creds" / f"{stem}.creds"

    def signing_key(self, role: Role) -> Key:
        """The scoped signing key of `role`. Raises `IdentityError`."""
        return _read_key(self.directory / "keys" / f"sign-{role}.nk")


def create_mesh_identity(
    state_dir: Path, *, bands: tuple[Band, ...] | None = None, now: Callable[[], float] = time.time
) -> MeshIdentity:
    """The identity under `state_dir`, made now if there is none. Raises `IdentityError`.

    `bands` None takes what is there, or the usual ones; others than those that are there are an error.

    It is built aside and renamed, so neither a crash nor two processes at once leave half of one: the first rename wins
    and everybody loads that.
    """
    directory = state_dir / "identity"
    if not directory.exists():
        try:
            state_dir.mkdir(parents=True, exist_ok=True, mode=DIRECTORY_MODE)
            scratch = Path(tempfile.mkdtemp(prefix=".identity-", dir=state_dir))
        except OSError as error:
            raise IdentityError(
                f"{state_dir} cannot be written ({error.strerror}): choose another state directory or check its owner"
            ) from None
        try:
            _build(scratch, bands=bands or DEFAULT_NAMES, issued_at=int(now()))
            _rename_unless_taken(scratch, directory)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    identity = load_mesh_identity(state_dir)
    if bands not in (None, identity.bands):
        raise IdentityError(
            f"the mesh in {state_dir} has the bands {','.join(identity.bands)}, as its keys were made: "
            "choose another state directory for other ones"
        )
    return identity


def load_mesh_identity(state_dir: Path) -> MeshIdentity:
    """The identity that `create_mesh_identity` made earlier. Raises `IdentityError` when it is missing or broken."""
    directory = state_dir / "identity"
    # Without the directory nothing is missing: nothing was made yet.
    read = partial(read_secret, where_missing=RESTORE) if os.path.isdir(directory) else read_secret
    tokens = {name: read(directory / "jwt" / f"{name}.jwt").strip() for name in ("operator", "system", "mesh")}
    return MeshIdentity(
        directory=directory,
        operator_jwt=tokens["operator"],
        system_account=_read_key(directory / "keys" / "system.nk").public,
        system_jwt=tokens["system"],
        mesh_account=_read_key(directory / "keys" / "mesh.nk").public,
        mesh_jwt=tokens["mesh"],
        bands=_bands_of(tokens["mesh"], directory / "jwt" / "mesh.jwt"),
    )


def mint_user(
    identity: MeshIdentity,
    *,
    role: Role,
    name: str,
    expires_in_s: int | None = None,
    now: Callable[[], float] = time.time,
) -> str:
    """The text of a credentials file for a new user `name` of `role`.

    Raises `InvalidName` for a name that would carry other members' rights, `IdentityError` without the signing key.
    """
    check_name(name, kind=role)
    return sign_user(identity, role=role, name=name, expires_in_s=expires_in_s, now=now)


def ensure_user(identity: MeshIdentity, *, role: Role, name: str) -> Path:
    """The path of `name`'s credentials file, minted now if there is none."""
    check_name(name, kind=role)
    path = identity.credentials_path(role, name)
    if not path.exists():
        write_secret(path, mint_user(identity, role=role, name=name))
    return path


def sign_user(
    identity: MeshIdentity, *, role: Role, name: str, expires_in_s: int | None, now: Callable[[], float]
) -> str:
    """`mint_user` without the check of the name: for that function, and for tests of what the check is for."""
    user_key = Key.create(KeyKind.USER)
    issued_at = int(now())
    claims = scoped_user_claims(
        name,
        public_key=user_key.public,
        account=identity.mesh_account,
        tags=[f"{ROLE_TAG}{role}", _bands_tag(identity.bands)],
    )
    if expires_in_s is not None:
        claims["exp"] = issued_at + expires_in_s
    token = encode_claims(claims, signer=identity.signing_key(role), issued_at=issued_at)
    return format_credentials(token, user_key)


def _build(directory: Path, *, bands: tuple[Band, ...], issued_at: int) -> None:
    """Write a whole new identity into the empty `directory`."""
    for name in ("keys", "jwt", "creds"):
        (directory / name).mkdir(mode=DIRECTORY_MODE)
    operator, system, mesh = Key.create(KeyKind.OPERATOR), Key.create(KeyKind.ACCOUNT), Key.create(KeyKind.ACCOUNT)
    signers = {role: Key.create(KeyKind.ACCOUNT) for role in Role}
    keys = {"operator": operator, "system": system, "mesh": mesh, **{f"sign-{r}": key for r, key in signers.items()}}
    for name, key in keys.items():
        write_secret(directory / "keys" / f"{name}.nk", f"{key.seed}\n")
    tokens = {
        "operator": operator_claims("infermesh", public_key=operator.public, system_account=system.public),
        "system": _system_claims(system),
        "mesh": _mesh_claims(mesh, system=system, signers=signers, bands=bands),
    }
    for name, claims in tokens.items():
        token = encode_claims(claims, signer=operator, issued_at=issued_at)
        write_secret(directory / "jwt" / f"{name}.jwt", f"{token}\n")
    identity = MeshIdentity(
        directory=directory,
        operator_jwt="",
        system_account=system.public,
        system_jwt="",
        mesh_account=mesh.public,
        mesh_jwt="",
        bands=bands,
    )
    for role, name in DEFAULT_USERS.items():
        ensure_user(identity, role=role, name=name)


def _system_claims(system: Key) -> dict[str, Any]:
    """The system account lets every account import the disconnects of its own connections, and nobody else's.

    `account_token_position` is what holds an importer to its own key.
    """
    export = {
        "name": "disconnects",
        "subject": "$SYS.ACCOUNT.*.DISCONNECT",
        "type": "stream",
        "account_token_position": 3,
    }
    return account_claims("system", public_key=system.public, jetstream=False, parts={"exports": [export]})


def _mesh_claims(mesh: Key, *, system: Key, signers: dict[Role, Key], bands: tuple[Band, ...]) -> dict[str, Any]:
    disconnects = {
        "name": "disconnects",
        "subject": f"$SYS.ACCOUNT.{mesh.public}.DISCONNECT",
        "account": system.public,
        "local_subject": subjects.DISCONNECT,
        "type": "stream",
    }
    scopes = [
        {
            "kind": "user_scope",
            "key": key.public,
            "role": str(role),
            "template": rights_of(role, bands=bands).to_claims(),
        }
        for role, key in signers.items()
    ]
    parts = {"imports": [disconnects], "signing_keys": scopes, "tags": [_bands_tag(bands)]}
    return account_claims("mesh", public_key=mesh.public, jetstream=True, parts=parts)


def _bands_tag(bands: tuple[Band, ...]) -> str:
    return f"{BANDS_TAG}{','.join(bands)}"


def _bands_of(token: str, path: Path) -> tuple[Band, ...]:
    try:
        return bands_in(decode_claims(token, kind="account"))
    except ValueError:
        raise IdentityError(f"{path} holds no account of a mesh: restore it from a backup") from None


def _rename_unless_taken(scratch: Path, directory: Path) -> None:
    try:
        os.rename(scratch, directory)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise IdentityError(f"{directory} cannot be written ({error.strerror}): check its owner") from None


def _read_key(path: Path) -> Key:
    try:
        return Key(read_secret(path, where_missing=RESTORE))
    except InvalidToken:
        raise IdentityError(f"{path} holds no nkey seed: restore it from a backup") from None
