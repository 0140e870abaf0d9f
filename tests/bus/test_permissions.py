"""What each role may and may not do, asked of a real server.

The expected lists are written out on purpose: a change of rights has to be made twice, here and in the code.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import msgspec
import pytest

from bus.credentials import write_secret
from bus.identity import DEFAULT_USERS, sign_user
from bus.permissions import ResponseRight, Role, rights_of
from bus.topology import bucket_config
from schemas.bands import Band
from tests.support.nats import ANSWER_WITHIN_S, Mesh, Peer, connect

JOB = "mesh.job.m.interactive.any"
STREAM = "JOBS-interactive"
DURABLE = "m-interactive-any"
NAMES = {**DEFAULT_USERS, Role.CONTROLLER: "c1"}

INSPECT = """
    $JS.API.INFO $JS.API.STREAM.INFO.* $JS.API.STREAM.NAMES $JS.API.STREAM.LIST
    $JS.API.CONSUMER.INFO.*.* $JS.API.CONSUMER.LIST.* $JS.API.CONSUMER.NAMES.*
    $JS.API.DIRECT.GET.KV_mesh-workers.> $JS.API.DIRECT.GET.KV_mesh-gateways.> $JS.API.DIRECT.GET.KV_mesh-models.>
    $JS.API.DIRECT.GET.EVENTS
    $SRV.PING $SRV.PING.> $SRV.INFO $SRV.INFO.> $SRV.STATS $SRV.STATS.>
