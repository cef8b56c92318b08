"""Whatever anybody writes to the leader topic, short of a real heartbeat: the leader goes on."""

from __future__ import annotations

import json
import random
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Producer

from harvester.config import Config
from harvester.neli.heartbeat import VERSION
from harvester.neli.topic import ensure_leader_topic
from tests.support.harvesting import Scene
from tests.support.members import identity_of
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]


def hostile(outbox: str) -> list[bytes | None]:
    """Messages; those that could be a heartbeat of another member name the outbox that is served."""
    chance = random.Random(4)
    heartbeat: dict[str, Any] = {
        "v": VERSION, "member": str(uuid4()), "name": "somebody", "n": 1, "outbox": outbox, "outbox_name": "outbox",
        "leader": None, "term": None,
    }  # fmt: skip

    def with_field(name: str, value: Any) -> bytes:
        return json.dumps(heartbeat | {name: value}).encode()

    odd: list[Any] = [None, True, -1, 0.5, 10**4000, "", "\ud800", "x" * 17_000, [], {}, [[[]]], {"a": {}}]
    return [
        None, b"", b"\0", b"null", b"[" * 50_000, b"{" * 50_000, b'{"v":' + b"9" * 10_000 + b"}", b"\xff\xfe{}",
        b"x" * 900_000,
        *(chance.randbytes(chance.randrange(200)) for _ in range(50)),
        # Another outbox's name is not among them: a member has to refuse the company of its harvesters.
        *(with_field(name, value) for name in heartbeat for value in odd if (name, value) != ("outbox", "")),
        with_field("term", 2**63), with_field("term", 2**63 - 1), with_field("term", 2**62 + 1),
        with_field("term", "1"), with_field("leader", "no uuid"), with_field("member", "0" * 32 + "\n"),
        with_field("outbox", 5), with_field("outbox_name", None), with_field("name", {"a": 1}),
    ]  # fmt: skip


@pytest.mark.parametrize("when", ["while it leads", "before it joins"])
def test_a_leader_goes_on(scene: Scene, when: str) -> None:
    calm = {"heartbeat_timeout": "5s", "session_timeout": "15s"}  # a busy machine must not cost it the lead
    config = scene.config(**calm)
    outbox = identity_of(scene.dsn).outbox
    values = [str(number) for number in range(20)]
    scene.add(*[("k", value) for value in values[:10]])
    if when == "before it joins":
        _flood(config, hostile(outbox))
    with scene.member_here(**calm) as running:
        running.wait_leading()
        scene.wait_left()
        if when == "while it leads":
            _flood(config, hostile(outbox))
        scene.add(*[("k", value) for value in values[10:]])
        scene.wait_left()
        # It has read them when a heartbeat of its own that was sent after them has come back.
        assert running.harvester._life.parts is not None
        group: Any = running.harvester._life.parts.group
        sent = group._sent.number
        eventually(lambda: group._sent.number > sent + 3, what="further heartbeats")
        assert running.leadership() == ["LeaderAcquired"]
        assert group.highest_term == 1
        assert running.harvester.status().problem is None
    assert scene.published() == {"k": values}


def _flood(config: Config, messages: list[bytes | None]) -> None:
    assert ensure_leader_topic(config.leader_topic, config.common_options(), lambda _: None) is None
    producer = Producer({**config.common_options(), "message.max.bytes": 1_000_000})
    for message in messages:
        producer.produce(config.leader_topic, value=message, partition=0)
    assert producer.flush(30) == 0
