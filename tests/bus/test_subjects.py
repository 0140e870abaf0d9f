from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bus import subjects
from bus.subjects import JobAddress, decode_model, encode_model, parse_job
from schemas.bands import BATCH, Band
from schemas.job import Lane
from schemas.names import MODEL_ID_BYTES_MAX, InvalidName

HOSTILE = ["llama3:8b", "org/name.v1", "a b", "x.>", "*", ">", "$JS.API", "..", "=41", "a=", "~", "modèle-🙂", "日本語"]
ONE_TOKEN = re.compile(r"[A-Za-z0-9_=-]+")
SERVER_NAME_BYTES_MAX = 255


def is_model_id(text: str) -> bool:
    return text.isprintable() and 1 <= len(text.encode()) <= MODEL_ID_BYTES_MAX


model_ids = st.text(st.characters(codec="utf-8"), min_size=1, max_size=128).filter(is_model_id)
bands = st.from_regex(r"[a-z0-9][a-z0-9-]{0,31}", fullmatch=True).map(Band)
addresses = st.builds(JobAddress, model_ids, bands, st.sampled_from(Lane))


@pytest.mark.parametrize("model", HOSTILE)
def test_a_hostile_id_becomes_one_harmless_token_and_comes_back(model: str) -> None:
    token = encode_model(model)
    assert ONE_TOKEN.fullmatch(token)
    assert decode_model(token) == model


@given(model_ids)
def test_any_printable_id_becomes_one_token_and_comes_back(model: str) -> None:
    token = encode_model(model)
    assert ONE_TOKEN.fullmatch(token)
    assert decode_model(token) == model


@given(st.text(max_size=200))
@example("\ud800")
@example("a\r\nPUB x")
def test_text_either_encodes_reversibly_or_is_refused(text: str) -> None:
    try:
        token = encode_model(text)
    except InvalidName:
        return
    assert decode_model(token) == text


@given(st.text(max_size=50))
@example("=41")
@example("=e2=82=ac")
@example("=FF")
@example("a.b")
@example("")
def test_no_two_tokens_decode_to_one_id(token: str) -> None:
    try:
        model = decode_model(token)
    except ValueError:
        return
    assert encode_model(model) == token


@given(addresses, addresses)
def test_no_two_addresses_share_a_subject_or_a_durable(one: JobAddress, other: JobAddress) -> None:
    same = one == other
    assert (subjects.job(one) == subjects.job(other)) == same
    same_consumer = same or (one.model, one.lane) == (other.model, other.lane)
    assert (subjects.durable(one) == subjects.durable(other)) == same_consumer


@given(addresses)
def test_a_job_subject_names_its_address_and_nothing_else_does(address: JobAddress) -> None:
    subject = subjects.job(address)
    assert parse_job(subject) == address
    for altered in (f"{subject}.x", f"x.{subject}", subject.replace(".job.", ".lane."), subject.rpartition(".")[0]):
        assert parse_job(altered) is None


@pytest.mark.parametrize(
    "subject",
    [
        "",
        "mesh.job.a.interactive",
        "mesh.job.a=4z.batch.any",
        "mesh.job.*.batch.any",
        "mesh.job.a.Batch.any",
        "mesh.job.a.*.any",
    ],
)
def test_other_subjects_are_no_job(subject: str) -> None:
    assert parse_job(subject) is None


@pytest.mark.parametrize("text", ["", "*", ">", "a.b", "Batch", "a b", "a\r\nPUB x", "x" * 33])
def test_what_is_no_band_enters_no_subject(text: str) -> None:
    band = Band(text)
    for make in (subjects.jobs_stream, subjects.jobs_of, lambda band: subjects.job(JobAddress("m", band, Lane.ANY))):
        with pytest.raises(InvalidName, match="band name"):
            make(band)


@given(addresses)
@example(JobAddress("é" * 64, BATCH, Lane.RESUME))
@example(JobAddress("x" * 128, BATCH, Lane.RESUME))
def test_durables_are_names_that_the_server_takes(address: JobAddress) -> None:
    name = subjects.durable(address)
    assert len(name.encode()) <= SERVER_NAME_BYTES_MAX
    assert not set(name) & set(" .*>/\\\t\r\n")


@pytest.mark.parametrize(
    "model, reason", [("x" * 129, "128 bytes"), ("é" * 65, "130"), ("", "1 to"), ("a\nb", "unprintable")]
)
def test_ids_out_of_bounds_are_refused_with_the_reason(model: str, reason: str) -> None:
    with pytest.raises(InvalidName, match=reason):
        encode_model(model)


@pytest.mark.parametrize("name", ["any", "resume", "", "A", "a.b", "a*", ">", "-a", "a" * 64, "w1\n"])
def test_no_subject_is_made_of_an_invalid_member_name(name: str) -> None:
    for make in (subjects.orders, subjects.worker_beat, subjects.gateway_beat):
        with pytest.raises(InvalidName):
            make(name)
    for make_two in (subjects.claim, subjects.reply):
        with pytest.raises(InvalidName):
            make_two(name, "w1")
        with pytest.raises(InvalidName):
            make_two("g1", name)


@pytest.mark.parametrize(
    "subject, sender",
    [
        ("mesh.claim.g1.w1", "w1"),
        ("mesh.claim.g1", None),
        ("mesh.claim.g2.w1", None),
        ("mesh.claim.g1.x.w1", None),
        ("mesh.claim.g1.", None),
        ("mesh.job.m.batch.any", None),
    ],
)
def test_a_sender_is_believed_only_under_the_expected_prefix(subject: str, sender: str | None) -> None:
    assert subjects.sender(subject, "mesh.claim.g1") == sender
