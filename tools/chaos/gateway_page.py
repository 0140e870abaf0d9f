"""The gateway's own figures, from its metrics page."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

PAGE_TIMEOUT_S: Final = 2.0


class GatewayPage:
    """`admin_url()` is where the page is now; empty while there is none."""

    def __init__(self, admin_url: Callable[[], str]) -> None:
        self._admin_url = admin_url

    async def total(self, name: str) -> float | None:
        """The samples called `name` together, whatever their labels; None while the gateway does not answer."""
        url = self._admin_url()
        if not url:
            return None
        try:
            page = await asyncio.to_thread(_read, f"{url}/metrics")
        except (OSError, HTTPException):
            return None
        samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
        return sum(sample.value for sample in samples if sample.name == name)


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=PAGE_TIMEOUT_S) as answer:
        text: str = answer.read().decode()
    return text