"""

PUBLISH = {
    Role.WORKER: """
        mesh.claim.*.{{name()}} mesh.reply.*.{{name()}} mesh.beat.worker.{{name()}} mesh.name.worker.{{name()}}
        mesh.event.{{name()}}.> $KV.mesh-workers.{{name()}}
        $JS.API.CONSUMER.MSG.NEXT.JOBS-interactive.* $JS.API.CONSUMER.MSG.NEXT.JOBS-standard.*
        $JS.API.CONSUMER.MSG.NEXT.JOBS-batch.*
        $JS.API.CONSUMER.MSG.NEXT.LANE-interactive.{{name()}} $JS.API.CONSUMER.MSG.NEXT.LANE-standard.{{name()}}
        $JS.API.CONSUMER.MSG.NEXT.LANE-batch.{{name()}}
        $JS.API.DIRECT.GET.KV_mesh-models.$KV.mesh-models.>
        $JS.API.DIRECT.GET.OBJ_mesh-blobs $JS.API.DIRECT.GET.OBJ_mesh-blobs.>
    """,
    Role.GATEWAY: """
        mesh.job.> mesh.lane.> mesh.cancel.* mesh.beat.gateway.{{name()}} mesh.name.gateway.{{name()}}
        mesh.event.{{name()}}.> $KV.mesh-gateways.{{name()}}
        $JS.API.INFO $JS.API.STREAM.INFO.* $JS.API.CONSUMER.INFO.*.*
        $JS.API.STREAM.CREATE.JOBS-interactive $JS.API.STREAM.CREATE.JOBS-standard $JS.API.STREAM.CREATE.JOBS-batch
        $JS.API.STREAM.CREATE.LANE-interactive $JS.API.STREAM.CREATE.LANE-standard $JS.API.STREAM.CREATE.LANE-batch
        $JS.API.STREAM.CREATE.KV_mesh-workers $JS.API.STREAM.CREATE.KV_mesh-gateways
        $JS.API.CONSUMER.CREATE.JOBS-interactive.*.mesh.job.*.*.*
        $JS.API.CONSUMER.CREATE.JOBS-standard.*.mesh.job.*.*.*
        $JS.API.CONSUMER.CREATE.JOBS-batch.*.mesh.job.*.*.*
        $JS.API.CONSUMER.CREATE.LANE-interactive.*.mesh.lane.*.*.*
        $JS.API.CONSUMER.CREATE.LANE-standard.*.mesh.lane.*.*.*
        $JS.API.CONSUMER.CREATE.LANE-batch.*.mesh.lane.*.*.*
        $JS.API.STREAM.MSG.DELETE.JOBS-interactive $JS.API.STREAM.MSG.DELETE.JOBS-standard
        $JS.API.STREAM.MSG.DELETE.JOBS-batch
        $JS.API.STREAM.MSG.DELETE.LANE-interactive $JS.API.STREAM.MSG.DELETE.LANE-standard
        $JS.API.STREAM.MSG.DELETE.LANE-batch
        $JS.API.DIRECT.GET.JOBS-interactive $JS.API.DIRECT.GET.JOBS-standard $JS.API.DIRECT.GET.JOBS-batch
        $JS.API.DIRECT.GET.LANE-interactive $JS.API.DIRECT.GET.LANE-standard $JS.API.DIRECT.GET.LANE-batch
        $JS.API.DIRECT.GET.KV_mesh-models.> $JS.API.DIRECT.GET.KV_mesh-workers.>
        $JS.API.CONSUMER.CREATE.KV_mesh-models.> $JS.API.CONSUMER.DELETE.KV_mesh-models.*
        $JS.FC.>
    """,
    Role.OBSERVER: INSPECT,
    Role.OPERATOR: f"""
        {INSPECT}
        mesh.ctl.*.*.{{{{name()}}}} $KV.mesh-models.> $O.mesh-blobs.>
        $JS.API.STREAM.CREATE.* $JS.API.STREAM.UPDATE.* $JS.API.STREAM.PURGE.*
        $JS.API.CONSUMER.CREATE.KV_mesh-models.> $JS.API.CONSUMER.CREATE.OBJ_mesh-blobs.>
        $JS.API.STREAM.MSG.GET.KV_mesh-models $JS.API.STREAM.MSG.GET.OBJ_mesh-blobs
        $JS.API.DIRECT.GET.OBJ_mesh-blobs.>
        $JS.FC.>
    """,
    Role.CONTROLLER: """
        mesh.ctl.*.*.{{name()}} $KV.mesh-lease.> $JS.API.INFO $JS.API.STREAM.INFO.*
        $JS.API.DIRECT.GET.KV_mesh-models.> $JS.API.DIRECT.GET.KV_mesh-workers.> $JS.API.DIRECT.GET.KV_mesh-lease.>
        $JS.API.CONSUMER.CREATE.KV_mesh-models.> $JS.API.CONSUMER.DELETE.KV_mesh-models.*
        $JS.FC.>
    """,
}

SUBSCRIBE = {
    Role.WORKER: """
        _IB.{{name()}}.> mesh.ctl.{{name()}}.*.* mesh.cancel.{{name()}} mesh.beat.gateway.*
        mesh.beat.worker.{{name()}} mesh.name.worker.{{name()}}
        $SRV.PING $SRV.INFO $SRV.STATS $SRV.*.infermesh-worker $SRV.*.infermesh-worker.{{name()}}
    """,
    Role.GATEWAY: """
        _IB.{{name()}}.> mesh.claim.{{name()}}.* mesh.reply.{{name()}}.* mesh.beat.worker.*
        mesh.beat.gateway.{{name()}} mesh.name.gateway.{{name()}} mesh.event.> mesh.sys.disconnect $SRV.>
    """,
    Role.OBSERVER: "_INBOX.{{name()}}.> mesh.event.>",
    Role.OPERATOR: "_INBOX.{{name()}}.> mesh.event.>",
    Role.CONTROLLER: "_IB.{{name()}}.> mesh.beat.*.* mesh.event.>",
}

RESPOND = {
    Role.WORKER: ResponseRight(messages_max=2, window_s=30),
    Role.GATEWAY: ResponseRight(messages_max=1, window_s=5),
}

ANYTHING_OF_JETSTREAM_THAT_HARMS = """
    $JS.API.STREAM.DELETE.JOBS-interactive $JS.API.STREAM.DELETE.KV_mesh-models $JS.API.STREAM.DELETE.EVENTS
    $JS.API.CONSUMER.DELETE.JOBS-interactive.m-interactive-any $JS.API.STREAM.SNAPSHOT.JOBS-interactive
    $JS.API.STREAM.RESTORE.JOBS-interactive $JS.API.CONSUMER.PAUSE.JOBS-interactive.m-interactive-any
    $JS.API.ACCOUNT.PURGE.A $JS.API.STREAM.MSG.GET.JOBS-interactive $JS.API.STREAM.MSG.GET.JOBS-batch
    $JS.ACK.JOBS-interactive.m-interactive-any.1.1.1.1.0 $SYS.REQ.SERVER.PING $SYS.REQ.CLAIMS.UPDATE
    mesh.sys.disconnect mesh.unknown
