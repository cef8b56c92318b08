"""Dead letters on a real server: found, discarded, put back in the order of their keys."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from harvester.errors import DatabaseUnavailable, OrderNotKept, OutboxError
from harvester.outbox import quarantine
from harvester.outbox import redrive as redriving
from harvester.outbox.key_order import Obstacle, Reason
from harvester.outbox.quarantine import DeadLetterFilter
from harvester.outbox.redrive import PlannedRedrive, Redriven
from harvester.outbox.schema import inspect
from tests.support.dead import ODD_NAME, Outbox
from tests.support.outboxes import seed_ddl
from tests.support.wait import eventually

pytestmark = pytest.mark.servers


@pytest.fixture
def connection(empty_database: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(empty_database, autocommit=True) as opened:
        yield opened


@pytest.fixture
def outbox(connection: psycopg.Connection[Any]) -> Outbox:
    return Outbox.make(connection, archive=True)


def plan(outbox: Outbox, *, archive: bool = True, **chosen: Any) -> list[PlannedRedrive]:
    return redriving.plan(outbox.connection, outbox.table, outbox.shape, DeadLetterFilter(**chosen), archive=archive)


def obstacles(outbox: Outbox, *, archive: bool = True, **chosen: Any) -> dict[int, Obstacle | None]:
    return {entry.record.id: entry.obstacle for entry in plan(outbox, archive=archive, **chosen)}


def redrive(
    outbox: Outbox, *ids: int, archive: bool = True, out_of_order: bool = False, connection: Any = None
) -> list[Redriven]:
    found = quarantine.list_dead(outbox.connection, outbox.table, outbox.shape, DeadLetterFilter(ids=ids))
    return redriving.redrive(
        connection or outbox.connection, outbox.table, outbox.shape, [record.identity for record in found],
        archive=archive, out_of_order=out_of_order,
    )  # fmt: skip


def an_archive_that_reaches_back(outbox: Outbox) -> None:
    [first] = outbox.add("before")
    assert outbox.purge(first, archive="ids") == 1


@pytest.mark.parametrize("kind", ["outbox", "bytea", ODD_NAME, "seed"])
def test_a_record_comes_back_whole_under_a_new_id(connection: psycopg.Connection[Any], kind: str) -> None:
    if kind == "seed":
        connection.execute(seed_ddl("outbox", leader_id="VARCHAR(36)"))
        for column, value in (("create_time", "now()"), ("kafka_header_keys", "'{}'"), ("kafka_header_values", "'{}'")):
            connection.execute(f"ALTER TABLE outbox ALTER {column} SET DEFAULT {value}")
    name = kind if kind == ODD_NAME else "outbox"
    outbox = Outbox.make(connection, name, key_type="bytea" if kind == "bytea" else "text", archive=True)
    key: str | bytes = b"\0\xff'" if kind == "bytea" else "it's %s"
    [record] = outbox.add(key, value=None)
    outbox.run(f"UPDATE {outbox.table.sql} SET kafka_header_keys = '{{a}}', kafka_header_values = '{{b}}'")
    [before] = outbox.rows()
    outbox.quarantine(record)
    found = quarantine.list_dead(connection, outbox.table, outbox.shape, DeadLetterFilter(), values=True)
    assert [(r.id, r.key, r.value) for r in found] == [(record, key.encode() if isinstance(key, str) else key, None)]
    [done] = redrive(outbox, record)
    [after] = outbox.rows()
    assert after["id"] == done.new_id > record
    changed = {"id", "create_time", "kafka_header_keys", "kafka_header_values"}
    assert {c: v for c, v in after.items() if c not in changed} == {c: v for c, v in before.items() if c not in changed}
    origin = f"{done.record.incarnation}:{record}"
    assert after["kafka_header_keys"] == ["a", "harvester-origin"]
    assert after["kafka_header_values"] == ["b", origin]
    assert outbox.rows(outbox.table.quarantine) == []
    # Refused again, it keeps the identity that it had first.
    outbox.quarantine(done.new_id)
    [again] = redrive(outbox, done.new_id)
    assert again.new_id > done.new_id
    assert outbox.rows()[0]["kafka_header_values"] == ["b", origin]


def test_headers_that_do_not_fit_stay_as_they_are(outbox: Outbox) -> None:
    ids = outbox.add(None, None, None)
    for record, names in zip(ids, ("{a,b}", "{{a},{b}}", "{NULL}"), strict=True):
        outbox.run(f"UPDATE {outbox.table.sql} SET kafka_header_keys = $1::text[] WHERE id = $2", names, record)
    before = [row["kafka_header_keys"] for row in outbox.rows()]
    outbox.quarantine(*ids)
    redrive(outbox, *ids)
    assert [row["kafka_header_keys"] for row in outbox.rows()] == before


def test_several_records_of_a_key_come_back_in_their_order(outbox: Outbox) -> None:
    an_archive_that_reaches_back(outbox)
    ids = outbox.add(*["a", "b"] * 50)
    for record in reversed(ids):
        outbox.quarantine(record)
    done = redrive(outbox, *ids)
    assert [entry.record.id for entry in done] == ids
    origins = [int(row["kafka_header_values"][-1].rpartition(":")[2]) for row in outbox.rows()]
    assert origins == ids


def test_without_an_archive_only_the_newest_can_be_told(outbox: Outbox) -> None:
    first, second, keyless = outbox.add("a", "b", None)
    outbox.quarantine(first, second, keyless)
    assert obstacles(outbox, archive=False) == {
        first: Obstacle(Reason.UNKNOWN), second: Obstacle(Reason.UNKNOWN), keyless: None,
    }  # fmt: skip
    with pytest.raises(OrderNotKept, match=r"2 of 3 records cannot keep the order of their keys \(2 unknown\)"):
        redrive(outbox, first, second, keyless, archive=False)
    assert outbox.ids(outbox.table.quarantine) == [first, second, keyless]
    assert outbox.rows() == []
    assert [entry.record.id for entry in redrive(outbox, keyless, archive=False)] == [keyless]
    assert len(redrive(outbox, first, second, archive=False, out_of_order=True)) == 2
    [newest] = outbox.add("c")
    outbox.quarantine(newest)
    assert obstacles(outbox, archive=False) == {newest: None}


def test_a_later_record_that_waits_is_in_the_way(outbox: Outbox) -> None:
    an_archive_that_reaches_back(outbox)
    earlier, record, later, other = outbox.add("k", "k", "k", "other")
    outbox.quarantine(record)
    assert obstacles(outbox) == {record: Obstacle(Reason.WAITING, later)}
    with pytest.raises(OrderNotKept):
        redrive(outbox, record)
    outbox.quarantine(later)
    # What waits with a lower id comes first anyhow, and other keys do not matter.
    assert obstacles(outbox) == {record: None, later: None}
    assert outbox.ids() == [earlier, other]


def test_an_earlier_record_in_quarantine_has_to_come_along(outbox: Outbox) -> None:
    an_archive_that_reaches_back(outbox)
    first, second = outbox.add("k", "k")
    outbox.quarantine(first, second)
    assert obstacles(outbox, ids=[second]) == {second: Obstacle(Reason.EARLIER, first)}
    assert obstacles(outbox, ids=[first]) == {first: None}
    # Both at a time, or one after the other: what was put back is still before its successor.
    [done] = redrive(outbox, first)
    assert obstacles(outbox) == {second: None}
    outbox.quarantine(done.new_id)
    assert [entry.record.id for entry in plan(outbox)] == [done.new_id, second]
    assert [entry.record.id for entry in redrive(outbox, second, done.new_id)] == [done.new_id, second]


@pytest.mark.parametrize("archive", ["ids", "rows"])
def test_the_archive_tells_what_was_published(outbox: Outbox, archive: Any) -> None:
    an_archive_that_reaches_back(outbox)
    record, later = outbox.add("k", "k")
    [unrelated] = outbox.add("other")
    outbox.quarantine(record)
    outbox.purge(unrelated, archive=archive)
    outbox.purge(later, archive="off")
    assert obstacles(outbox) == {record: None}, "what no archive saw cannot be told"
    [last] = outbox.add("k")
    outbox.purge(last, archive=archive)
    assert obstacles(outbox) == {record: Obstacle(Reason.PUBLISHED, last)}
    with pytest.raises(OrderNotKept):
        redrive(outbox, record)


def test_an_archive_that_began_later_tells_nothing(outbox: Outbox) -> None:
    record, later = outbox.add("k", "other")
    outbox.quarantine(record)
    assert obstacles(outbox) == {record: Obstacle(Reason.UNKNOWN)}
    outbox.purge(later, archive="ids")
    assert obstacles(outbox) == {record: Obstacle(Reason.UNKNOWN)}


def test_ids_of_an_older_incarnation_come_first(outbox: Outbox) -> None:
    an_archive_that_reaches_back(outbox)
    old = outbox.add("k")[0]
    outbox.quarantine(old)
    outbox.run(f"UPDATE {outbox.table.term} SET incarnation = $1", uuid4())
    outbox.run(f"SELECT setval('{outbox.shape.sequence}', 1, false)")
    [new] = outbox.add("k")
    assert new < old
    assert obstacles(outbox) == {old: Obstacle(Reason.WAITING, new)}
    outbox.quarantine(new)
    assert [entry.record.id for entry in plan(outbox)] == [old, new]
    assert obstacles(outbox, ids=[new]) == {new: Obstacle(Reason.EARLIER, old)}


def test_two_redrives_of_one_record_make_one_row(outbox: Outbox, empty_database: str) -> None:
    [record] = outbox.add("k")
    outbox.quarantine(record)
    started = threading.Barrier(2)
    results: list[int] = []

    def run() -> None:
        with psycopg.connect(empty_database, autocommit=True) as own:
            identity = quarantine.list_dead(own, outbox.table, outbox.shape, DeadLetterFilter())[0].identity
            started.wait(30)
            done = redriving.redrive(own, outbox.table, outbox.shape, [identity], archive=False, out_of_order=True)
            results.append(len(done))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == [0, 1]
    assert len(outbox.rows()) == 1


def test_the_second_of_two_redrives_waits_for_the_first(outbox: Outbox, empty_database: str) -> None:
    """The interleaving by force: the first has moved the record and not committed."""
    [record] = outbox.add("k")
    outbox.quarantine(record)
    identity = quarantine.list_dead(outbox.connection, outbox.table, outbox.shape, DeadLetterFilter())[0].identity
    with psycopg.connect(empty_database) as first, psycopg.connect(empty_database, autocommit=True) as second:
        first.execute("SELECT 1")  # so that the transaction is ours to end
        assert len(redriving.redrive(first, outbox.table, outbox.shape, [identity], archive=False)) == 1
        results: list[int] = []

        def run() -> None:
            done = redriving.redrive(second, outbox.table, outbox.shape, [identity], archive=False, out_of_order=True)
            results.append(len(done))

        thread = threading.Thread(target=run)
        thread.start()
        waiting = "SELECT count(*) FROM pg_locks l JOIN pg_stat_activity USING (pid) WHERE NOT granted"
        waiting += " AND datname = current_database()"
        eventually(lambda: outbox.run(waiting).fetchall()[0]["count"] == 1)
        first.commit()
        thread.join(60)
    assert results == [0]
    assert len(outbox.rows()) == 1


def test_a_writer_that_has_not_committed_is_waited_for(outbox: Outbox, empty_database: str) -> None:
    """Its row has a higher id than the record: without the lock the redrive would see nothing, and come after it."""
    an_archive_that_reaches_back(outbox)
    [record] = outbox.add("k")
    outbox.quarantine(record)
    with psycopg.connect(empty_database) as writer:
        writer.execute("INSERT INTO outbox (kafka_topic, kafka_key) VALUES ('t', 'k')")
        with pytest.raises(DatabaseUnavailable, match="has locked the table for too long"):
            redrive(outbox, record)
        writer.commit()
    with pytest.raises(OrderNotKept, match="1 waiting"):
        redrive(outbox, record)
    assert outbox.ids(outbox.table.quarantine) == [record]


def test_writers_go_on_while_the_archive_is_read(outbox: Outbox, empty_database: str) -> None:
    """A partition that is locked stands for one that takes long to read."""
    [first, record] = outbox.add("before", "k")
    outbox.purge(first, archive="ids")
    outbox.quarantine(record)
    aged(outbox, archive="3 days", quarantine="2 days")
    day = "date_trunc('day', now()) - interval '1 day'"
    bounds = outbox.run(f"SELECT {day} - interval '1 day' AS first, {day} AS last").fetchall()[0]
    outbox.run(
        f"CREATE TABLE old_day PARTITION OF {outbox.table.archive}"
        f" FOR VALUES FROM ('{bounds['first']}') TO ('{bounds['last']}')"
    )
    back: list[Redriven] = []
    with (
        psycopg.connect(empty_database) as keeper,
        psycopg.connect(empty_database, autocommit=True) as own,
        psycopg.connect(empty_database, autocommit=True, options="-c lock_timeout=5s") as writer,
    ):
        keeper.execute("LOCK TABLE old_day IN ACCESS EXCLUSIVE MODE")
        thread = threading.Thread(target=lambda: back.extend(redrive(outbox, record, connection=own)))
        thread.start()
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'old_day'::regclass"
        eventually(lambda: outbox.run(waiting).fetchall()[0]["count"] == 1)
        writer.execute("INSERT INTO outbox (kafka_topic, kafka_key) VALUES ('t', 'other')")
        keeper.rollback()
        thread.join(60)
    assert [entry.record.id for entry in back] == [record]


def aged(outbox: Outbox, *, archive: str, quarantine: str) -> None:
    """Dates the rows of archive and quarantine back."""
    outbox.run(f"UPDATE {outbox.table.archive} SET purged_at = now() - interval '{archive}'")
    outbox.run(f"UPDATE {outbox.table.quarantine} SET quarantined_at = now() - interval '{quarantine}'")


def test_what_is_published_once_the_archive_was_read_is_seen(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    an_archive_that_reaches_back(outbox)
    record, later = outbox.add("k", "k")
    outbox.quarantine(record)
    meanwhile(monkeypatch, lambda: outbox.purge(later, archive="ids"))
    with pytest.raises(OrderNotKept, match="1 published"):
        redrive(outbox, record)


def test_a_key_that_is_changed_once_the_archive_was_read_is_looked_for(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    an_archive_that_reaches_back(outbox)
    aged(outbox, archive="3 hours", quarantine="0")
    record, later = outbox.add("k", "other")
    outbox.quarantine(record)
    outbox.purge(later, archive="ids")
    outbox.run(f"UPDATE {outbox.table.archive} SET purged_at = now() - interval '1 hour' WHERE id = {later}")
    outbox.run(f"UPDATE {outbox.table.quarantine} SET quarantined_at = now() - interval '2 hours'")
    meanwhile(monkeypatch, lambda: outbox.run(f"UPDATE {outbox.table.quarantine} SET kafka_key = 'other'"))
    with pytest.raises(OrderNotKept, match="1 published"):
        redrive(outbox, record)


def meanwhile(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Between the reading of the archive and the lock."""
    put_back = redriving._redrive

    def late(*arguments: Any, **more: Any) -> list[Redriven]:
        act()
        return put_back(*arguments, **more)

    monkeypatch.setattr(redriving, "_redrive", late)


