"""Progress records survive, and bytes that are none raise WireError and nothing else."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from harvester.delivery.progress import (
    Progress,
    decode,
    encode,
    encode_named,
    lanes_of,
    lanes_to_fence,
    name,
    same_rows,
)
from harvester.errors import WireError
from harvester.record import RowVersions
from tests.support.longs import some_of
from tests.support.rows import progress_of, row

BIGINTS = st.integers(-(2**63), 2**63 - 1)
NEAR = st.integers(0, 10_000)
IDS = st.one_of(st.sets(BIGINTS, max_size=30), st.sets(NEAR, max_size=60)).map(lambda ids: tuple(sorted(ids)))
RECORDS = st.builds(Progress, BIGINTS, st.uuids(), IDS)
WORDS = st.integers(0, 2**32 - 1)


@given(RECORDS)
def test_a_record_survives(progress: Progress) -> None:
    assert decode(*encode(progress)) == progress


@given(RECORDS, st.data())
def test_so_do_the_versions_of_its_rows(progress: Progress, data: st.DataObject) -> None:
    count = len(progress.ids)
    columns = [data.draw(st.lists(WORDS, min_size=count, max_size=count).map(tuple)) for _ in range(3)]
    whole = replace(progress, xmins=columns[0], created_us=columns[1], sums=columns[2])
    assert decode(*encode(whole)) == whole
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, count - 1))), label="parts end at"))
    ends = [cut for cut in cuts if cut < count] + [count] * bool(count)
    columns = [tuple(progress.ids), *columns]
    parts = [RowVersions(*(column[a:b] for column in columns)) for a, b in zip([0, *ends], ends, strict=False)]
    assert encode_named(whole.term, whole.incarnation, [name(part) for part in parts]) == encode(whole)


@given(st.uuids(), st.lists(st.lists(BIGINTS, min_size=1, max_size=3, unique=True).map(sorted), max_size=4))
def test_parts_that_do_not_ascend_are_refused(incarnation: UUID, parts: list[list[int]]) -> None:
    ids = [record_id for part in parts for record_id in part]
    ascends = ids == sorted(set(ids))
    try:
        encode_named(1, incarnation, [name(RowVersions(part)) for part in parts])
    except ValueError:
        assert not ascends
    else:
        assert ascends


@given(RECORDS)
def test_ids_may_come_in_any_sequence_type(progress: Progress) -> None:
    assert encode(Progress(progress.term, progress.incarnation, list(progress.ids))) == encode(progress)


@given(st.uuids(), st.lists(BIGINTS, max_size=10))
def test_what_does_not_ascend_is_refused(incarnation: object, ids: list[int]) -> None:
    ascends = ids == sorted(set(ids))
    try:
        encode(Progress(1, incarnation, ids))  # type: ignore[arg-type]
    except ValueError:
        assert not ascends
    else:
        assert ascends


@settings(max_examples=some_of(300))
@given(st.binary(max_size=200))
def test_junk(value: bytes) -> None:
    with suppress(WireError):
        decode(value)


@given(RECORDS, st.data())
def test_a_flipped_missing_or_added_byte(progress: Progress, data: st.DataObject) -> None:
    """What passes for a record still has ids that ascend."""
    value = bytearray(encode(progress).value)
    at = data.draw(st.integers(0, len(value) - 1))
    match data.draw(st.sampled_from(["flip", "cut", "remove", "add"])):
        case "flip":
            value[at] ^= data.draw(st.integers(1, 255))
        case "cut":
            del value[at:]
        case "remove":
            del value[at]
        case _:
            value.insert(at, data.draw(st.integers(0, 255)))
    with suppress(WireError):
        ids = decode(bytes(value)).ids
        assert list(ids) == sorted(set(ids))
        assert all(-(2**63) <= record_id < 2**63 for record_id in ids)


@given(st.integers(0, 3), st.integers(0, 9), st.integers(0, 2**32 - 1), st.binary(max_size=64))
def test_a_head_that_promises_anything(version: int, width: int, count: int, tail: bytes) -> None:
    value = bytes([version, width]) + bytes(24) + count.to_bytes(4, "big") + bytes(8) + tail
    with suppress(WireError):
        decode(value)


@given(st.integers(1, 40), st.integers(0, 100))
def test_shards_open_every_lane_once_and_their_own_last(shards: int, lanes: int) -> None:
    """P19. The topic may have more lanes than these shards need, and any number: an older harvester made it."""
    opened = [lanes_to_fence(shard, shards, lanes) for shard in range(shards)]
    assert sorted(number for numbers in opened for number in numbers) == list(range(max(lanes, 2 * shards)))
    assert all(numbers[-2:] == list(lanes_of(shard)) for shard, numbers in enumerate(opened))


FEW = st.sampled_from([None, b"", b"a", b"ab", b"x" * 2000])
CONTENT = st.fixed_dictionaries({"key": FEW, "value": FEW, "topic": st.sampled_from([b"t", b"?"]), "created": NEAR})
ROWS = st.dictionaries(st.integers(0, 30), CONTENT, max_size=30)


@given(ROWS, ROWS, st.sets(st.integers(0, 30)))
def test_after_a_failover_exactly_the_rows_that_are_the_same_are_found(
    before: dict[int, dict[str, Any]], given_again: dict[int, dict[str, Any]], lost: set[int]
) -> None:
    """P49, for any rows that the survivor has: the same, others under the same ids, or none."""
    ids = tuple(sorted(before))
    after = {**given_again, **{record_id: before[record_id] for record_id in before.keys() - lost}}
    rows = {record_id: row(record_id=record_id, **after[record_id]) for record_id in sorted(after)}
    progress = progress_of([row(record_id=record_id, **before[record_id]) for record_id in ids])
    found = same_rows(progress, [(record_id, None, raw) for record_id, raw in rows.items()])
    assert found.ids == sorted(record_id for record_id in after if before.get(record_id) == after[record_id])