"""

PUBLISH_REFUSED = {
    Role.WORKER: f"""
        {ANYTHING_OF_JETSTREAM_THAT_HARMS}
        mesh.claim.g1.w2 mesh.claim.g1.any mesh.reply.g1.w2 mesh.reply.g1.w1.x mesh.beat.worker.w2 mesh.beat.gateway.g1
        mesh.name.worker.w2 mesh.name.gateway.g1 mesh.name.gateway.w1
        mesh.event.w2.state mesh.event.g1.state $KV.mesh-workers.w2 $KV.mesh-gateways.g1 $KV.mesh-models.m
        $KV.mesh-lease.controller $O.mesh-blobs.C.x
        mesh.job.m.interactive.any mesh.job.m.batch.resume mesh.lane.w1.interactive.m mesh.lane.w2.interactive.m
        mesh.cancel.w1 mesh.cancel.w2 mesh.ctl.w1.load.w1 mesh.ctl.w2.unload.w1 mesh.ctl.w2.unload.operator
        $JS.API.CONSUMER.MSG.NEXT.LANE-interactive.w2 $JS.API.CONSUMER.MSG.NEXT.KV_mesh-models.x
        $JS.API.CONSUMER.MSG.NEXT.EVENTS.x
        $JS.API.CONSUMER.CREATE.JOBS-interactive $JS.API.CONSUMER.CREATE.JOBS-interactive.mine
        $JS.API.CONSUMER.CREATE.JOBS-interactive.mine.mesh.job.m.interactive.any
        $JS.API.CONSUMER.DURABLE.CREATE.JOBS-interactive.mine
        $JS.API.STREAM.CREATE.JOBS-interactive $JS.API.STREAM.CREATE.mine $JS.API.STREAM.UPDATE.JOBS-interactive
        $JS.API.STREAM.PURGE.JOBS-interactive $JS.API.STREAM.MSG.DELETE.JOBS-interactive
        $JS.API.STREAM.INFO.JOBS-interactive $JS.API.DIRECT.GET.JOBS-interactive
        $JS.API.DIRECT.GET.JOBS-interactive.mesh.job.m.interactive.any
        $JS.ACK.> $JS.ACK.x _IB.g1.x _IB.w2.x _INBOX.operator.x
    """,
    Role.GATEWAY: f"""
        {ANYTHING_OF_JETSTREAM_THAT_HARMS}
        mesh.ctl.w1.load.g1 mesh.ctl.w1.load.operator mesh.claim.g1.w1 mesh.reply.g1.w1 mesh.reply.g2.w1
        mesh.beat.gateway.g2 mesh.beat.worker.w1 mesh.beat.worker.g1 mesh.name.gateway.g2 mesh.name.worker.w1
        mesh.event.g2.state mesh.event.w1.state $KV.mesh-gateways.g2
        $KV.mesh-workers.w1 $KV.mesh-models.m $KV.mesh-lease.controller $O.mesh-blobs.C.x
        $JS.API.STREAM.UPDATE.JOBS-interactive $JS.API.STREAM.UPDATE.KV_mesh-workers
        $JS.API.STREAM.PURGE.JOBS-interactive $JS.API.STREAM.CREATE.EVENTS $JS.API.STREAM.CREATE.KV_mesh-models
        $JS.API.STREAM.CREATE.mine $JS.API.STREAM.MSG.DELETE.KV_mesh-models $JS.API.STREAM.MSG.DELETE.EVENTS
        $JS.API.CONSUMER.CREATE.JOBS-interactive $JS.API.CONSUMER.CREATE.JOBS-interactive.mine
        $JS.API.CONSUMER.CREATE.JOBS-interactive.mine.mesh.>
        $JS.API.CONSUMER.DURABLE.CREATE.JOBS-interactive.mine
        $JS.API.CONSUMER.MSG.NEXT.JOBS-interactive.m-interactive-any $JS.API.CONSUMER.MSG.NEXT.LANE-interactive.w1
        $JS.API.DIRECT.GET.OBJ_mesh-blobs.$O.mesh-blobs.C.x _IB.w1.x _IB.g2.x
    """,
    Role.OBSERVER: f"""
        {ANYTHING_OF_JETSTREAM_THAT_HARMS}
        mesh.job.m.interactive.any mesh.lane.w1.interactive.m mesh.claim.g1.w1 mesh.reply.g1.w1 mesh.cancel.w1
        mesh.beat.worker.observer mesh.beat.gateway.observer mesh.event.observer.note mesh.ctl.w1.status.observer
        mesh.ctl.w1.status.operator mesh.observer
        $KV.mesh-workers.observer $KV.mesh-models.m $KV.mesh-gateways.g1 $O.mesh-blobs.C.x
        $JS.API.DIRECT.GET.JOBS-interactive $JS.API.DIRECT.GET.JOBS-interactive.mesh.job.m.interactive.any
        $JS.API.DIRECT.GET.LANE-batch $JS.API.CONSUMER.MSG.NEXT.JOBS-interactive.m-interactive-any
        $JS.API.CONSUMER.CREATE.JOBS-interactive.mine.mesh.job.m.interactive.any
        $JS.API.CONSUMER.CREATE.EVENTS.mine $JS.API.STREAM.CREATE.mine $JS.API.STREAM.UPDATE.JOBS-interactive
        $JS.API.STREAM.PURGE.JOBS-interactive $JS.API.STREAM.MSG.DELETE.JOBS-interactive
        _IB.w1.x _INBOX.operator.x _INBOX.observer.x
    """,
    Role.OPERATOR: f"""
        {ANYTHING_OF_JETSTREAM_THAT_HARMS}
        mesh.ctl.w1.load.other mesh.ctl.w1.load.c1 mesh.ctl.w1.load.operator.x
        mesh.job.m.interactive.any mesh.lane.w1.interactive.m mesh.claim.g1.w1 mesh.reply.g1.w1 mesh.cancel.w1
        mesh.beat.worker.operator mesh.event.operator.note $KV.mesh-workers.w1 $KV.mesh-lease.controller
        $JS.API.DIRECT.GET.JOBS-interactive $JS.API.DIRECT.GET.JOBS-interactive.mesh.job.m.interactive.any
        $JS.API.CONSUMER.MSG.NEXT.JOBS-interactive.m-interactive-any
        $JS.API.CONSUMER.CREATE.JOBS-interactive.mine.mesh.job.m.interactive.any
        $JS.API.CONSUMER.DURABLE.CREATE.JOBS-interactive.mine $JS.API.STREAM.MSG.DELETE.JOBS-interactive
        _IB.w1.x _INBOX.other.x
    """,
    Role.CONTROLLER: f"""
        {ANYTHING_OF_JETSTREAM_THAT_HARMS}
        mesh.ctl.w1.load.operator mesh.ctl.w1.load.c2 mesh.job.m.interactive.any mesh.claim.g1.w1 mesh.reply.g1.w1
        mesh.cancel.w1 mesh.beat.worker.c1 mesh.event.c1.note $KV.mesh-models.m $KV.mesh-workers.w1
        $JS.API.STREAM.CREATE.mine $JS.API.STREAM.UPDATE.KV_mesh-lease $JS.API.STREAM.PURGE.KV_mesh-lease
        $JS.API.DIRECT.GET.JOBS-interactive $JS.API.CONSUMER.MSG.NEXT.JOBS-interactive.m-interactive-any
        _IB.w1.x _IB.c2.x
    """,
}

SUBSCRIBE_REFUSED_TO_ALL = """
    > *.> mesh.> mesh.*.*.* mesh.job.> mesh.job.m.interactive.any mesh.lane.> mesh.ctl.> mesh.cancel.> $JS.>
    $JS.API.> $JS.ACK.> $KV.> $KV.mesh-models.> $O.> $SYS.> _INBOX.> _INBOX.* _IB.> _IB.*.> _IB.other.>
