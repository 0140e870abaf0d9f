"""NATS JWTs (version 2) and the keys that sign them.

Facts of the format are those of the library that nats-server reads them with (github.com/nats-io/jwt, v2/claims.go,
header.go and signingkeys.go): base64url without padding, header ``{"typ":"JWT","alg":"ed25519-nkey"}``, ed25519 over
``header.payload``, NATS's own claims under ``nats`` with ``version`` 2.
"""

from __future__ import annotations

import base64
import enum
import hashlib
import os
from typing import Any, Final

import msgspec
import nkeys

_HEADER: Final = {"typ": "JWT", "alg": "ed25519-nkey"}
_CLAIMS_VERSION: Final = 2
_SEED_BYTES: Final = 32
UNLIMITED: Final = -1


class InvalidToken(ValueError):
    """A text that is no NATS JWT or no nkey seed. The message never quotes it."""


class KeyKind(enum.Enum):
    """What a key stands for; the value is its nkey prefix byte."""

    OPERATOR = nkeys.PREFIX_BYTE_OPERATOR
    ACCOUNT = nkeys.PREFIX_BYTE_ACCOUNT
    USER = nkeys.PREFIX_BYTE_USER


class Key:
    """An ed25519 key pair. Only `seed` gives the secret away; `repr` shows the public half."""

    __slots__ = ("_pair", "public")

    def __init__(self, seed: str) -> None:
        """Read `seed`; raises `InvalidToken` when it is not an nkey seed."""
        try:
            self._pair = nkeys.from_seed(seed.strip().encode("ascii"))
            self.public: str = self._pair.public_key.decode("ascii")
        except (nkeys.NkeysError, ValueError, TypeError):
            # The cause is dropped on purpose: its text or its frames may hold the seed.
            raise InvalidToken("not an nkey seed") from None

    @classmethod
    def create(cls, kind: KeyKind) -> Key:
        """A fresh random key."""
        return cls(nkeys.encode_seed(os.urandom(_SEED_BYTES), kind.value).decode("ascii"))

    @property
    def seed(self) -> str:
        """The secret half, as text."""
        seed: bytes = self._pair.seed
        return seed.decode("ascii")

    def sign(self, data: bytes) -> bytes:
        """The ed25519 signature of `data`."""
        signature: bytes = self._pair.sign(data)
        return signature

    def __repr__(self) -> str:
        return f"Key({self.public})"


class _NatsSection(msgspec.Struct, frozen=True):
    type: str = ""
    tags: tuple[str, ...] = ()


class Claims(msgspec.Struct, frozen=True, rename={"public_key": "sub", "expires_at": "exp", "issuer": "iss"}):
    """What the mesh reads of a user or account JWT. `expires_at` is in seconds since the epoch; 0 = never."""

    name: str
    public_key: str
    issuer: str
    nats: _NatsSection
    expires_at: int = 0


def encode_claims(claims: dict[str, Any], *, signer: Key, issued_at: int) -> str:
    """Sign `claims` (`name`, `sub`, `nats`, perhaps `exp`) and return the token."""
    body = {**claims, "iss": signer.public, "iat": issued_at}
    body["nats"] = {**claims["nats"], "version": _CLAIMS_VERSION}
    # Claims are told apart by `jti`, a hash of the rest; nats-server never recomputes it.
    digest = hashlib.sha256(msgspec.json.encode(body, order="deterministic")).digest()
    body["jti"] = base64.b32encode(digest).decode("ascii").rstrip("=")
    signed = f"{_to_base64(msgspec.json.encode(_HEADER))}.{_to_base64(msgspec.json.encode(body))}"
    return f"{signed}.{_to_base64(signer.sign(signed.encode('ascii')))}"


def operator_claims(name: str, *, public_key: str, system_account: str) -> dict[str, Any]:
    """The claims of the operator, the root that a server trusts."""
    return {"name": name, "sub": public_key, "nats": {"type": "operator", "system_account": system_account}}


def account_claims(name: str, *, public_key: str, jetstream: bool, parts: dict[str, Any]) -> dict[str, Any]:
    """The claims of an account without limits. `parts` are `exports`, `imports`, `signing_keys` and `tags`.

    Absent limits mean zero, not "no limit" (account_claims.go): each is written out.
    """
    unlimited = ["subs", "data", "payload", "imports", "exports", "conn", "leaf"]
    if jetstream:
        unlimited += ["mem_storage", "disk_storage", "streams", "consumer"]
    limits = {**dict.fromkeys(unlimited, UNLIMITED), "wildcards": True, "disallow_bearer": True}
    return {"name": name, "sub": public_key, "nats": {"type": "account", "limits": limits, **parts}}


def scoped_user_claims(name: str, *, public_key: str, account: str, tags: list[str]) -> dict[str, Any]:
    """The claims of a user whose rights come from its scoped signing key.

    Such a user carries no permissions or limits of its own, not even neutral ones: the server refuses it otherwise
    (signingkeys.go, `ValidateScopedSigner`).
    """
    return {"name": name, "sub": public_key, "nats": {"type": "user", "issuer_account": account, "tags": tags}}


def decode_claims(token: str, *, kind: str) -> Claims:
    """Read a JWT of that kind, `user` or `account`, without checking its signature (the server does).

    Raises `InvalidToken`.
    """
    parts = token.strip().split(".")
    if len(parts) != 3:
        raise InvalidToken("not a JWT: it has not three parts")
    try:
        payload = base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4))
        claims = msgspec.json.decode(payload, type=Claims)
    except (ValueError, msgspec.DecodeError):
        raise InvalidToken(f"not a NATS {kind} JWT") from None
    if claims.nats.type != kind:
        raise InvalidToken(f"no {kind} JWT")
    return claims


def _to_base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode("ascii").rstrip("=")
