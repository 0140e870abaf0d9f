"""Text goes through the mesh as it is: nobody normalizes it, nor drops what cannot be seen."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

import httpx
import pytest

from tests.e2e.test_http_bytes import events_of
from tests.support.mesh import Mesh
from worker.models import DEFAULT_MODEL_ID

TEXTS = {
    "composed": "caf\u00e9 \u00c5ngstr\u00f6m \ud55c\uad6d\uc5b4",
    "decomposed": "cafe\u0301 A\u030angstro\u0308m \u1112\u1161\u11ab\u1100\u116e\u11a8\u110b\u1165",
    "marks in no canonical order": "a\u0301\u0323 q\u0307\u0323",
    "characters with an equal": "\u212b \u2126 \u1fef \uf900",
    "compatibility characters": "\ufb01 \u00bd \uff21 \u2460",
    "right to left": "\u200f\u0645\u0631\u062d\u0628\u0627\u200e \u202eabc\u202c \u2067\u05e9\u05dc\u05d5\u05dd\u2069",
    "variation selectors": "\u2603\ufe0e \u2603\ufe0f \u845b\U000e0100 1\ufe0f\u20e3",
    "joined": "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd",
    "invisible": "a\u00ad\u200b\u2060\ufeffb c\u00a0\u2028d\u2029e\u0085f",
}


def echoed(mesh: Mesh, model: str, text: str, *, streamed: bool, **fields: Any) -> str:
    """What comes back of `text`, before the completion if there is one."""
    body = {"model": model, "prompt": text, "echo": True, "max_tokens": 0, "stream": streamed, **fields}
    content = json.dumps(body, ensure_ascii=False).encode()
    answer = httpx.post(
        f"{mesh.url}/completions", content=content, headers={"content-type": "application/json"}, timeout=60.0
    )
    assert answer.status_code == 200, answer.text
    bodies = [answer.content] if not streamed else events_of(answer.content)[:-1]
    return "".join(choice["text"] for body in map(json.loads, bodies) for choice in body["choices"])


def test_they_would_show_a_normalization() -> None:
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        assert any(unicodedata.normalize(form, text) != text for text in TEXTS.values())


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("name", TEXTS)
def test_a_text_comes_back_byte_for_byte(sim: Mesh, name: str, streamed: bool) -> None:
    """As the gateway kept it, and as the worker read it."""
    text = TEXTS[name]
    for fields in ({}, {"logprobs": 1}):
        assert echoed(sim, "sim", text, streamed=streamed, **fields).encode() == text.encode()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("name", TEXTS)
def test_a_text_comes_back_from_the_tokens_of_a_real_model(llama: Mesh, name: str, streamed: bool) -> None:
    text = TEXTS[name]
    assert echoed(llama, DEFAULT_MODEL_ID, text, streamed=streamed, logprobs=1).encode() == text.encode()
