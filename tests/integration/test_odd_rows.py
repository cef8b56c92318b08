"""Every row that the table's types allow is published or quarantined, and costs no shard its life (P33)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
from harvester_cli.dead import as_json, page_of, table_of
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from harvester import origin
from harvester.outbox.overview import read_backlog, read_key, read_overview
from harvester.outbox.quarantine import DeadLetterFilter, list_dead
from harvester.outbox.redrive import plan, redrive
from harvester.outbox.schema import init, inspect
from harvester.outbox.tables import OutboxTable
from tests.support.harvesting import Scene

pytest_plugins = ["tests.support.scenes"]
pytestmark = pytest.mark.servers

OUTBOX = OutboxTable.parse("outbox")
BOTH_MODES = pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
ELEMENTS = st.lists(st.none() | TEXT, max_size=3)
TIMES = [
    None, "infinity", "-infinity", "4713-11-24 00:00:00+00 BC", "0001-01-01 00:00:00+00 BC", "0001-01-01 00:00:00+00",
    "1969-12-31 23:59:59.999999+00", "1970-01-01 00:00:00+00", "2026-01-01 00:00:00+00", "9999-12-31 23:59:59+00",
    "10000-01-01 00:00:00+00", "294247-01-10 04:00:54.775808+00", "294276-12-31 23:59:59.999999+00",
]  # fmt: skip
VALID = re.compile(r"[a-zA-Z0-9._-]+")  # such a topic would be made, and nobody reads it here
HERE = "<the scene's topic>"
TOPICS = [None, "", ".", "..", "a b", "K\u00e4se", "a\n", "\x01", "a/b", "a" * 250, "\U0001f9c0", HERE]
PARTITIONS = [None, 0, 3, 4, -1, -5, -(2**31), 2**31 - 1]


@dataclass(frozen=True)
class OddRow:
    """A row of the outbox; array columns are the text of an array or a list."""

    created: str | None = "2026-01-01 00:00:00+00"
    topic: str | None = HERE
    key: str | None = "k"
    value: str | None = "v"
    names: Any = ()
    values: Any = ()
    partition: int | None = None


ARRAYS = st.sampled_from([None, "{}", "{a}", "{NULL}", "{{a,b}}", "{{{a}}}", "[5:6]={a,b}", "[-1:-1]={a}"]) | ELEMENTS
ROWS = st.builds(
    OddRow,
    created=st.sampled_from(TIMES),
    topic=st.just(HERE) | st.sampled_from(TOPICS) | TEXT.filter(lambda topic: not VALID.fullmatch(topic)),
    key=st.none() | TEXT,
    value=st.none() | TEXT,
    names=ARRAYS,
    values=ARRAYS,
    partition=st.none() | st.sampled_from(PARTITIONS),
)
SINGLE = [
    *(OddRow(created=created) for created in TIMES),
    *(OddRow(topic=topic) for topic in TOPICS),
    *(OddRow(partition=partition) for partition in PARTITIONS),
    OddRow(key=None), OddRow(key=""), OddRow(key="k" * 1_000_000), OddRow(value=None), OddRow(value="v" * 3_000_000),
    OddRow(names=["h" * 40_000], values=["x"]), OddRow(names=["\x01"], values=["\x02"]),
    OddRow(names=[""], values=[""]),
    OddRow(names=["h"] * 2_000, values=["x"] * 2_000), OddRow(names=["h"], values=["x" * 2_000_000]),
    OddRow(names=None, values=None), OddRow(names=["a"], values=[]), OddRow(names=["a", None], values=["b", "c"]),
    OddRow(names="{{a,b}}", values="{a,b}"), OddRow(names="[5:6]={a,b}", values="{c,d}"),
]  # fmt: skip


def add(scene: Scene, *rows: OddRow) -> None:
    """In one transaction."""
    with scene.db.transaction():
        for row in rows:
            arrays = [list(a) if isinstance(a, tuple) else a for a in (row.names, row.values)]
            topic = scene.topic if row.topic == HERE else row.topic
            scene.db.execute(
                "INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys,"
                " kafka_header_values, kafka_partition) VALUES (%s, %s, %s, %s, %s::text[], %s::text[], %s)",
                (row.created, topic, row.key, row.value, *arrays, row.partition),
            )


@pytest.fixture
def wide(scene: Scene) -> Scene:
    """An outbox that takes all that its types can hold."""
    scene.db.execute(
        "ALTER TABLE outbox ALTER kafka_topic TYPE text, ALTER kafka_topic DROP NOT NULL,"
        " ALTER create_time DROP NOT NULL, ALTER kafka_header_keys DROP NOT NULL,"
        " ALTER kafka_header_values DROP NOT NULL"
    )
    init(scene.db, OUTBOX, archive=True)
    return scene


def published(scene: Scene) -> list[int]:
    """Ids, by the header that the relay adds; notices have other topics."""
    found = [origin.decode(origin.find(record.headers)) for record in scene.log()]
    assert None not in found
    return sorted(one.id for one in found if one is not None)


@BOTH_MODES
@pytest.mark.parametrize("timestamp", ["produce", "create_time"])
def test_odd_rows_are_published_or_quarantined(wide: Scene, delivery: str, timestamp: str) -> None:
    given_settings: dict[str, Any] = {"delivery": delivery, "record_timestamp": timestamp, "archive": "rows"}
    examples = 15 if delivery == "at-least-once" else 4
    with wide.embedded(max_attempts=2, **given_settings) as running:
        running.wait_leading()
        pids = running.pids()

        @settings(max_examples=examples, deadline=None, phases=[Phase.explicit, Phase.generate], database=None)
        @given(st.lists(ROWS, min_size=5, max_size=25))
        @example(SINGLE)
        def leave(rows: list[OddRow]) -> None:
            add(wide, *rows)
            wide.wait_left(timeout_s=60)
            assert running.pids() == pids

        leave()
    gone, quarantined = published(wide), sorted(wide.quarantined())
    (last,) = wide.db.execute("SELECT last_value FROM outbox_id_seq").fetchone() or (0,)
    assert sorted([*gone, *quarantined]) == list(range(1, last + 1))
    assert [row[0] for row in wide.db.execute("SELECT id FROM outbox_archive ORDER BY id")] == gone
    assert all(error for error in wide.quarantined().values())


@BOTH_MODES
@pytest.mark.parametrize("timestamp", ["produce", "create_time"])
def test_no_time_that_a_row_can_have_makes_it_undeliverable(wide: Scene, delivery: str, timestamp: str) -> None:
    """But Kafka's brokers refuse a record whose own timestamp is far in the future."""
    times = [time for time in TIMES if timestamp == "produce" or time is None or not time.startswith("9999")]
    with wide.embedded(max_attempts=2, delivery=delivery, record_timestamp=timestamp) as running:
        running.wait_leading()
        add(wide, *(OddRow(created=time, key=time) for time in times))
        wide.wait_left()
    assert wide.quarantined() == {}
    created = {record.key: origin.decode(origin.find(record.headers)) for record in wide.log()}
    assert len(created) == len(times)
    assert created[b"infinity"].created_us == 2**63 - 1  # type: ignore[union-attr]
    assert created[b"294276-12-31 23:59:59.999999+00"].created_us == 2**63 - 1  # type: ignore[union-attr]