def test_a_deposed_leader_cannot_quarantine_what_was_put_back(outbox: Outbox) -> None:
    [record] = outbox.add("k")
    term, holder = outbox.term, outbox.holder
    outbox.quarantine(record)
    [done] = redrive(outbox, record)
    assert outbox.quarantine(record) == [(False, False, False)], "its old id is gone for the leader, too"
    outbox.lead()
    outbox.term, outbox.holder = term, holder
    assert outbox.quarantine(record, done.new_id) == [(False, True, False)] * 2
    assert outbox.ids() == [done.new_id]
    assert outbox.rows(outbox.table.quarantine) == []


def test_a_redrive_of_what_the_old_leader_is_still_moving_finds_nothing(outbox: Outbox, empty_database: str) -> None:
    """A quarantine that has not committed hides the record; it is in the outbox or in quarantine, never in both."""
    [record] = outbox.add("k")
    with psycopg.connect(empty_database) as mover:
        moving = Outbox(mover, outbox.table, outbox.shape, outbox.term, outbox.holder)
        assert moving.quarantine(record) == [(True, False, False)]
        assert obstacles(outbox) == {}
        mover.rollback()
    assert outbox.ids() == [record]
    assert redrive(outbox, record) == []


def test_a_partition_that_has_no_column_any_more_is_refused(outbox: Outbox) -> None:
    [record] = outbox.add("k")
    outbox.run(f"UPDATE {outbox.table.sql} SET kafka_partition = 3")
    outbox.quarantine(record)
    outbox.run(f"ALTER TABLE {outbox.table.sql} DROP kafka_partition")
    outbox.shape = inspect(outbox.connection, outbox.table)
    with pytest.raises(OutboxError, match="no column kafka_partition"):
        redrive(outbox, record, out_of_order=True)
    assert outbox.ids(outbox.table.quarantine) == [record]


