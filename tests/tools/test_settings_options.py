from __future__ import annotations

import click
import pytest

from gateway.settings import GatewaySettings
from schemas.job import Band
from tools.cli.settings import check_parts, for_part, with_overrides
from worker.settings import WorkerSettings

GATEWAY = GatewaySettings()


def refusal(*overrides: str) -> str:
    with pytest.raises(click.UsageError) as caught:
        with_overrides(GATEWAY, overrides)
    return caught.value.message


def test_nothing_given_changes_nothing() -> None:
    assert with_overrides(GATEWAY, []) == GATEWAY


def test_plain_values_take_the_type_of_their_setting() -> None:
    changed = with_overrides(GATEWAY, ["body_bytes_max=1000", "keep_alive_s=2.5", "host=::1", "keep_alive_s = 3"])
    assert (changed.body_bytes_max, changed.keep_alive_s, changed.host) == (1000, 3.0, "::1")
    assert GATEWAY.body_bytes_max != 1000


def test_dots_lead_into_what_a_setting_holds() -> None:
    changed = with_overrides(
        GATEWAY,
        ["queue.queued_jobs_max=2", "bands.batch.queue_timeout_s=5", "bands.batch.preemptible=false"],
    )
    assert changed.queue.queued_jobs_max == 2
    assert (changed.bands[Band.BATCH].queue_timeout_s, changed.bands[Band.BATCH].preemptible) == (5.0, False)
    assert changed.bands[Band.STANDARD] == GATEWAY.bands[Band.STANDARD]


def test_a_set_is_given_with_commas() -> None:
    assert with_overrides(GATEWAY, ["bands_open=standard, batch"]).bands_open == {Band.STANDARD, Band.BATCH}


@pytest.mark.parametrize(
    "override, words",
    [
        ("body_bytes_max", "NAME=VALUE"),
        ("body_byte_max=1", "did you mean body_bytes_max?"),
        ("=1", "no such setting"),
        ("host.name=1", "holds no other settings"),
        ("queue=1", "queued_jobs_max"),
        ("queue.nothing=1", "no such setting"),
        ("bands.urgent.floor=1", "no such setting"),
        ("body_bytes_max=many", "Expected `int`, got `str`"),
        ("bands.batch.slot_share=2", "<= 1"),
        ("bands_open=urgent", "Invalid enum value"),
        ("stall_after_s=1", "silence_after_s + resend_timeout_s <= stall_after_s"),
    ],
)
def test_what_does_not_fit_is_said_with_the_settings_name(override: str, words: str) -> None:
    message = refusal(override)
    assert words in message
    assert message.startswith(f"--set {override.partition('=')[0]}" if "=" in override else "--set takes")


def test_a_workers_settings_are_set_in_the_same_way() -> None:
    assert with_overrides(WorkerSettings(), ["drain_limit_s=1"]).drain_limit_s == 1.0


def test_up_hands_each_part_its_own() -> None:
    given = ("gateway.keep_alive_s=1", "worker.drain_limit_s=2", "gateway.queue.queued_jobs_max=3")
    check_parts(given, ("gateway", "worker"))
    assert for_part(given, "gateway") == ["--set", "keep_alive_s=1", "--set", "queue.queued_jobs_max=3"]
    assert for_part(given, "worker") == ["--set", "drain_limit_s=2"]


@pytest.mark.parametrize("override", ["keep_alive_s=1", "bus.port=1", ""])
def test_up_says_whose_settings_it_takes(override: str) -> None:
    with pytest.raises(click.UsageError, match=r"gateway\.NAME=VALUE or worker\.NAME=VALUE"):
        check_parts([override], ("gateway", "worker"))
