"""Messages travel as text: any names come back, and no text does any harm."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harvester.coordination.core.fair_share import log_partition
from harvester.coordination.core.messages import (
    ClaimingMessages,
    ClaimingPartition,
    Client,
    GroupPartition,
    Heartbeat,
    Heartbeats,
    Message,
    ReleasingPartition,
    ReturningMessages,
    SettingPosition,
    Unreadable,
    decode,
    encode,
    may_concern,
)

NAMES = st.text(st.characters(codec="utf-8"), max_size=30)
NUMBERS = st.integers(0, 2**63 - 1)
SAID = (
    st.builds(GroupPartition, NAMES, NAMES, st.integers(0, 2**31 - 1)),
    st.builds(Client, NAMES, NAMES),
    NUMBERS,
    st.none() | NUMBERS,
    st.none() | NUMBERS,
)
MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(ClaimingPartition, *SAID, st.none() | NUMBERS, st.booleans()),
    st.builds(ClaimingMessages, *SAID, NUMBERS),
    st.builds(Heartbeat, *SAID, st.none() | NUMBERS, st.none() | NUMBERS, st.booleans()),
    *(st.builds(kind, *SAID, st.none() | NUMBERS) for kind in (ReleasingPartition, ReturningMessages, SettingPosition)),
)


@st.composite
def together(draw: st.DrawFn) -> Heartbeats:
    group, client, interval_ms = draw(NAMES), draw(st.builds(Client, NAMES, NAMES)), draw(st.none() | NUMBERS)
    place = st.builds(GroupPartition, st.just(group), NAMES, st.integers(0, 2**31 - 1))
    numbers = NUMBERS, *[st.none() | NUMBERS] * 3
    beat = st.builds(Heartbeat, place, st.just(client), *numbers, st.just(interval_ms))
    return Heartbeats(tuple(draw(st.lists(beat, min_size=1, max_size=5))))


RECORDS: st.SearchStrategy[Message | Heartbeats] = MESSAGES | together()


@given(RECORDS)
def test_what_was_said_is_what_is_read(message: Message | Heartbeats) -> None:
    assert decode(encode(message)) == message


@given(RECORDS, NAMES, NAMES)
def test_a_record_concerns_the_topics_of_its_places_and_no_other(
    message: Message | Heartbeats, group: str, topic: str
) -> None:
    its = {(part.place.group, part.place.topic) for part in message.parts}
    for of, about in its | {(group, topic), *((group, its_topic) for _, its_topic in its)}:
        assert may_concern(of, [about])(encode(message)) == ((of, about) in its)
        assert may_concern(of, [topic, about])(encode(message)) == (not its.isdisjoint({(of, about), (of, topic)}))
    assert not may_concern(group, [topic])(None)


@given(RECORDS)
def test_a_message_is_one_line_of_printable_ascii(message: Message | Heartbeats) -> None:
    text = encode(message).decode("ascii")
    assert text.isprintable()


@given(st.binary(max_size=200) | RECORDS.map(encode), st.integers(0, 250), st.binary(max_size=3))
def test_no_bytes_do_any_harm(value: bytes, at: int, patch: bytes) -> None:
    read = decode(value[:at] + patch + value[at + len(patch) :])
    assert isinstance(read, Unreadable) or decode(encode(read)) == read


@given(NAMES, NAMES, NAMES, st.integers(0, 2**31 - 1), st.integers(1, 1000))
def test_all_groups_claims_of_a_partition_lie_together(
    one: str, other: str, topic: str, partition: int, partitions: int
) -> None:
    found = log_partition(GroupPartition(one, topic, partition), partitions)
    assert found == log_partition(GroupPartition(other, topic, partition), partitions)
    assert 0 <= found < partitions
