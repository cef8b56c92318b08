"""The text and the place of messages, to the byte: other programs and other versions read them."""

from __future__ import annotations

import pytest

from harvester.coordination.core.fair_share import log_partition
from harvester.coordination.core.messages import (
    MOST_TOGETHER,
    ClaimingMessages,
    ClaimingPartition,
    Client,
    GroupPartition,
    Heartbeat,
    Heartbeats,
    Message,
    ReleasingPartition,
    SettingPosition,
    Unreadable,
    decode,
    encode,
)
from harvester.coordination.topic import misfits

PLACE = GroupPartition("billing/eu", "orders", 3)
SAID = (PLACE, Client("b 1", "5f0c"), 7, 41, 52)
TEXT = "group=billing%2Feu topic=orders partition=3 client=b%201 instance=5f0c number=7 generation=41 confirmed=52"


@pytest.mark.parametrize(("message", "text"), [
    (Heartbeat(*SAID, 1041), f"Heartbeat v1 {TEXT} last_offset=1041"),
    (Heartbeat(*SAID, None), f"Heartbeat v1 {TEXT} last_offset=-"),
    (ClaimingPartition(*SAID), f"ClaimingPartition v1 {TEXT}"),
    (ReleasingPartition(*SAID, 9), f"ReleasingPartition v1 {TEXT} last_offset=9"),
    (ClaimingMessages(*SAID, 99), f"ClaimingMessages v1 {TEXT} proposed_last_offset=99"),
    (SettingPosition(*SAID, 0), f"SettingPosition v1 {TEXT} last_offset=0"),
])  # fmt: skip
def test_the_text_of_each_kind(message: Message, text: str) -> None:
    assert encode(message) == text.encode()
    assert decode(text.encode()) == message


def test_the_text_of_heartbeats_that_go_together() -> None:
    client, other = Client.begin("b 1", "5f0c"), GroupPartition("billing/eu", "or/ders", 0)
    beats = Heartbeats(
        (Heartbeat(PLACE, client, 7, 41, 52, 1041, 5000), Heartbeat(other, client, 9, 42, 53, None, 5000))
    )
    text = (
        "Heartbeats v1 group=billing%2Feu client=b%201 instance=5f0c~ interval_ms=5000"
        " orders/3=7:41:52:1041 or%2Fders/0=9:42:53:-"
    )
    assert encode(beats) == text.encode()
    assert decode(text.encode()) == beats


def test_as_many_heartbeats_as_go_together_have_room_in_a_record() -> None:
    client = Client.begin("c" * 249, "i" * 32)
    most = 2**63 - 1
    beats = [
        Heartbeat(GroupPartition("g" * 249, "t" * 249, 2**31 - 1 - each), client, most, most, most, most, most)
        for each in range(MOST_TOGETHER)
    ]
    assert decode(encode(Heartbeats(tuple(beats)))) == Heartbeats(tuple(beats))


def test_who_reads_heartbeats_that_go_together_says_so() -> None:
    assert [client.reads_together for client in (Client.begin("a", "5f0c"), Client("a", "5f0c"))] == [True, False]


def test_names_may_hold_anything() -> None:
    place = GroupPartition("a/b=c d-%\n", "ü", 0)
    message = ClaimingPartition(place, Client("", "-"), 1, None, None)
    assert decode(encode(message)) == message


@pytest.mark.parametrize(("text", "reason"), [
    (f"Heartbeat v2 {TEXT} last_offset=1", "a newer one wrote it"),
    (f"Farewell v1 {TEXT}", "not a known kind of message"),
    (f"Heartbeat v1 {TEXT}", "fields other"),
    (f"Heartbeat v1 {TEXT} last_offset=1 more=2", "fields other"),
    (f"ClaimingMessages v1 {TEXT} proposed_last_offset=-", "has no offset"),
    (f"Heartbeat v1 {TEXT} last_offset=0x1", "is not a number"),
    (f"Heartbeat v1 {TEXT} last_offset=-1", "is not a number"),
    (f"Heartbeat v1 {TEXT} last_offset=9223372036854775808", "64 bits"),
    (f"Heartbeat v1 {TEXT} last_offset=1".replace("%2F", "%FF"), "decode"),
    ("Heartbeats v1 group=g client=c instance=i interval_ms=5", "fields other"),
    ("Heartbeats v1 group=g client=c interval_ms=5 t/0=1:2:3:4", "fields other"),
    ("Heartbeats v1 group=g client=c instance=i interval_ms=5 t/0=1:2:3", "numbers other"),
    ("Heartbeats v1 group=g client=c instance=i interval_ms=5 t=1:2:3:4", "is not a number"),
    ("Heartbeats v2 group=g client=c instance=i interval_ms=5 t/0=1:2:3:4", "a newer one wrote it"),
    ("", "0 bytes"),
    ("x" * 70_000, "70000 bytes"),
    ("Heartbeat", "not a known kind of message"),
    ("Grüße", "ascii"),
])  # fmt: skip
def test_what_is_no_message_is_said_to_be_none(text: str, reason: str) -> None:
    read = decode(text.encode())
    assert isinstance(read, Unreadable)
    assert reason in read.reason


def test_no_value_at_all() -> None:
    assert isinstance(decode(None), Unreadable)


@pytest.mark.parametrize(
    ("topic", "partition", "found"), [("orders", 0, 9), ("orders", 1, 12), ("orders", 12, 6), ("ü", 7, 1)]
)
def test_where_a_claim_lies_is_fixed(topic: str, partition: int, found: int) -> None:
    assert log_partition(GroupPartition("any", topic, partition), 16) == found


FIT = {
    "message.timestamp.type": "LogAppendTime",
    "cleanup.policy": "delete",
    "unclean.leader.election.enable": "false",
    "retention.ms": "100000",
    "min.insync.replicas": "2",
}


@pytest.mark.parametrize(("settings", "replicas", "problem"), [
    ({}, 3, ""),
    ({"retention.ms": "-1"}, 3, ""),
    ({"min.insync.replicas": "1"}, 1, ""),
    ({"min.insync.replicas": "1"}, 3, "min.insync.replicas"),
    ({"retention.ms": "99999"}, 3, "retention.ms"),
    ({"cleanup.policy": "compact,delete"}, 3, "cleanup.policy"),
    ({"message.timestamp.type": "CreateTime"}, 3, "message.timestamp.type"),
    ({"unclean.leader.election.enable": "true"}, 3, "unclean"),
])  # fmt: skip
def test_a_topic_under_which_claims_would_not_be_safe(settings: dict[str, str], replicas: int, problem: str) -> None:
    found = misfits(8, replicas, {**FIT, **settings}, 8, 1000)
    assert len(found) == bool(problem)
    assert all(text.startswith(problem) for text in found)


def test_another_number_of_partitions() -> None:
    (found,) = misfits(9, 3, FIT, 8, 1000)
    assert "fixed for its life" in found
