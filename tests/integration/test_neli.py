"""Members of a leader group on a real broker, without a relay behind them."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Consumer, KafkaError, Producer

from harvester.clock import clock_s
from harvester.config import Config, Limits
from harvester.errors import ForeignOutbox
from harvester.neli.group import Identity
from harvester.neli.heartbeat import MemberHeartbeat, decode, encode
from harvester.neli.member import KafkaGroup
from tests.conftest import MakeTopic
from tests.support.consuming import read_topic
from tests.support.members import OUTBOX, Member, mortal
from tests.support.servers import Servers
from tests.support.topics import Topics
from tests.support.wait import eventually


@pytest.fixture
def config(servers: Servers, group: str) -> Config:
    return Config(
        base_kafka_config={"bootstrap.servers": servers.bootstrap, "broker.address.family": "v4"},
        leader_group_id=group,
        name="member",
        limits=Limits(
            heartbeat_timeout=timedelta(seconds=1.5),
            session_timeout=timedelta(seconds=5),
            drain_interval=timedelta(seconds=3),
        ),
    )


@pytest.fixture
def join(config: Config) -> Iterator[Callable[..., Member]]:
    members: list[Member] = []

    def make(identity: Identity = OUTBOX) -> Member:
        member = Member(config, identity)
        members.append(member)
        member.start()
        return member

    yield make
    for member in members:
        member.revoke_handled.set()
        member.group.stop()


def say(config: Config, *values: bytes) -> None:
    """Put something on the leader topic that no member of ours has said."""
    producer = Producer({"bootstrap.servers": config.base_kafka_config["bootstrap.servers"]})
    for value in values:
        producer.produce(config.leader_topic, value=value, partition=0)
    assert producer.flush(30) == 0


def heartbeats(servers: Servers, config: Config) -> list[MemberHeartbeat]:
    found = (decode(record.value) for record in read_topic(servers.bootstrap, config.leader_topic))
    return [heartbeat for heartbeat in found if heartbeat is not None]


def foreign(term: int | None = None, outbox: str = OUTBOX.outbox) -> MemberHeartbeat:
    return MemberHeartbeat(uuid4(), "another", 1, outbox, "crm.outbox", uuid4() if term else None, term)


def test_a_member_alone_leads_and_says_so(servers: Servers, config: Config, join: Callable[..., Member]) -> None:
    member = join()
    member.wait_said("acquired")
    assert member.is_trusted
    until = member.trusted_until
    eventually(lambda: member.trusted_until > until, what="trust that is renewed")
    assert member.trusted_until <= clock_s() + 1.5
    leader_id = uuid4()
    member.group.lead(leader_id, 7)
    assert member.group.highest_term == 7
    eventually(lambda: any(beat.term == 7 for beat in heartbeats(servers, config)), what="its term in heartbeats")
    beats = heartbeats(servers, config)
    assert {(beat.name, beat.outbox, beat.outbox_name) for beat in beats} == {("member", "outbox-1", "billing.outbox")}
    assert len({beat.member for beat in beats}) == 1
    assert [beat.number for beat in beats] == list(range(1, len(beats) + 1))
    assert {(beat.leader_id, beat.term) for beat in beats} == {(None, None), (leader_id, 7)}
    member.group.stop()
    member.wait_said("acquired", "revoking")
    assert not member.is_trusted


def test_one_of_several_leads_and_a_hand_over_waits_for_the_drain(
    servers: Servers, config: Config, join: Callable[..., Member]
) -> None:
    first = join()
    first.wait_said("acquired")
    second, third = join(), join()
    eventually(lambda: first.is_trusted and second.trouble is None, what="a group at rest")
    first.group.lead(uuid4(), 3)
    eventually(lambda: any(beat.term == 3 for beat in heartbeats(servers, config)), what="its term in heartbeats")
    first.revoke_handled.clear()
    leaving = threading.Thread(target=first.group.stop)
    leaving.start()
    first.wait_said("acquired", "revoking")
    leaving.join(0.2)
    assert leaving.is_alive()
    assert second.said == third.said == []
    first.revoke_handled.set()
    leaving.join(30)
    eventually(lambda: second.said or third.said, what="a successor")
    heir, other = (second, third) if second.said else (third, second)
    assert heir.said == ["acquired"]
    assert heir.group.highest_term == 3  # it has read what the first one said
    assert other.said == []


def test_a_successor_leads_only_after_the_trust_of_a_member_that_vanished(join: Callable[..., Member]) -> None:
    """The thread of the leader hangs, as a frozen process would; nobody leads beside it while it is trusted."""
    first, second = join(), join()
    eventually(lambda: first.said or second.said, what="a leader")
    leader, standby = (first, second) if first.said else (second, first)
    frozen = threading.Event()

    def hang(_until: float) -> None:
        leader.trusted_until = _until
        frozen.wait(30)

    leader.group._listener.trust = hang  # type: ignore[assignment]
    try:
        eventually(lambda: standby.said, what="the take-over")
        assert standby.said == ["acquired"]
        assert clock_s() > leader.trusted_until
    finally:
        frozen.set()


def test_a_standing_mark_loop_ends_leadership_until_it_turns_again(join: Callable[..., Member]) -> None:
    member = join()
    member.wait_said("acquired")
    member.marker_alive = False
    member.wait_said("acquired", "fenced: the mark loop has stalled")
    member.marker_alive = True
    member.wait_said("acquired", "fenced", "acquired")


def test_a_mark_loop_that_stands_still_for_long_costs_the_place(join: Callable[..., Member]) -> None:
    """Its owner could not lead, and nobody else could while it kept it."""
    first = join()
    first.wait_said("acquired")
    second = join()
    second.wait_joined()
    first.marker_alive = False
    second.wait_said("acquired")
    first.wait_said("acquired", "fenced: the mark loop has stalled", "revoking")


def test_a_higher_term_of_another_ends_trust_at_once(config: Config, join: Callable[..., Member]) -> None:
    member = join()
    member.wait_said("acquired")
    member.group.lead(uuid4(), 5)
    say(config, encode(foreign(term=4)))
    eventually(lambda: member.trouble is None, what="no trouble")
    say(config, encode(foreign(term=6)))
    member.wait_said("acquired", "fenced: another leads under the higher term 6", "acquired")
    assert member.group.highest_term == 6


def test_what_is_no_heartbeat_is_ignored(servers: Servers, config: Config, join: Callable[..., Member]) -> None:
    member = join()
    member.wait_said("acquired")
    body = json.loads(encode(foreign(term=9)))
    strange = [
        b"", b"\xff\x00", b"null", b"[]", b"{}", b'{"v":1}', b"9" * 20_000,
        json.dumps({**body, "v": 2, "term": 99}).encode(),
        json.dumps({**body, "term": "99"}).encode(),
        json.dumps({**body, "member": 5}).encode(),
    ]  # fmt: skip
    say(config, *strange)
    count = len(heartbeats(servers, config))
    eventually(lambda: len(heartbeats(servers, config)) > count + 3, what="further heartbeats", interval_s=0.1)
    assert member.said == ["acquired"]
    assert member.group.highest_term == 0


def test_a_live_member_of_another_outbox_is_refused_by_name(config: Config, join: Callable[..., Member]) -> None:
    member = join()
    member.wait_said("acquired")
    say(config, encode(foreign(term=2, outbox="outbox-2")))
    error = eventually(lambda: member.failure, what="the refusal")
    assert isinstance(error, ForeignOutbox)
    assert (error.group, error.member, error.theirs, error.ours) == (
        config.leader_group_id, "another", "crm.outbox", "billing.outbox",
    )  # fmt: skip
    member.wait_said("acquired", "revoking")


def test_a_leader_that_steps_down_leaves_the_group_for_a_while(join: Callable[..., Member]) -> None:
    first = join()
    first.wait_said("acquired")
    second = join()
    first.group.step_down("the database has been out of reach for 4 s", 0.5)
    second.wait_said("acquired")
    eventually(lambda: first.said[:2] == ["acquired", "fenced: the database has been out of reach for 4 s"], what="it")
    assert first.said.count("acquired") == 1


def test_a_member_that_is_alone_leads_again_after_it_stepped_down(join: Callable[..., Member]) -> None:
    member = join()
    member.wait_said("acquired")
    member.group.step_down("a reason", 0.1)
    eventually(lambda: member.said.count("acquired") == 2, what="leading again")
    assert member.said[1] == "fenced: a reason"
    assert member.said[-1] == "acquired"


def test_a_member_whose_client_gets_no_answers_from_the_coordinator_joins_anew(
    config: Config, join: Callable[..., Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers to the first client's commits are lost, as those of a connection that was reset."""
    answered = KafkaGroup._committed
    clients: list[Consumer] = []

    def lost_at_first(group: KafkaGroup, error: KafkaError | None, partitions: Any) -> None:
        if group._consumer not in clients:
            clients.append(group._consumer)
        if len(clients) > 1:
            answered(group, error, partitions)

    monkeypatch.setattr(KafkaGroup, "_committed", lost_at_first)
    member = join()
    eventually(lambda: "acquired" in member.said, 60, what="leading")
    assert len(clients) == 2
    assert member.failure is None