@BOTH_MODES
def test_ids_that_no_sequence_gives_are_published(wide: Scene, delivery: str) -> None:
    """Those below what the sequence has given out are found by the scan of the whole table, `head_scan_interval`."""
    with wide.embedded(delivery=delivery, head_scan_interval="500ms") as running:
        running.wait_leading()
        pids = running.pids()
        for number in (-(2**63), -1, 0, 2**62, 2**63 - 1):
            wide.db.execute(
                "INSERT INTO outbox (id, create_time, kafka_topic, kafka_key, kafka_value)"
                " VALUES (%s, now(), %s, 'k', 'v')",
                (number, wide.topic),
            )
            wide.wait_left()
        wide.add(("k", "last"))
        wide.wait_left()
        assert running.pids() == pids
    assert published(wide) == [-(2**63), -1, 0, 1, 2**62, 2**63 - 1]


def test_odd_records_in_quarantine_can_be_seen_and_put_back(wide: Scene) -> None:
    rows = [replace(OddRow(created=time, key=time), topic="no topic") for time in TIMES]
    add(wide, *rows)
    notices = f"{wide.topic}-notices"
    with wide.embedded(until_empty=True, poison={"notice_topic": notices}) as running:
        assert running.harvester.wait(60)
    shape = inspect(wide.db, OUTBOX)
    dead = list_dead(wide.db, OUTBOX, shape, DeadLetterFilter(), values=True)
    assert len(dead) == len(rows)
    assert {record.key for record in dead if record.create_time is None} == {
        None, b"infinity", b"-infinity", b"4713-11-24 00:00:00+00 BC", b"0001-01-01 00:00:00+00 BC",
        b"0001-01-01 00:00:00+00", b"9999-12-31 23:59:59+00", b"10000-01-01 00:00:00+00",
        b"294247-01-10 04:00:54.775808+00", b"294276-12-31 23:59:59.999999+00",
    }  # fmt: skip
    json.dumps([as_json(record, value=True) for record in dead])
    assert table_of(dead).row_count == len(dead)
    assert all(page_of(record) for record in dead)
    assert len(wide.log(notices)) == len(rows)
    assert all(json.loads(record.value or b"")["error"] for record in wide.log(notices))
    planned = plan(wide.db, OUTBOX, shape, DeadLetterFilter(), archive=False)
    assert len(planned) == len(rows)
    back = redrive(wide.db, OUTBOX, shape, [r.identity for r in dead], archive=False, out_of_order=True)
    assert len(back) == len(rows)


@pytest.mark.parametrize("time", TIMES[1:])
def test_an_odd_time_at_the_head_leaves_the_overview_readable(wide: Scene, time: str) -> None:
    add(wide, OddRow(created=time))
    overview = read_overview(wide.db, OUTBOX)
    assert overview.backlog.records == 1
    ages = [
        overview.backlog.oldest_age_s,
        read_backlog(wide.db, OUTBOX).oldest_age_s,
        read_key(wide.db, OUTBOX, b"k").oldest_age_s,
    ]
    assert all((age is None) == time.endswith("infinity") for age in ages)
    assert all(0 <= age < float("inf") for age in ages if age is not None)
