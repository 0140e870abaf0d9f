"""Every setting of a gateway: which bound of it a client can meet, and what happens just before it, at it and past it.

The table names each setting once. A setting that is not in it fails the first test; so does a test that is named here
and does not exist.
"""

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from gateway.settings import GatewaySettings, Limits
from tests.support.gateway import Bench, RawClient, chat_body, raw_client, until

HERE = Path(__file__).parent
NOBODY = "nobody"
"""A model that nobody serves: a request that passes all bounds before admission is a 404, and nothing is queued."""
WILD = (10, 1_000)
SEED = 7


class Sized(NamedTuple):
    """A bound that a client meets with one request of size `n`."""

    limit: int
    send: Callable[[RawClient, int], None]
    status: int
    code: str


def messages(count: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "x"}] * count


def nested(levels: int) -> list[dict[str, Any]]:
    arguments = "".join(['{"a":'] * levels) + "1" + "}" * levels
    function = {"name": "f", "arguments": arguments}
    return [{"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": function}]}]


def posting(**of_size: Callable[[int], Any]) -> Callable[[RawClient, int], None]:
    """Send a chat in which each field is what its function makes of the size."""

    def send(client: RawClient, n: int) -> None:
        fields = {name: make(n) for name, make in of_size.items()}
        client.post(json.dumps({"model": NOBODY, "messages": messages(1)} | fields).encode())

    return send


def body_of(n: int) -> bytes:
    empty = chat_body(content="", model=NOBODY)
    return chat_body(content="x" * (n - len(empty)), model=NOBODY)


def send_chunked(client: RawClient, n: int) -> None:
    body = body_of(n)
    client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
    client.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))


def send_head(client: RawClient, n: int) -> None:
    """A head of `n` bytes in all."""
    body = chat_body(model=NOBODY)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\na: " % len(body)
    client.send(head + b"y" * (n - len(head) - len(b"\r\n\r\n")) + b"\r\n\r\n" + body)


def send_fields(client: RawClient, n: int) -> None:
    """A head of `n` fields in all."""
    client.post(chat_body(model=NOBODY), headers="a:\r\n" * (n - 2))


def send_nested(client: RawClient, n: int) -> None:
    """A body of `n` levels, most of them in a field that nobody reads."""
    body = chat_body(model=NOBODY, unknown="HERE").replace(b'"HERE"', b"[" * (n - 1) + b"]" * (n - 1))
    client.post(body)


def send_inputs(client: RawClient, n: int) -> None:
    client.post(json.dumps({"model": NOBODY, "input": ["x"] * n}).encode(), path="/v1/embeddings")


def send_prompts(client: RawClient, n: int) -> None:
    client.post(json.dumps({"model": NOBODY, "prompt": ["x"] * n}).encode(), path="/v1/completions")


def send_deadline(client: RawClient, n: int) -> None:
    client.post(chat_body(model=NOBODY), headers=f"x-mesh-deadline-s: {n}\r\n")


SIZED = {
    "body_bytes_max": Sized(2_000, lambda client, n: client.post(body_of(n)), 413, "body_too_large"),
    "body_bytes_max, chunked": Sized(2_000, send_chunked, 413, "body_too_large"),
    "head_bytes_max": Sized(2_000, send_head, 431, "head_too_large"),
    "head_fields_max": Sized(100, send_fields, 431, "head_too_large"),
    "deadline_s_max": Sized(60, send_deadline, 400, "invalid_value"),
    "limits.body_nesting_max": Sized(8, send_nested, 400, "invalid_value"),
    "limits.messages_max": Sized(5, posting(messages=messages), 400, "invalid_value"),
    "limits.stop_max": Sized(3, posting(stop=lambda n: ["s"] * n), 400, "invalid_value"),
    "limits.stop_bytes_max": Sized(20, posting(stop=lambda n: "s" * n), 400, "invalid_value"),
    "limits.dry_breakers_max": Sized(3, posting(dry_sequence_breakers=lambda n: ["s"] * n), 400, "invalid_value"),
    "limits.logit_bias_max": Sized(
        5, posting(logit_bias=lambda n: {str(token): 1 for token in range(n)}), 400, "invalid_value"
    ),
    "limits.prompts_max": Sized(5, send_prompts, 400, "invalid_value"),
    "limits.embedding_inputs_max": Sized(5, send_inputs, 400, "invalid_value"),
    "limits.arguments_nesting_max": Sized(5, posting(messages=nested), 400, "invalid_value"),
}

