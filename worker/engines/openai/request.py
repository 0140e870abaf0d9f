"""A request of the mesh as requests of the OpenAI API. Pure.

Each choice becomes a request of its own, drawn with a seed of its own as everywhere in the mesh: not every server knows
`n`, and those that do disagree on seeds and on how they count tokens. The prompt is shared by the server's own cache.

Fields beyond OpenAI's are sent only where they are not neutral, under the names that vLLM, SGLang and llama-server
read. What not every one of these three would honour is refused: a server ignores unknown fields in silence (Ollama and
TGI also most of those).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from schemas.errors import ErrorCode, MeshError
from schemas.job import ChatPrompt, EmbeddingPrompt, InfillPrompt, Prompt, TextPrompt, TokenPrompt
from schemas.sampling import PENALTY_LAST_N, JsonGrammar, Sampling, SchemaGrammar

CHAT_PATH: Final = "/v1/chat/completions"
COMPLETIONS_PATH: Final = "/v1/completions"
EMBEDDINGS_PATH: Final = "/v1/embeddings"
_SEEDS: Final = 2**32 - 1
"""Seeds are below: to llama.cpp the highest number of 32 bits says that it shall draw one (`LLAMA_DEFAULT_SEED`)."""


class ServerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A POST to the server."""

    path: str
    body: dict[str, Any]

    def encoded(self) -> bytes:
        """The body as JSON."""
        return msgspec.json.encode(self.body)

    def after(self, error: MeshError) -> ServerRequest | None:
        """The same without a field that `error` refuses and that the request means the same without; else None.

        Some servers refuse a prompt together with a limit that exceeds the context, where the mesh means "at most".
        Without a limit, chats end with the context; raw completions end after 16 tokens. TGI refuses the `top_p` that
        takes every token; others would put a default of the model in its place, so all are told it first.
        """
        body = self.body
        if error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED and self.path == CHAT_PATH and "max_tokens" in body:
            return self._without("max_tokens")
        if error.code is ErrorCode.INVALID_VALUE and "top_p" in error.message and body.get("top_p") == 1.0:
            return self._without("top_p")
        return None

    def _without(self, field: str) -> ServerRequest:
        return ServerRequest(path=self.path, body={name: value for name, value in self.body.items() if name != field})


def completion_requests(prompt: Prompt, sampling: Sampling, *, model: str) -> list[ServerRequest]:
    """One streamed request for each choice. Raises `MeshError` (unsupported_parameter) for what has no counterpart."""
    body = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    match prompt:
        case ChatPrompt():
            path = CHAT_PATH
            body |= {"messages": [_message(message) for message in prompt.messages]}
        case TextPrompt():
            path = COMPLETIONS_PATH
            body |= {"prompt": prompt.text}
        case TokenPrompt():
            path = COMPLETIONS_PATH
            body |= {"prompt": list(prompt.ids)}
        case InfillPrompt():
            path = COMPLETIONS_PATH
            body |= {"prompt": prompt.prefix, "suffix": prompt.suffix}
        case EmbeddingPrompt():
            raise AssertionError("vectors are asked for by `embedding_request`")
    body |= _sampling(sampling) | _logprobs(sampling, chat=path == CHAT_PATH)
    return [
        ServerRequest(path=path, body={**body, "seed": (sampling.seed + choice) % _SEEDS})
        for choice in range(sampling.choices)
    ]


def embedding_request(prompt: EmbeddingPrompt, *, model: str) -> ServerRequest:
    """One request for all vectors. Raises `MeshError` where texts and token ids are mixed, which the API cannot say."""
    if len({type(each) for each in prompt.inputs}) > 1:
        raise _unsupported("input", "texts and token ids in one request")
    inputs = [each if isinstance(each, str) else list(each) for each in prompt.inputs]
    return ServerRequest(path=EMBEDDINGS_PATH, body={"model": model, "input": inputs, "encoding_format": "base64"})


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message with the arguments of its tool calls as JSON text again: templates get them as objects."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_call(call) for call in calls]} if calls else message


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", {})
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return {**call, "function": {**function, "arguments": text}}


def _sampling(sampling: Sampling) -> dict[str, Any]:
    if sampling.dry is not None:
        raise _unsupported("dry_multiplier", "the DRY penalty")
    if sampling.typical_p != 1.0:
        raise _unsupported("typical_p", "typical sampling")
    if sampling.penalty_last_n != PENALTY_LAST_N:
        raise _unsupported("repeat_last_n", "a window of the penalties")
    if sampling.prompt_logprobs is not None:
        raise _unsupported("echo", "likelihoods of the prompt's tokens")
    if sampling.max_tokens == 0:
        raise _unsupported("max_tokens", "an answer without tokens")
    fields: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }
    optional: dict[str, Any] = {
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias},
        "stop": list(sampling.stop),
        "ignore_eos": sampling.ignore_eos,
        "response_format": _response_format(sampling),
    }
    fields |= {name: value for name, value in optional.items() if value}
    if sampling.repeat_penalty != 1.0:
        # vLLM and SGLang call it by the first name, llama-server by the second.
        fields |= {"repetition_penalty": sampling.repeat_penalty, "repeat_penalty": sampling.repeat_penalty}
    return fields


def _logprobs(sampling: Sampling, *, chat: bool) -> dict[str, Any]:
    if sampling.logprobs is None:
        return {}
    return {"logprobs": True, "top_logprobs": sampling.logprobs} if chat else {"logprobs": sampling.logprobs}


def _response_format(sampling: Sampling) -> dict[str, Any] | None:
    match sampling.grammar:
        case None:
            return None
        case JsonGrammar():
            return {"type": "json_object"}
        case SchemaGrammar(schema=schema):
            # Text to text: the schema is the client's, and stays as it is.
            return {
                "type": "json_schema",
                "json_schema": {"name": "answer", "strict": True, "schema": msgspec.Raw(schema.encode())},
            }
        case _:
            raise _unsupported(sampling.grammar_param, "grammars other than JSON schemas")


def _unsupported(param: str, what: str) -> MeshError:
    return MeshError(ErrorCode.UNSUPPORTED_PARAMETER, f"this model's server is not asked for {what}", param=param)
