"""What an installation can fail with: each error is one line that says what to do."""

from __future__ import annotations


class InstallError(Exception):
    """The installation cannot go on. The text is for people and complete without a traceback."""
