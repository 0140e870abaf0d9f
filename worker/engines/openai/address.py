"""The server's URL as an operator writes it, and its key. Pure but for reading the key's file."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from worker.engines.base import LoadError

KEY_BYTES_MAX: Final = 4096
"""A fact about keys: a file with more holds something else, and its refusal has this number."""
_HOST: Final = re.compile(r"[A-Za-z0-9._:-]+")
_PATH: Final = re.compile(r"[A-Za-z0-9._~/%-]*")
_KEY: Final = re.compile(rb"[\x21-\x7e]+")


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a server is: `prefix` is the path in front of ``/v1``, without a slash at its end."""

    tls: bool
    host: str
    port: int
    prefix: str

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = 443 if self.tls else 80
        return host if self.port == usual else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.prefix}"


def parse_url(url: str) -> Address:
    """The address in `url`. Raises `LoadError`, without the URL where it may hold a password."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise LoadError("--url is not valid: write http://HOST:PORT") from None
    if parts.username is not None or parts.password is not None:
        raise LoadError("--url must not carry a password, which everybody could read: use --api-key-file")
    host = parts.hostname or ""
    if parts.scheme not in ("http", "https") or not _HOST.fullmatch(host) or not _PATH.fullmatch(parts.path):
        raise LoadError(f"--url {url[:200]!r} is not valid: write http://HOST:PORT")
    if parts.query or parts.fragment:
        raise LoadError(f"--url {url[:200]!r} is not valid: it ends with the path, as in http://HOST:PORT/v1")
    tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return Address(tls=tls, host=host, port=port or (443 if tls else 80), prefix=prefix)


def read_key(file: Path) -> str:
    """The API key in `file`, which only its owner may read. Raises `LoadError`; it never quotes the content."""
    try:
        with file.open("rb") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise LoadError(f"{file} can be read by others: chmod 600 it")
            key = stream.read(KEY_BYTES_MAX + 1).strip()
    except OSError as error:
        raise LoadError(f"{file} cannot be read ({error.strerror}): give the file that holds the API key") from None
    if len(key) > KEY_BYTES_MAX or not _KEY.fullmatch(key):
        raise LoadError(f"{file} does not hold one API key: expected a single word of at most {KEY_BYTES_MAX} bytes")
    return key.decode()
