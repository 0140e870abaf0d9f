"""Every setting of a worker and of the engines that it owns: which test meets its bound, or why none can.

Each is named once. A setting that is not in the table fails the first test, and so does a test that does not exist.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from worker.engines.openai.settings import OpenAISettings
from worker.engines.sim import SimSettings
from worker.settings import WorkerSettings

HERE = Path(__file__).parent

ADAPTER = "engines/test_openai_adapter.py"
SERVER_BOUND = f"{ADAPTER}::test_a_bound_that_a_server_meets_is_a_setting_that_its_error_names"
SERVER_UNUSABLE = f"{ADAPTER}::test_a_server_that_cannot_be_used_is_told_in_one_line"

MET = {
    WorkerSettings: {
        "pull_answer_s": "test_intake.py::test_questions_without_an_answer_do_not_stop_the_pulling",
        "hold_max_s": "test_intake.py::test_a_slow_replica_leaves_a_job_to_a_faster_one_for_a_while",
        "retained_for_s": "test_claims.py::test_a_claim_is_found_by_key_while_it_runs_and_by_handle_for_a_while_longer",
        "retained_bytes_max": "test_claims.py::test_the_oldest_go_first_when_there_are_too_many_frames",
        "step_backlog_max": "test_frame_writer.py::test_the_backlog_is_bounded_and_what_it_drops_can_be_sent_again",
        "engine_load_timeout_s": ("engines/test_host.py::test_an_engine_that_is_not_ready_in_time_is_a_load_failure"),
        "engine_backlog_bytes_max": (
            "engines/test_host.py::test_a_backlog_beyond_its_limit_refuses_submits_and_not_aborts"
        ),
        "load_retry_s_max": "test_service.py::test_a_model_that_does_not_load_leaves_the_worker_up_and_is_tried_again",
        "engine_restarts_max": "test_replica.py::test_the_third_crash_in_a_minute_is_the_last",
        "engine_restart_window_s": "test_replica.py::test_crashes_of_long_ago_do_not_count",
        "engine_step_limit_s": "test_watchdog.py::test_no_step_while_requests_run_is_a_hang",
        "engine_growth_bytes_max": "test_replica.py::test_an_engine_may_grow_by_what_it_said_and_the_setting_more",
        "engine_memory_bytes_max": "test_replica.py::test_an_engine_that_swells_is_killed",
        "drain_limit_s": "test_service.py::test_jobs_that_outlast_the_drain_are_handed_back",
        "engine_close_s": "test_replica.py::test_close_ends_an_engine_that_does_not_react",
        "engine_terminate_s": "engines/test_host.py::test_close_ends_a_process_that_does_not_listen",
    },
    SimSettings: {
        "waiting_max": "engines/test_sim.py::test_more_waiting_requests_than_the_limit_are_refused",
        "context": "engines/test_sim.py::test_completion_ends_where_the_context_does",
    },
    OpenAISettings: {
        "waiting_max": f"{ADAPTER}::test_more_requests_than_anybody_counts_are_refused",
        "ready_within_s": SERVER_UNUSABLE,
        "predecessor_gone_s": SERVER_UNUSABLE,
        "answer_timeout_s": SERVER_UNUSABLE,
        "models_bytes_max": SERVER_UNUSABLE,
        "command_end_s": (
            "engines/test_openai_command.py::test_a_server_that_does_not_end_by_itself_is_killed_after_its_time"
        ),
        "first_token_timeout_s": f"{ADAPTER}::test_a_server_that_only_keeps_the_connection_alive_is_given_up",
        "token_timeout_s": f"{ADAPTER}::test_a_server_that_only_keeps_the_connection_alive_is_given_up",
        "busy_retries_max": f"{ADAPTER}::test_a_busy_server_is_asked_again_and_not_for_ever",
        "busy_wait_max_s": f"{ADAPTER}::test_a_busy_server_is_asked_again_and_not_for_ever",
        "lost_after_s": f"{ADAPTER}::test_a_server_that_answers_nothing_for_long_is_gone",
        "event_bytes_max": SERVER_BOUND,
        "vectors_bytes_max": SERVER_BOUND,
        "pieces_per_token_max": SERVER_BOUND,
        "token_chars_max": SERVER_BOUND,
    },
}

NOT_MET = {
    WorkerSettings: {
        "what each band is granted": "bands preempt_after_s",
        "its own rhythm": """
            pull_expires_s pull_batch_max pull_grace_s pull_retry_s hold_look_s beat_interval_s record_interval_s
            alive_interval_s load_retry_s engine_restart_delay_s engine_look_interval_s
        """,
        "what it expects of gateways and engines": """
            gateway_lost_after_s claim_timeout_s reconnect_grace_s engine_still_s
        """,
        "how it gives jobs back": "shunned_pause_s nak_free_deliveries nak_delay_s suspect_delay_s",
        "how it ends": "flush_limit_s",
    },
    SimSettings: {
        "the machine": "slots step_ms prefill_tokens_per_s contention crash_seed",
    },
    OpenAISettings: {
        "which server": """
            url upstream_model api_key_file command slots context metric_running metric_waiting metric_kv_usage
        """,
        "its own rhythm": "load_interval_s",
        "a network is needed that drops packets": "connect_timeout_s",
    },
}


def fields_of(settings: Any) -> list[str]:
    if issubclass(settings, msgspec.Struct):
        return [field.name for field in msgspec.structs.fields(settings)]
    return [field.name for field in dataclasses.fields(settings)]


@pytest.mark.parametrize("settings", MET)
def test_every_setting_is_in_the_table_once(settings: type) -> None:
    named = [*MET[settings], *" ".join(NOT_MET[settings].values()).split()]
    assert sorted(named) == sorted(fields_of(settings))


@pytest.mark.parametrize("test", sorted({test for tests in MET.values() for test in tests.values()}))
def test_what_meets_a_bound_exists(test: str) -> None:
    file, _, name = test.partition("::")
    assert f"def {name}(" in (HERE / file).read_text()