def test_a_trigger_that_suppresses_a_row_is_told(outbox: Outbox) -> None:
    ids = outbox.add("a", "b")
    outbox.quarantine(*ids)
    outbox.run("CREATE FUNCTION no_b() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$")
    outbox.run(
        f"CREATE TRIGGER no_b BEFORE INSERT ON {outbox.table.sql} FOR EACH ROW"
        f" WHEN (NEW.kafka_key::text IN ('b', '{chr(92)}x62')) EXECUTE FUNCTION no_b()"
    )
    with pytest.raises(OutboxError, match="took 1 of 2 records: nothing was put back"):
        redrive(outbox, *ids, out_of_order=True)
    assert (outbox.ids(), outbox.ids(outbox.table.quarantine)) == ([], ids)


def test_a_plan_leaves_out_what_another_redrive_has_just_put_back(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = outbox.add("a", "b")
    outbox.quarantine(first, second)
    listed = quarantine.list_dead

    def then_gone(*given: Any, **named: Any) -> Any:
        found = listed(*given, **named)
        outbox.run(f"DELETE FROM {outbox.table.quarantine} WHERE id = $1", first)
        return found

    monkeypatch.setattr(redriving, "list_dead", then_gone)
    assert [entry.record.id for entry in plan(outbox)] == [second]


@pytest.mark.parametrize("kind", ["text", "bytea"])
def test_records_are_found_by_every_condition(connection: psycopg.Connection[Any], kind: str) -> None:
    outbox = Outbox.make(connection, key_type=kind)
    keys: list[str | bytes | None] = [b"a", b"\xff", None] if kind == "bytea" else ["a", "b%", None]
    first, second, third = outbox.add(*keys)
    outbox.quarantine(first, error="Message size TOO large")
    outbox.quarantine(second, error="100% refused [x]")
    outbox.quarantine(third, error="invalid topic")
    outbox.run(f"UPDATE {outbox.table.quarantine} SET kafka_topic = 'other' WHERE id = $1", third)
    outbox.run(f"UPDATE {outbox.table.quarantine} SET quarantined_at = now() - interval '3 hours' WHERE id = $1", first)
    incarnation = outbox.rows(outbox.table.quarantine)[0]["incarnation"]

    def found(**chosen: Any) -> list[int]:
        records = quarantine.list_dead(connection, outbox.table, outbox.shape, DeadLetterFilter(**chosen))
        return [record.id for record in records]

    everything = [third, second, first]
    assert found() == everything
    assert found(limit=2) == [third, second]
    assert found(topics=["t"]) == [second, first]
    assert found(topics=["t", "other"], ids=[first, third]) == [third, first]
    key = keys[1].encode() if isinstance(keys[1], str) else keys[1]
    assert found(key=key) == [second]
    assert found(key=b"A") == []
    assert found(error="too LARGE") == [first]
    assert found(error="100% refused [X") == [second]
    assert found(error="_") == []
    assert found(error_pattern=r"^\d+% REFUSED") == [second]
    assert found(since=timedelta(hours=1)) == [third, second]
    assert found(since=datetime.now(UTC) - timedelta(hours=4)) == everything
    assert found(incarnation=incarnation) == everything
    assert found(incarnation=uuid4()) == []
    with pytest.raises(OutboxError, match="not a valid regular expression"):
        found(error_pattern="(")


def test_what_is_discarded_is_gone_once(outbox: Outbox) -> None:
    first, second = outbox.add("a", "b")
    outbox.quarantine(first, second)
    chosen = DeadLetterFilter(ids=[first])
    records = quarantine.list_dead(outbox.connection, outbox.table, outbox.shape, chosen, values=True)
    identities = [record.identity for record in records]
    kept: list[list[quarantine.DeadRecord]] = []
    for _ in range(2):
        quarantine.discard(outbox.connection, outbox.table, outbox.shape, identities, kept.append, values=True)
    assert kept == [records, []]
    assert outbox.ids(outbox.table.quarantine) == [second]
