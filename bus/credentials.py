"""Credentials files: written so that only their owner can read them, read with errors that say what to do.

The decorated format is the one that the `nats` CLI and nats-py read (github.com/nats-io/jwt, creds_utils.go).
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bus.jwt import Claims, InvalidToken, Key, decode_claims
from bus.permissions import Role, inbox_prefix
from schemas.bands import DEFAULT_NAMES, Band, parse_bands
from schemas.names import InvalidName, check_name

SECRET_MODE: Final = 0o600
SECRET_BYTES_MAX: Final = 64 * 1024
"""A fact: files of keys and credentials take a few kB, a larger one is something else. Its error has the number."""
ROLE_TAG: Final = "role:"
BANDS_TAG: Final = "bands:"
"""Before the mesh's bands, the highest first, in the JWTs of its account and of each user."""

_USER_JWT: Final = re.compile(r"-{3,}BEGIN NATS USER JWT-{3,}\s+(\S+)\s+-{3,}END NATS USER JWT-{3,}")
_USER_SEED: Final = re.compile(r"-{3,}BEGIN USER NKEY SEED-{3,}\s+(\S+)\s+-{3,}END USER NKEY SEED-{3,}")
_TEMPLATE: Final = """\
-----BEGIN NATS USER JWT-----
{token}
------END NATS USER JWT------

The seed below proves who its bearer is: keep this file secret.

-----BEGIN USER NKEY SEED-----
{seed}
------END USER NKEY SEED------
"""


class IdentityError(Exception):
    """Keys or credentials that cannot be used. One line: which file, and what to do. Never quotes a secret."""


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Who a credentials file makes its bearer. Holds no secret: connections read `path` themselves.

    `inbox_prefix` is the only one that the bearer's rights allow. `bands` are the mesh's, the highest first: its rights
    are to their streams. `expires_at`: seconds since the epoch; None = never.
    """

    path: Path
    name: str
    role: Role
    user_key: str
    inbox_prefix: str
    bands: tuple[Band, ...]
    expires_at: int | None


def format_credentials(token: str, user_key: Key) -> str:
    """The text of a credentials file for the user JWT `token` of `user_key`."""
    return _TEMPLATE.format(token=token, seed=user_key.seed)


def read_credentials(path: Path, *, needed: Role | None = None, now: Callable[[], float] = time.time) -> Credentials:
    """Read who the file at `path` makes its bearer.

    Raises `IdentityError` when the file is missing, open to others, not a credentials file of a mesh, expired, or of
    another role than the one that is `needed`.
    """
    claims, seed = _parse(path, read_secret(path))
    if Key(seed).public != claims.public_key:
        raise _unusable(path, "its key is not the one of its JWT")
    try:
        role = Role(next(tag.removeprefix(ROLE_TAG) for tag in claims.nats.tags if tag.startswith(ROLE_TAG)))
        name = check_name(claims.name, kind=role)
        bands = bands_in(claims)
    except (StopIteration, ValueError) as error:
        reason = str(error) if isinstance(error, InvalidName) else "it names no role of a mesh"
        raise _unusable(path, reason) from None
    if needed not in (None, role):
        raise IdentityError(
            f"{path} is of role {role}: a {needed} needs credentials of role {needed}, mint them with "
            f"'infermesh creds {needed} NAME' on the machine that holds the mesh's keys"
        )
    if claims.expires_at and claims.expires_at <= now():
        expired = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(claims.expires_at))
        raise _unusable(path, f"it expired at {expired} UTC")
    return Credentials(
        path=path,
        name=name,
        role=role,
        user_key=claims.public_key,
        inbox_prefix=inbox_prefix(role, name),
        bands=bands,
        expires_at=claims.expires_at or None,
    )


def bands_in(claims: Claims) -> tuple[Band, ...]:
    """The mesh's bands as a JWT of its account or of a user names them; one that is older than their list means the
    usual ones. Raises `InvalidName`, or ValueError for a list that no mesh can have."""
    named = next((tag for tag in claims.nats.tags if tag.startswith(BANDS_TAG)), None)
    return DEFAULT_NAMES if named is None else parse_bands(named.removeprefix(BANDS_TAG))


def read_secret(path: Path, *, where_missing: str = "run `infermesh init`, or copy the file to this machine") -> str:
    """The text of a file that only its owner may read. Raises `IdentityError`; `where_missing` is what to do about a
    file that is not there.

    Links are followed: Kubernetes mounts secrets as links. The mode is that of the file they lead to.
    """
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise IdentityError(f"{path} is not a file: give the path of a credentials or key file")
            if stat.S_IMODE(status.st_mode) & 0o077:
                raise IdentityError(
                    f"{path} can be read by others: run `chmod 600 {path}`, or replace it if others had access"
                )
            data = file.read(SECRET_BYTES_MAX + 1)
    except FileNotFoundError:
        raise IdentityError(f"{path} does not exist: {where_missing}") from None
    except OSError as error:
        raise IdentityError(f"{path} cannot be read ({error.strerror}): check its path and owner") from None
    if len(data) > SECRET_BYTES_MAX:
        raise IdentityError(f"{path} is larger than {SECRET_BYTES_MAX} bytes: it is not a credentials or key file")
    return data.decode("utf-8", errors="replace")


def write_secret(path: Path, text: str) -> None:
    """Write `text` to `path` with mode 0600, whole or not at all. Raises `IdentityError`.

    A link at `path` is refused: somebody else may have put it there.
    """
    if path.is_symlink():
        raise IdentityError(f"{path} is a symbolic link: remove it, secrets are written to plain files only")
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, SECRET_MODE)
        try:
            with open(handle, "w", encoding="utf-8") as file:
                os.fchmod(file.fileno(), SECRET_MODE)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                scratch.unlink()
            raise
    except OSError as error:
        raise IdentityError(f"{path} cannot be written ({error.strerror}): check the directory and its owner") from None


def _parse(path: Path, text: str) -> tuple[Claims, str]:
    token, seed = _USER_JWT.search(text), _USER_SEED.search(text)
    if token is None or seed is None:
        raise _unusable(path, "it is not a credentials file")
    try:
        Key(seed[1])
        return decode_claims(token[1], kind="user"), seed[1]
    except InvalidToken as error:
        raise _unusable(path, f"it holds what is {error}") from None


def _unusable(path: Path, reason: str) -> IdentityError:
    return IdentityError(f"{path} cannot be used, {reason}: ask an operator for a new one")
