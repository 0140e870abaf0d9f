from __future__ import annotations

import click
import pytest
from msgspec.structs import replace

from gateway.settings import GatewaySettings
from schemas.bands import BATCH, DEFAULT_BANDS, STANDARD, BandPolicy, bands_named, parse_bands
from tools.cli.settings import member_settings, with_overrides
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
    assert (changed.bands[BATCH].queue_timeout_s, changed.bands[BATCH].preemptible) == (5.0, False)
    assert changed.bands[STANDARD] == GATEWAY.bands[STANDARD]


def test_a_set_is_given_with_commas() -> None:
    assert with_overrides(GATEWAY, ["bands_open=standard, batch"]).bands_open == frozenset({STANDARD, BATCH})


def test_bands_are_named_anew_as_a_whole_and_then_set_one_by_one() -> None:
    changed = with_overrides(GATEWAY, ["bands=urgent, batch", "bands.batch.slot_share=0.5", "default_band=urgent"])
    assert changed.bands == {"urgent": BandPolicy(), "batch": replace(DEFAULT_BANDS[BATCH], slot_share=0.5)}
    assert tuple(changed.bands) == ("urgent", "batch")
    assert changed.default_band == "urgent"


@pytest.mark.parametrize("text, value", [("on", True), ("off", False), ("On", True), ("true", True), ("false", False)])
def test_a_switch_is_on_or_off(text: str, value: bool) -> None:
    usual = GatewaySettings(reuse_port=not value)
    assert with_overrides(usual, [f"reuse_port={text}"]).reuse_port is value


def test_none_takes_a_setting_back() -> None:
    given = ["bands.batch.queued_jobs_max=7", "bands_open=batch", "default_band=batch"]
    changed = with_overrides(GATEWAY, given)
    assert (changed.bands[BATCH].queued_jobs_max, changed.default_band) == (7, BATCH)
    assert changed.bands_open == frozenset({BATCH})
    assert with_overrides(changed, [f"{each.partition('=')[0]}=none" for each in given]) == GATEWAY


def test_a_member_has_the_bands_of_its_mesh_and_perhaps_fewer() -> None:
    names = parse_bands("urgent,normal,bulk")
    assert member_settings(GATEWAY, [], bands=names).bands == bands_named(names)
    fewer = member_settings(WorkerSettings(), ["bands=bulk", "bands.bulk.preemptible=true"], bands=names)
    assert fewer.bands == {"bulk": BandPolicy(preemptible=True)}
    with pytest.raises(
        click.UsageError, match="--set bands: there is no band 'batch' in this mesh, which has urgent, "
    ):
        member_settings(WorkerSettings(), ["bands=urgent,batch"], bands=names)


@pytest.mark.parametrize(
    "override, words",
    [
        ("body_bytes_max", "NAME=VALUE"),
        ("body_byte_max=1", "did you mean body_bytes_max?"),
        ("=1", "there is no such setting; there are host, port, admin_host, "),
        ("host.name=1", "holds no other settings"),
        ("queue=1", "queued_jobs_max"),
        ("queue.nothing=1", "no such setting"),
        ("bands.urgent.floor=1", "no such setting"),
        ("body_bytes_max=many", "Expected `int`, got `str`"),
        ("reuse_port=maybe", "write on or off (or true, false), not 'maybe'"),
        ("bands.batch.slot_share=2", "<= 1"),
        ("bands.batch.queued_jobs_max=0", ">= 1"),
        ("bands=", "band name ''"),
        ("bands=high,high", "'high' is named twice"),
        ("bands=High", "band name 'High' is not valid"),
        ("default_band=urgent", "default_band names 'urgent', which is none of the bands interactive, standard, batch"),
        ("bands_open=urgent", "bands_open names 'urgent', which is none of the bands interactive, standard, batch"),
        ("stall_after_s=1", "silence_after_s + resend_timeout_s <= stall_after_s"),
    ],
)
def test_what_does_not_fit_is_said_with_the_settings_name(override: str, words: str) -> None:
    message = refusal(override)
    assert words in message
    assert message.startswith(f"--set {override.partition('=')[0]}" if "=" in override else "--set takes")


def test_a_workers_settings_are_set_in_the_same_way() -> None:
    assert with_overrides(WorkerSettings(), ["drain_limit_s=1"]).drain_limit_s == 1.0


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "-inf", "1e999"])
@pytest.mark.parametrize("name", ["keep_alive_s", "limits.stop_bytes_max", "open_requests_max", "bands.batch.floor"])
def test_no_setting_is_negative_or_without_end(name: str, value: str) -> None:
    assert refusal(f"{name}={value}").startswith(f"--set {name}: ")


@pytest.mark.parametrize(
    "override",
    ["sweep_interval_s=0", "topology_interval_s=0", "audit_every_s=0", "queue.queued_jobs_max=0", "queue.ack_wait_s=0"],
)
def test_what_cannot_be_nothing_is_refused_as_such(override: str) -> None:
    assert refusal(override).startswith(f"--set {override.partition('=')[0]}: Expected ")


def test_a_port_is_one() -> None:
    assert with_overrides(GATEWAY, ["port=0", "admin_port=65535"]).admin_port == 65_535
    assert "65535" in refusal("port=70000")


@pytest.mark.parametrize("name", ["beat_interval_s", "alive_interval_s", "pull_expires_s", "pull_batch_max"])
def test_a_worker_does_not_turn_without_a_pause(name: str) -> None:
    with pytest.raises(click.UsageError, match=f"--set {name}: Expected "):
        with_overrides(WorkerSettings(), [f"{name}=0"])


def test_what_may_be_nothing_may_be_nothing() -> None:
    assert with_overrides(GATEWAY, ["drain_delay_s=0", "linger_s=0"]).drain_delay_s == 0
    assert with_overrides(WorkerSettings(), ["hold_max_s=0", "load_retry_s=0"]).hold_max_s == 0


def test_an_option_and_a_setting_may_say_the_same_but_not_different_things() -> None:
    options = {"port": "--port"}
    given = GatewaySettings(port=9000)
    assert with_overrides(given, ["port=9000"], options=options) == given
    assert with_overrides(given, ["admin_port=9001"], options=options).admin_port == 9001
    with pytest.raises(click.UsageError, match=r"^--set gateway\.port: --port says otherwise$"):
        with_overrides(given, ["port=9001"], part="gateway", options=options)