def test_a_dead_standby_that_is_replaced_at_once_costs_the_leader_nothing(
    config: Config, join: Callable[..., Member]
) -> None:
    """The group waits for the dead one before it lets anybody in, and holds the leader's own request back meanwhile."""
    leader = join()
    leader.wait_said("acquired")
    with mortal(config) as dead:
        dead.wait_joined()
        dead.kill()
    replacement = join()
    replacement.wait_joined()
    until = leader.trusted_until
    eventually(lambda: leader.trusted_until > until, what="trust that is renewed")
    assert leader.said == ["acquired"]
    assert replacement.said == []


@pytest.mark.parametrize(
    ("setting", "wrong", "right", "remedy"),
    [
        ("max.message.bytes", "100", "100000", "max.message.bytes"),
        ("cleanup.policy", "compact", "delete", "cleanup.policy"),
    ],
)
def test_heartbeats_that_the_topic_refuses_are_told_once_and_when_it_is_over(
    servers: Servers, config: Config, make_topic: MakeTopic, setting: str, wrong: str, right: str, remedy: str
) -> None:
    topic = make_topic(partitions=1, config={setting: wrong})
    member = Member(Config(**{**config.model_dump(exclude={"leader_topic"}), "leader_topic": topic}))
    member.start()
    try:
        text = eventually(lambda: member.trouble, what="the refusal") or ""
        assert text.startswith(f"the leader topic {topic!r} accepts no heartbeats, so nobody can lead: ")
        assert remedy in text
        sent = member.group._sent.number
        eventually(lambda: member.group._sent.number > sent + 5, what="further heartbeats")
        assert member.troubles == [text]
        Topics(servers).configure(topic, setting, right)
        member.wait_said("acquired")
        assert member.trouble is None
    finally:
        member.group.stop()


def test_a_topic_that_kafka_keeps_for_itself_is_told(config: Config, join: Callable[..., Member]) -> None:
    join().wait_said("acquired")  # there are offsets of groups
    reserved = Member(Config(**{**config.model_dump(), "leader_topic": "__consumer_offsets", "leader_group_id": "r"}))
    reserved.start()
    try:
        text = eventually(lambda: reserved.trouble, what="the refusal") or ""
        assert "'__consumer_offsets' accepts no heartbeats" in text
        assert "leader_topic" in text
        assert reserved.said == []
    finally:
        reserved.group.stop()


def test_who_waits_for_kafka_to_make_the_leader_topic_stops_at_once(config: Config) -> None:
    """The port is open and says nothing, as a firewall or a broker that hangs."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        member = Member(Config(**{**config.model_dump(), "base_kafka_config": {"bootstrap.servers": address}}))
        member.start()
        eventually(
            lambda: any(thread.name == "neli-topic" for thread in threading.enumerate()), what="the wait for Kafka"
        )
        began = clock_s()
        member.group.stop()
        assert clock_s() - began < 2  # of the five seconds that it takes to give up
