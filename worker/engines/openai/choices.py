"""All choices of one request, side by side, as the events of one key."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

from schemas.errors import MeshError
from schemas.frames import TokenLogprob, Usage
from worker.engines.base import Accepted, Event, Finished, Submit, Tokens
from worker.engines.openai.client import Client
from worker.engines.openai.completion import Completion, Ended
from worker.engines.openai.request import ServerRequest, completion_requests
from worker.engines.openai.settings import OpenAISettings

PROMPT_UNKNOWN: Final = 0
"""Tokens of a prompt that the server has taken: it tells at the end."""


class Choices:
    """`run` it once. `emit` gets `Accepted` with the first choice that the server takes, then the text of all."""

    def __init__(
        self, client: Client, settings: OpenAISettings, command: Submit, *, emit: Callable[[Event], None]
    ) -> None:
        self._client = client
        self._settings = settings
        self._command = command
        self._emit = emit
        self._accepted = False

    async def run(self, *, model: str, context: int) -> None:
        """See all of them through, to `Finished`, on a model with so many tokens of context.

        Raises the `MeshError` of the first that fails; the others end then.
        Cancelling it closes all their connections.
        """
        command = self._command
        requests = completion_requests(command.prompt, command.sampling, model=model)
        try:
            async with asyncio.TaskGroup() as group:
                choices = [
                    group.create_task(self._complete(number, request, context=context))
                    for number, request in enumerate(requests)
                ]
        except ExceptionGroup as errors:
            raise _leading(errors) from None
        self._emit(_finished(command.key, [choice.result() for choice in choices]))

    async def _complete(self, number: int, request: ServerRequest, *, context: int) -> Ended:
        key = self._command.key

        def on_text(text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
            self._emit(Tokens(key, text, (), number, logprobs))

        completion = Completion(
            self._client,
            self._settings,
            tokens_max=min(self._command.sampling.max_tokens, context),
            on_accepted=self._accept,
            on_text=on_text,
        )
        return await completion.run(request)

    def _accept(self) -> None:
        if not self._accepted:
            self._accepted = True
            self._emit(Accepted(self._command.key, PROMPT_UNKNOWN, 0, 0, resumes=False))


def _leading(errors: ExceptionGroup[Exception]) -> Exception:
    """Why a request failed whose choices failed: a defect of ours before what the server did."""
    return min(errors.exceptions, key=lambda error: isinstance(error, MeshError))


def _finished(key: int, choices: Sequence[Ended]) -> Finished:
    now = time.monotonic()
    accepted_at = min(choice.accepted_at for choice in choices)
    first_text_at = min(choice.first_text_at for choice in choices)
    usage = Usage(
        prompt_tokens=choices[0].usage.prompt_tokens,
        completion_tokens=sum(choice.usage.completion_tokens for choice in choices),
        cached_tokens=choices[0].usage.cached_tokens,
    )
    return Finished(
        key,
        tuple(choice.reason for choice in choices),
        usage,
        prefill_ms=(first_text_at - accepted_at) * 1000,
        decode_ms=(now - first_text_at) * 1000,
    )