"""

SUBSCRIBE_REFUSED = {
    Role.WORKER: f"""
        {SUBSCRIBE_REFUSED_TO_ALL}
        mesh.claim.> mesh.claim.*.* mesh.claim.*.w1 mesh.reply.> mesh.reply.*.* mesh.reply.*.w1 mesh.cancel.w2
        mesh.cancel.* mesh.ctl.w2.*.* mesh.ctl.*.*.* mesh.beat.worker.* mesh.beat.worker.w2 mesh.beat.*.* mesh.event.>
        mesh.event.w1.> mesh.name.> mesh.name.worker.* mesh.name.worker.w2 mesh.name.gateway.g1
        mesh.sys.disconnect _IB.w2.> _IB.g1.> _INBOX.w1.> $SRV.> $SRV.PING.infermesh-worker.w2
    """,
    Role.GATEWAY: f"""
        {SUBSCRIBE_REFUSED_TO_ALL}
        mesh.claim.*.* mesh.claim.> mesh.claim.g2.* mesh.claim.g2.w1 mesh.reply.*.* mesh.reply.> mesh.reply.g2.*
        mesh.reply.g2.w1 mesh.beat.*.* mesh.beat.gateway.* mesh.beat.gateway.g2 mesh.name.> mesh.name.gateway.*
        mesh.name.gateway.g2 mesh.name.worker.w1 mesh.ctl.w1.*.* mesh.cancel.* mesh.sys.> _IB.g2.> _IB.w1.> _INBOX.g1.>
    """,
    Role.OBSERVER: f"""
        {SUBSCRIBE_REFUSED_TO_ALL}
        mesh.claim.*.* mesh.reply.*.* mesh.cancel.w1 mesh.ctl.*.*.observer mesh.beat.*.* mesh.sys.disconnect $SRV.>
        _INBOX.operator.> _IB.observer.>
    """,
    Role.OPERATOR: f"""
        {SUBSCRIBE_REFUSED_TO_ALL}
        mesh.claim.*.* mesh.reply.*.* mesh.cancel.w1 mesh.ctl.*.*.* mesh.beat.*.* mesh.sys.disconnect $SRV.>
        _INBOX.observer.> _IB.operator.>
    """,
    Role.CONTROLLER: f"""
        {SUBSCRIBE_REFUSED_TO_ALL}
        mesh.claim.*.* mesh.reply.*.* mesh.cancel.* mesh.ctl.*.*.* mesh.sys.disconnect $SRV.> _IB.c2.> _INBOX.c1.>
    """,
}


def concrete(pattern: str, name: str) -> str:
    """A subject without wildcards that `pattern` covers for `name`."""
    subject = pattern.replace("{{name()}}", name)
    return re.sub(r"(?<=\.)\*(?=\.|$)", "x", re.sub(r">$", "x.y", subject))


@pytest.mark.parametrize("role", list(Role))
def test_rights_are_the_tested_lists(role: Role) -> None:
    rights = rights_of(role)
    assert sorted(rights.publish) == sorted(PUBLISH[role].split())
    assert sorted(rights.subscribe) == sorted(SUBSCRIBE[role].split())
    assert rights.respond == RESPOND.get(role)


@pytest.mark.parametrize("role", list(Role))
def test_rights_name_the_bands_of_the_mesh(role: Role) -> None:
    usual, other = rights_of(role), rights_of(role, bands=(Band("urgent"),))
    named = {re.sub(r"\b(JOBS|LANE)-(interactive|standard|batch)\b", r"\1-urgent", right) for right in usual.publish}
    assert set(other.publish) == named
    assert (other.subscribe, other.respond) == (usual.subscribe, usual.respond)


@pytest.mark.parametrize("role", list(Role))
async def test_role_may_do_all_that_is_listed(mesh: Mesh, role: Role) -> None:
    peer = await mesh.join(role, NAMES[role])
    for pattern in PUBLISH[role].split():
        await peer.nc.publish(concrete(pattern, peer.name))
        assert await peer.refusals() == [], pattern
    for pattern in SUBSCRIBE[role].split():
        await peer.nc.subscribe(pattern.replace("{{name()}}", peer.name))
        assert await peer.refusals() == [], pattern


@pytest.mark.parametrize("role", list(Role))
async def test_role_may_not_publish(mesh: Mesh, role: Role) -> None:
    peer = await mesh.join(role, NAMES[role])
    assert [subject for subject in PUBLISH_REFUSED[role].split() if not await peer.publish_refused(subject)] == []


@pytest.mark.parametrize("role", list(Role))
async def test_role_may_not_subscribe(mesh: Mesh, role: Role) -> None:
    peer = await mesh.join(role, NAMES[role])
    assert [subject for subject in SUBSCRIBE_REFUSED[role].split() if not await peer.subscribe_refused(subject)] == []


async def open_queue(gateway: Peer) -> None:
    """The stream and the durable that the tests pull from, made by a gateway as in a mesh."""
    stream = {
        "name": STREAM,
        "subjects": ["mesh.job.*.interactive.*"],
        "retention": "workqueue",
        "storage": "memory",
        "allow_direct": True,
    }
    assert "error" not in await gateway.request(f"$JS.API.STREAM.CREATE.{STREAM}", stream)
    config = {"durable_name": DURABLE, "filter_subject": JOB, "ack_policy": "explicit"}
    create = {"stream_name": STREAM, "config": config, "action": "create"}
    assert "error" not in await gateway.request(f"$JS.API.CONSUMER.CREATE.{STREAM}.{DURABLE}.{JOB}", create)


async def test_members_hear_that_their_record_is_kept(mesh: Mesh) -> None:
    gateway, worker = await mesh.join(Role.GATEWAY, "g1"), await mesh.join(Role.WORKER, "w1")
    for peer, bucket in ((gateway, "mesh-gateways"), (worker, "mesh-workers")):
        config = bucket_config(bucket, storage="memory", bytes_max=1024 * 1024)
        assert "error" not in await gateway.request(f"$JS.API.STREAM.CREATE.KV_{bucket}", config)
        assert await peer.request(f"$KV.{bucket}.{peer.name}", {"is": "here"}) == {"stream": f"KV_{bucket}", "seq": 1}
    assert await gateway.refusals() + await worker.refusals() == []


async def test_a_job_goes_all_the_way_from_gateway_to_worker_and_back(mesh: Mesh) -> None:
    gateway, worker = await mesh.join(Role.GATEWAY, "g1"), await mesh.join(Role.WORKER, "w1")
    await open_queue(gateway)
    claim, frame = await gateway.next_message("mesh.claim.g1.*"), await gateway.next_message("mesh.reply.g1.*")
    delivery, cancel = await worker.next_message("_IB.w1.pull"), await worker.next_message("mesh.cancel.w1")
    assert (await gateway.request(JOB, {"job": 1}))["seq"] == 1

    await worker.nc.publish(f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{DURABLE}", b'{"batch":1}', reply="_IB.w1.pull")
    job = await asyncio.wait_for(delivery, ANSWER_WITHIN_S)
    assert (job.subject, msgspec.json.decode(job.data)) == (JOB, {"job": 1})

    verdict = asyncio.ensure_future(worker.request("mesh.claim.g1.w1", "mine?"))
    await (await asyncio.wait_for(claim, ANSWER_WITHIN_S)).respond(b'"yes"')
    assert await verdict == "yes"
    await job.ack_sync()
    await worker.nc.publish("mesh.reply.g1.w1", b"frame")
    assert (await asyncio.wait_for(frame, ANSWER_WITHIN_S)).data == b"frame"
    await gateway.nc.publish("mesh.cancel.w1", b"stop")
    assert (await asyncio.wait_for(cancel, ANSWER_WITHIN_S)).data == b"stop"
    assert (await gateway.request(f"$JS.API.STREAM.INFO.{STREAM}"))["state"]["messages"] == 0
    assert await gateway.refusals() + await worker.refusals() == []


async def test_a_gateway_withdraws_a_job(mesh: Mesh) -> None:
    gateway = await mesh.join(Role.GATEWAY, "g1")
    await open_queue(gateway)
    await gateway.request(JOB, {"job": 1})
    found = await gateway.nc.request(f"$JS.API.DIRECT.GET.{STREAM}", b'{"seq":1}', timeout=ANSWER_WITHIN_S)
    assert found.data == b'{"job":1}'
    assert (await gateway.request(f"$JS.API.STREAM.MSG.DELETE.{STREAM}", {"seq": 1}))["success"]
    assert (await gateway.request(f"$JS.API.STREAM.INFO.{STREAM}"))["state"]["messages"] == 0


async def test_an_ack_is_good_for_one_delivery_and_no_more(mesh: Mesh) -> None:
    """The response right ends after two messages, and a `+NXT` on a made-up subject never begins."""
    gateway, worker = await mesh.join(Role.GATEWAY, "g1"), await mesh.join(Role.WORKER, "w1")
    await open_queue(gateway)
    delivery = await worker.next_message("_IB.w1.pull")
    await gateway.request(JOB, {"job": 1})
    await worker.nc.publish(f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{DURABLE}", b'{"batch":1}', reply="_IB.w1.pull")
    reply = (await asyncio.wait_for(delivery, ANSWER_WITHIN_S)).reply
    for _ in range(2):
        await worker.nc.publish(reply, b"+WPI")
    assert await worker.refusals() == []
    assert await worker.publish_refused(reply, b"+ACK")
    assert await worker.publish_refused(f"$JS.ACK.{STREAM}.{DURABLE}.1.1.1.1.0", b"+NXT")


async def test_operators_command_and_workers_answer(mesh: Mesh) -> None:
    operator, worker = await mesh.join(Role.OPERATOR, "ada"), await mesh.join(Role.WORKER, "w1")
    command = await worker.next_message("mesh.ctl.w1.*.*")
    answer = asyncio.ensure_future(operator.request("mesh.ctl.w1.status.ada"))
    await (await asyncio.wait_for(command, ANSWER_WITHIN_S)).respond(b'"ready"')
    assert await answer == "ready"
    assert (await command).subject == "mesh.ctl.w1.status.ada"


async def test_operators_update_streams_and_observers_see_them_without_their_prompts(mesh: Mesh) -> None:
    gateway, operator = await mesh.join(Role.GATEWAY, "g1"), await mesh.join(Role.OPERATOR, "operator")
    observer = await mesh.join(Role.OBSERVER, "observer")
    await open_queue(gateway)
    await gateway.request(JOB, {"job": 1})
    config = (await operator.request(f"$JS.API.STREAM.INFO.{STREAM}"))["config"]
    updated = await operator.request(f"$JS.API.STREAM.UPDATE.{STREAM}", {**config, "max_msgs": 5})
    assert updated["config"]["max_msgs"] == 5
    assert (await observer.request(f"$JS.API.STREAM.INFO.{STREAM}"))["state"]["messages"] == 1
    assert (await observer.request("$JS.API.STREAM.NAMES"))["streams"] == [STREAM]
    for reader in (observer, operator):
        for read in (f"$JS.API.STREAM.MSG.GET.{STREAM}", f"$JS.API.DIRECT.GET.{STREAM}"):
            assert await reader.publish_refused(read, b'{"seq":1}'), read


async def impostor(mesh: Mesh, directory: Path, role: Role, name: str) -> Peer:
    """A user whose name went around the check. Its inbox is of no matter."""
    path = directory / "impostor.creds"
    write_secret(path, sign_user(mesh.identity, role=role, name=name, expires_in_s=None, now=lambda: 1_800_000_000.0))
    return await connect(mesh.server.url, path, inbox_prefix="_IB.none")


async def test_a_worker_named_star_would_be_every_worker(mesh: Mesh, tmp_path: Path) -> None:
    star = await impostor(mesh, tmp_path, Role.WORKER, "*")
    worker = await mesh.join(Role.WORKER, "w1")
    for subject in ("mesh.claim.g1.w1", "mesh.reply.g1.w1", "mesh.beat.worker.w1", "mesh.event.w1.state"):
        await star.nc.publish(subject)
        assert await star.refusals() == [], subject
    overheard = await star.next_message("_IB.*.>")
    answers = await worker.next_message("_IB.w1.answer")
    gateway = await mesh.join(Role.GATEWAY, "g1")
    await open_queue(gateway)
    await gateway.request(JOB, {"job": 1})
    await worker.nc.publish(f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{DURABLE}", b'{"batch":1}', reply="_IB.w1.answer")
    await asyncio.wait_for(answers, ANSWER_WITHIN_S)
    assert (await asyncio.wait_for(overheard, ANSWER_WITHIN_S)).data


async def test_a_worker_named_rest_would_be_every_worker(mesh: Mesh, tmp_path: Path) -> None:
    rest = await impostor(mesh, tmp_path, Role.WORKER, ">")
    for subject in ("mesh.claim.g1.w1", "mesh.reply.g1.w1", "mesh.beat.worker.w1", "$KV.mesh-workers.w1"):
        await rest.nc.publish(subject)
        assert await rest.refusals() == [], subject
    await rest.nc.subscribe("mesh.cancel.>")
    assert await rest.refusals() == []


async def test_an_operator_named_star_would_command_in_anybodys_name(mesh: Mesh, tmp_path: Path) -> None:
    star = await impostor(mesh, tmp_path, Role.OPERATOR, "*")
    await star.nc.publish("mesh.ctl.w1.unload.operator")
    assert await star.refusals() == []


async def test_a_worker_with_a_dot_in_its_name_would_read_anothers_inbox(mesh: Mesh, tmp_path: Path) -> None:
    dotted = await impostor(mesh, tmp_path, Role.WORKER, "a.b")
    await dotted.nc.subscribe("_IB.a.b.>")
    assert await dotted.refusals() == []
    honest = await mesh.join(Role.WORKER, "a")
    await honest.nc.subscribe("_IB.a.b.c")
    assert await honest.refusals() == []


@pytest.mark.parametrize("name", ["any", "resume"])
async def test_a_worker_named_as_a_lane_would_gain_no_right_but_confuse(mesh: Mesh, tmp_path: Path, name: str) -> None:
    """These two are refused to keep lane and worker names apart; the server itself sees nothing special in them."""
    lane = await impostor(mesh, tmp_path, Role.WORKER, name)
    await lane.nc.publish(f"mesh.beat.worker.{name}")
    assert await lane.refusals() == []
    assert await lane.publish_refused("mesh.beat.worker.w1")