ELSEWHERE = {
    "connections_max": "test_connections.py::test_a_connection_too_many_is_a_503_and_the_next_free_place_is_served",
    "head_timeout_s": "test_servers.py::test_a_head_that_does_not_arrive_in_time_ends_the_connection",
    "linger_bytes_max": "test_connections.py::test_what_is_still_coming_is_taken_only_so_far",
    "linger_s": "test_connections.py::test_what_is_still_coming_is_taken_only_so_long",
    "body_timeout_s": "test_connections.py::test_a_body_that_never_comes_is_answered_and_its_connection_closed",
    "open_requests_max": "test_endpoints.py::test_bodies_that_are_being_read_count_as_open_requests",
    "open_bytes_max": "test_endpoints.py::test_the_sum_of_all_bodies_is_bounded_while_they_arrive",
    "stream_buffer_bytes_max": "test_endpoints.py::test_a_slow_client_that_reads_on_is_told_why_its_stream_ended",
    "stream_buffer_limit_s": "test_slow_reader.py::test_who_leaves_too_much_for_too_long_is_too_slow",
    "answer_bytes_max": "test_sse.py::test_a_whole_answer_is_bounded",
    "client_write_limit_s": "test_endpoints.py::test_a_client_that_does_not_read_is_cut_off_and_its_job_cancelled",
    "client_unread_limit_s": "test_servers.py::test_a_client_that_never_reads_does_not_keep_its_connection",
    "newcomer_limit_s": "test_connection_phases.py::test_a_server_that_stops_waits_a_moment_for_who_has_just_come",
    "withdrawals_max": "test_withdrawals.py::test_what_waits_to_be_withdrawn_is_bounded_and_the_bound_is_named_once",
    "withdrawals_at_once_max": "test_withdrawals.py::test_who_leaves_together_is_withdrawn_a_few_at_a_time",
    "known_models_max": "test_fleet.py::test_the_memory_of_models_is_bounded_and_keeps_those_announced_last",
    "topology_retry_s": "test_upkeep.py::test_after_a_failure_it_looks_again_soon_and_ever_less_often",
    "losses_in_a_row_max": "test_continuation.py::test_the_third_loss_in_a_row_ends_the_job_and_names_its_cause",
    "handed_back_in_a_row_max": (
        "test_continuation.py::test_a_job_that_is_handed_round_without_a_new_token_comes_to_an_end"
    ),
    "engine_crashes_max": "test_continuation.py::test_the_second_crash_at_the_same_place_convicts",
    "engine_crashes_in_all_max": "test_continuation.py::test_crashes_at_ever_other_places_come_to_an_end",
    "token_text_bytes_max": "test_exchange.py::",
    "queued_per_caller_max": "test_exchanges.py::",
    "caller_share_max": "test_admission.py::test_a_caller_alone_has_its_share_of_a_band_and_no_more",
    "completion_tokens_max": "test_exchanges.py::",
    "keep_alive_s": "test_endpoints.py::test_the_status_is_held_back_until_the_engine_accepts_or_the_time_is_up",
    "loop_lag_max_s": "test_admission.py::test_a_refusal_is_a_503_that_passes_and_names_its_limit",
    "drain_limit_s": "test_endpoints.py::test_what_is_still_open_at_the_end_of_the_drain_gets_an_error",
    "queue": "test_endpoints.py::test_a_full_queue_is_a_429_with_a_time",
    "bands": "test_endpoints.py::test_a_queue_timeout_without_signs_of_life_is_a_real_503",
    "bands_open": "test_terms.py::",
    "default_band": "test_terms.py::",
    "deadline_s": "test_terms.py::test_a_request_that_sets_no_deadline_gets_the_settings",
    "limits": "test_bounds.py::test_at_a_bound_a_request_passes_and_past_it_the_bound_is_named",
    "limits.schema_bytes_max": "test_structured.py::",
    "limits.grammar_bytes_max": "test_structured.py::",
}

NOT_MET = {
    "where it listens": "host port admin_host admin_port reuse_port",
    "when nothing is asked": "idle_connection_s",
    "what it expects of workers": """
        audit_after_s audit_every_s audit_each_s silence_after_s resend_timeout_s stall_after_s disconnect_grace_s
        worker_lost_after_s bus_silence_s worker_failures_max worker_shun_s
    """,
    "its own rhythm": """
        beat_interval_s record_interval_s sweep_interval_s topology_interval_s orders_max publications_at_once_max
        audits_at_once_max
    """,
    "how it ends": "drain_delay_s close_limit_s",
}


def test_every_setting_is_in_the_table_once() -> None:
    fields = {field.name for field in dataclasses.fields(GatewaySettings)}
    fields |= {f"limits.{field.name}" for field in msgspec.structs.fields(Limits)}
    named = [*{name.partition(",")[0] for name in SIZED}, *ELSEWHERE, *(" ".join(NOT_MET.values()).split())]
    assert sorted(named) == sorted(fields)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_is_tested_elsewhere_is(name: str) -> None:
    file, _, test = ELSEWHERE[name].partition("::")
    source = (HERE / file).read_text()
    assert f"def {test}(" in source if test else name.rpartition(".")[2] in source


@pytest.mark.parametrize("name", SIZED)
async def test_at_a_bound_a_request_passes_and_past_it_the_bound_is_named(name: str) -> None:
    bound = SIZED[name]
    random.seed(SEED)
    sizes = [bound.limit - 1, bound.limit, bound.limit + 1, *(bound.limit * factor for factor in WILD)]
    sizes += [bound.limit + random.randint(-bound.limit // 4, bound.limit) for _ in range(8)]
    bench = Bench(settings=settings_with(name.partition(",")[0], bound.limit))
    async with bench.serving() as server, raw_client(server) as neighbour:
        for size in sizes:
            async with raw_client(server) as client:
                bound.send(client, size)
                head = await client.read_until(b"\r\n\r\n")
                error = json.loads(await client.read_until(b'"}}'))["error"]
            status = int(head.split(b" ")[1])
            if size <= bound.limit:
                assert (size, status, error["code"]) == (size, 404, "model_not_found")
            else:
                assert (size, status, error["code"]) == (size, bound.status, bound.code)
                assert f"({name.partition(',')[0]})" in error["message"]
            neighbour.post(chat_body(model=NOBODY))
            await neighbour.read_until(b"model_not_found")
            await neighbour.read_until(b"}}")
        await until(lambda: len(server.server_state.connections) == 1, what="only the neighbour is left")
    assert (bench.exchanges.admitted, bench.exchanges.held_bytes, bench.publications) == (0, 0, [])


def settings_with(name: str, value: int) -> GatewaySettings:
    """Usual settings but for one bound; refused connections are not kept for long."""
    if name.startswith("limits."):
        return GatewaySettings(linger_s=0.2, limits=Limits(**{name.removeprefix("limits."): value}))
    changed: dict[str, Any] = {name: value}
    return dataclasses.replace(GatewaySettings(linger_s=0.2), **changed)
