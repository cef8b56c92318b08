"""Outboxes with the column types that people have: read, quarantined, put back and written as any other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

import psycopg
import pytest

from harvester import OutboxRecord, Stasher
from harvester.delivery.decode import decode
from harvester.doctor.database import _skew
from harvester.errors import OutboxError, RecordRejected, SchemaError
from harvester.outbox import quarantine, schema
from harvester.outbox import redrive as redriving
from harvester.outbox.adoption import adopt
from harvester.outbox.libpq import copy_rows
from harvester.outbox.overview import KeySkew, read_key
from harvester.outbox.quarantine import DeadLetterFilter
from harvester.outbox.sql import queries
from harvester.outbox.sql.adoption import Route
from harvester.outbox.tables import OutboxTable
from harvester.pipeline.drain import sql as drain
from harvester.pipeline.drain.slices import DrainRules, Share, TopicLimits
from harvester.record import KafkaRecord
from harvester.verify.load import Load
from harvester.verify.pump import prepare
from tests.support.cli import run_cli
from tests.support.dead import Outbox
from tests.support.harvesting import Scene
from tests.support.marking import BOTH

pytest_plugins = ["tests.support.scenes"]
pytestmark = pytest.mark.servers

OUTBOX = OutboxTable.parse("outbox")
ID = "406c07f3-26f0-4eea-a50c-109940064b8f"
ARRAYS = "kafka_header_keys text[] NOT NULL DEFAULT '{}', kafka_header_values text[] NOT NULL DEFAULT '{}'"
# A type, what is written, what Kafka gets.
TYPES = [
    ("jsonb", '{"b":  1, "a": "ä"}', '{"a": "ä", "b": 1}'),
    ("json", '{"b":  1, "a": "ä"}', '{"b":  1, "a": "ä"}'),
    ("uuid", ID.upper(), ID),
    ("varchar(50)", "ä", "ä"),
    ("bigint", "-9223372036854775808", "-9223372036854775808"),
    ("integer", "42", "42"),
    ("text", "ä", "ä"),
    ("bytea", "\\xc3a4", "ä"),
]
# A type of kafka_headers, what is written, what Kafka gets.
HEADERS = [
    ("jsonb", '{"name": "ä", "n": 1, "deep": {"x": [1]}}', [("n", "1"), ("deep", '{"x": [1]}'), ("name", "ä")]),
    ("jsonb", "{}", []),
    ("jsonb", "null", []),
    ("jsonb", None, []),
    ("json", '{"b": "1", "a": "2", "b": "3"}', [("b", "1"), ("a", "2"), ("b", "3")]),
    ("json", r'{"a\\u0000": "\\\u00e4", "b": "\ud83d\ude00"}', [("a\\u0000", "\\ä"), ("b", "\U0001f600")]),
    ("text[]", "{b,1,a,2,b,3}", [("b", "1"), ("a", "2"), ("b", "3")]),
    ("text[]", "{{b,1},{a,2}}", [("b", "1"), ("a", "2")]),
    ("text[]", "[0:1]={b,1}", [("b", "1")]),
    ("varchar[]", '{a,""}', [("a", "")]),
    ("text[]", "{}", []),
    ("text[]", None, []),
]
# Headers that are none; of the quarantine's error, which says so.
UNFIT = [
    ("jsonb", '["a", "b"]', "0 header keys but 1 header values"),
    ("jsonb", '"a"', "0 header keys but 1 header values"),
    ("jsonb", '{"a": null}', "kafka_header_values has a NULL element"),
    ("json", "7", "0 header keys but 1 header values"),
    ("json", r'{"a": "\u0000"}', "0 header keys but 1 header values"),
    ("json", r'{"a": {"deep": "\\\u0000"}}', "0 header keys but 1 header values"),
    ("json", r'{"a": "\ud83d", "b": "\ude00"}', "0 header keys but 1 header values"),
    ("json", r'{"\ude00\ud83d": "1"}', "0 header keys but 1 header values"),
    ("text[]", "{a}", "1 header keys but 0 header values"),
    ("text[]", "{a,1,b}", "2 header keys but 1 header values"),
    ("text[]", "{NULL,1}", "kafka_header_keys has a NULL element"),
    ("text[]", "{{a,1,b},{2,c,3}}", "0 header keys but 1 header values"),
]


def table(key: str = "text", value: str = "text", headers: str = ARRAYS) -> str:
    return f"""CREATE TABLE outbox (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, event_id uuid NOT NULL DEFAULT gen_random_uuid(),
        create_time timestamptz NOT NULL DEFAULT now(), kafka_topic text NOT NULL, kafka_key {key},
        kafka_value {value}, {headers}, leader_id uuid)"""


@pytest.fixture
def connection(empty_database: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(empty_database, autocommit=True) as opened:
        yield opened


def make(connection: psycopg.Connection[Any], **columns: str) -> Outbox:
    connection.execute(table(**columns))
    return Outbox.make(connection, archive=True)


def put(outbox: Outbox, key: object, value: object, headers: object = None) -> int:
    names, places = ("", "") if outbox.shape.headers == "arrays" else (", kafka_headers", ", $3")
    given = (key, value) if outbox.shape.headers == "arrays" else (key, value, headers)
    query = f"INSERT INTO outbox (kafka_topic, kafka_key, kafka_value{names}) VALUES ('t', $1, $2{places}) RETURNING id"
    return int(outbox.run(query, *given).fetchall()[0]["id"])


def marked(outbox: Outbox, marking: str = "memory") -> list[Any]:
    """All rows, as a shard has them after a mark."""
    assert outbox.holder is not None
    where: dict[str, Any] = {"limit": 1000, "high": None, "gaps": ()}
    fence = queries.Fence(outbox.term, outbox.holder)
    if marking == "table":
        statement = queries.mark_in_table(OUTBOX, outbox.shape, fence=fence, leader_id=UUID(int=7), **where)
    else:
        statement = queries.mark_in_memory(OUTBOX, outbox.shape, fence=fence, **where)
    rows = sorted(copy_rows(outbox.connection, statement, 10))
    fetched = queries.fetch(OUTBOX, outbox.shape, fence=fence, ids=[record for record, _, _ in rows])
    assert sorted(copy_rows(outbox.connection, fetched, 10)) == rows
    ids = [record for record, _, _ in rows]
    assert copy_rows(outbox.connection, queries.read_rows(OUTBOX, outbox.shape, ids, None), 10) == rows
    assert outbox.connection.execute(queries.behind_others(OUTBOX, outbox.shape), {"ids": ids}).fetchall() == []
    return decode(b"".join(raw for _, _, raw in rows))


def redrive(outbox: Outbox, *ids: int) -> list[int]:
    found = quarantine.list_dead(outbox.connection, OUTBOX, outbox.shape, DeadLetterFilter(ids=ids))
    names = [record.identity for record in found]
    return [done.new_id for done in redriving.redrive(outbox.connection, OUTBOX, outbox.shape, names, archive=True)]


def whole_rows(outbox: Outbox) -> list[dict[str, Any]]:
    """All that a reader of the table sees, but ids and times."""
    return [
        {name: value for name, value in row.items() if name not in ("id", "event_id", "create_time", "leader_id")}
        for row in outbox.rows()
    ]


@BOTH
@pytest.mark.parametrize(("kind", "written", "read"), TYPES, ids=[kind for kind, _, _ in TYPES])
def test_keys_and_values_are_published_as_the_database_writes_them(
    connection: psycopg.Connection[Any], marking: str, kind: str, written: str, read: str
) -> None:
    outbox = make(connection, key=kind, value=kind)
    put(outbox, written, written)
    put(outbox, None, None)
    first, second = marked(outbox, marking)
    assert (first.key, first.value) == (read.encode(), read.encode())
    assert (second.key, second.value) == (None, None)
    assert read_key(connection, OUTBOX, read.encode()).rows == 1


@BOTH
@pytest.mark.parametrize(("kind", "written", "read"), HEADERS)
def test_headers_may_stand_in_one_column(
    connection: psycopg.Connection[Any], marking: str, kind: str, written: str | None, read: list[tuple[str, str]]
) -> None:
    outbox = make(connection, headers=f"kafka_headers {kind}")
    put(outbox, "k", "v", written)
    [record] = marked(outbox, marking)
    assert isinstance(record, KafkaRecord), record
    assert record.headers == [(name, value.encode()) for name, value in read]


@pytest.mark.parametrize(("kind", "written", "error"), UNFIT)
def test_headers_that_are_none_cost_their_own_row_and_come_back_as_they_were(
    connection: psycopg.Connection[Any], kind: str, written: str, error: str
) -> None:
    outbox = make(connection, headers=f"kafka_headers {kind}")
    bad, good = put(outbox, None, "v", written), put(outbox, None, "v")
    before = whole_rows(outbox)
    broken, fine = marked(outbox)
    assert (broken.id, fine.id) == (bad, good)
    assert error in broken.reason
    outbox.quarantine(bad, good)
    redrive(outbox, bad, good)
    after = whole_rows(outbox)
    if isinstance(after[0]["kafka_headers"], dict) and "\\" not in written:
        # An object can take the header of the origin, if its own can be read.
        assert after[0]["kafka_headers"].pop("harvester-origin").endswith(f":{bad}")
    assert after[0]["kafka_headers"] == before[0]["kafka_headers"]


@pytest.mark.parametrize(("kind", "written", "read"), TYPES, ids=[kind for kind, _, _ in TYPES])
def test_quarantine_archive_and_redrive_keep_keys_and_values(
    connection: psycopg.Connection[Any], kind: str, written: str, read: str
) -> None:
    outbox = make(connection, key=kind, value=kind)
    empty, record = put(outbox, None, None), put(outbox, written, written)
    _, before = whole_rows(outbox)
    outbox.quarantine(record, empty)
    chosen = DeadLetterFilter(key=read.encode())
    [dead] = quarantine.list_dead(connection, OUTBOX, outbox.shape, chosen, values=True)
    assert (dead.id, dead.key, dead.value) == (record, read.encode(), read.encode())
    assert redrive(outbox, record) == [3]
    # A later record of the key that waits is found by the key.
    outbox.quarantine(3)
    put(outbox, written, written)
    [entry] = redriving.plan(connection, OUTBOX, outbox.shape, DeadLetterFilter(ids=[3]), archive=True)
    assert entry.obstacle is not None
    assert entry.obstacle.other_id == 4
    assert outbox.purge(4, archive="rows") == 1
    redriving.redrive(connection, OUTBOX, outbox.shape, [entry.record.identity], archive=True, out_of_order=True)
    redrive(outbox, empty)
    same = ("kafka_topic", "kafka_key", "kafka_value")
    after, without = whole_rows(outbox)
    assert [after[name] for name in same] == [before[name] for name in same]
    assert (without["kafka_key"], without["kafka_value"]) == (None, None)
    [kept] = outbox.rows(outbox.table.archive)
    assert (bytes(kept["kafka_key"]), bytes(kept["kafka_value"])) == (read.encode(), read.encode())


@pytest.mark.parametrize(("kind", "written", "read"), HEADERS)
def test_a_redriven_record_has_its_headers_and_its_origin(
    connection: psycopg.Connection[Any], kind: str, written: str | None, read: list[tuple[str, str]]
) -> None:
    outbox = make(connection, headers=f"kafka_headers {kind}")
    record = put(outbox, "k", "v", written)
    outbox.quarantine(record)
    again = redrive(outbox, record)
    [found] = marked(outbox)
    headers = [(name, value.decode()) for name, value in found.headers]
    origin = [value for name, value in headers if name == "harvester-origin"]
    assert len(origin) == 1
    assert origin[0].endswith(f":{record}")
    assert sorted(header for header in headers if header[0] != "harvester-origin") == sorted(read)
    # The origin is read out of such headers, too: it keeps its place among the records of its key.
    outbox.quarantine(*again)
    [entry] = redriving.plan(connection, OUTBOX, outbox.shape, DeadLetterFilter(), archive=True)
    assert entry.position[1] == record
    redrive(outbox, *again)
    assert outbox.purge(3, archive="rows") == 1
    [kept] = outbox.rows(outbox.table.archive)
    assert dict(zip(kept["kafka_header_keys"], kept["kafka_header_values"], strict=True)) == dict(headers)


def test_a_notice_goes_into_columns_of_any_type_that_takes_a_document(connection: psycopg.Connection[Any]) -> None:
    outbox = make(connection, key="uuid", value="jsonb", headers="kafka_headers jsonb NOT NULL")
    outbox.quarantine(put(outbox, ID, "{}", "{}"), notice_topic="notices")
    [notice] = outbox.rows()
    assert (notice["kafka_key"], notice["kafka_value"]["key"], notice["kafka_headers"]) == (UUID(ID), ID, {})


def test_a_notice_that_its_column_cannot_hold_is_refused_at_the_start(connection: psycopg.Connection[Any]) -> None:
    outbox = make(connection, value="uuid")
    with pytest.raises(SchemaError, match="a notice does not fit into kafka_value, which is uuid"):
        outbox.quarantine(put(outbox, "k", ID), notice_topic="notices")


def test_a_redrive_fills_columns_of_ones_own_from_their_defaults(connection: psycopg.Connection[Any]) -> None:
    """Quarantine keeps what Kafka would have got, and no more."""
    outbox = make(connection)
    connection.execute("ALTER TABLE outbox ALTER event_id DROP DEFAULT, ADD tenant int")
    query = "INSERT INTO outbox (kafka_topic, event_id, tenant) VALUES ('t', $1, 7) RETURNING id"
    record = outbox.run(query, ID).fetchall()[0]["id"]
    outbox.quarantine(record)
    with pytest.raises(OutboxError, match='null value in column "event_id"'):
        redrive(outbox, record)
    assert [row["id"] for row in outbox.rows(OUTBOX.quarantine)] == [record]
    connection.execute("ALTER TABLE outbox ALTER event_id SET DEFAULT gen_random_uuid()")
    redrive(outbox, record)
    [row] = outbox.rows()
    assert (row["event_id"] != UUID(ID), row["tenant"]) == (True, None)


TYPED = {"key": "uuid", "value": "jsonb"}
FORMS = ["kafka_headers jsonb NOT NULL", "kafka_headers json", "kafka_headers text[]", ARRAYS]


@pytest.mark.parametrize("headers", FORMS)
def test_everything_that_writes_records_writes_them_into_such_columns(
    connection: psycopg.Connection[Any], headers: str
) -> None:
    outbox = make(connection, **TYPED, headers=headers)
    schema.init(connection, OUTBOX, functions=True)
    record = OutboxRecord("t", ID, '{"a": 1}', headers=[("b", "1"), ("a", "2")])
    stasher = Stasher("outbox")
    stasher.stash(connection, record)
    stasher.stash_many(connection, [record, OutboxRecord("t", None, None)])
    with connection.transaction():
        stasher.prepare(connection).stash(record)
    leased = stasher.leased(stasher.lease(connection, "writer"))
    for _ in range(2):  # the deciding step, then the hopeful one
        leased.stash(connection, record)
    leased.stash_many(connection, [record])
    connection.execute(
        "SELECT outbox_stash(topic => 't', key => %s, value => '{\"a\": 1}', header_keys => '{b,a}',"
        " header_values => '{1,2}')",
        (ID,),
    )
    connection.execute("CREATE TABLE events (k uuid, v jsonb, b int, a text)")
    adopt(connection, OUTBOX, "events", Route.parse(topic="t", key="{k}", value="{v}", headers=["b={b}", "a={a}"]))
    connection.execute("INSERT INTO events VALUES (%s, '{\"a\": 1}', 1, '2')", (ID,))
    found = marked(outbox)
    keyed = [one for one in found if one.key is not None]
    assert len(found) == len(keyed) + 1 == 9
    assert {(one.key, one.value) for one in keyed} == {(ID.encode(), b'{"a": 1}')}
    assert {tuple(sorted(one.headers)) for one in keyed} == {(("a", b"2"), ("b", b"1"))}


@pytest.mark.parametrize(
    ("columns", "fields", "said"),
    [
        ({"key": "uuid"}, {"key": "42"}, "key is '42', which a column of type uuid does not accept"),
        ({"key": "bigint"}, {"key": str(2**63)}, "which a column of type bigint does not accept"),
        ({"key": "integer"}, {"key": "x"}, "which a column of type integer does not accept"),
        (
            {"value": "jsonb"},
            {"value": "{NaN: 1}"},
            "value is '{NaN: 1}', which a column of type jsonb does not accept",
        ),
        ({"value": "json"}, {"value": b"NaN"}, "which a column of type json does not accept"),
        ({"headers": "kafka_headers jsonb"}, {"headers": [("a", "1"), ("a", "2")]}, "two headers have the same name"),
    ],
)
def test_what_a_column_does_not_take_is_refused_before_the_server_sees_it(
    connection: psycopg.Connection[Any], columns: dict[str, str], fields: dict[str, Any], said: str
) -> None:
    make(connection, **columns)
    with connection.transaction():
        with pytest.raises(RecordRejected, match=said):
            Stasher("outbox").stash(connection, OutboxRecord(**{"topic": "t", "key": None, "value": None, **fields}))
        connection.execute("SELECT 1")  # the transaction goes on


def test_the_pump_says_that_such_a_table_is_not_for_it(connection: psycopg.Connection[Any]) -> None:
    outbox = make(connection, value="jsonb")
    load = Load(records=1, topics=("t",))
    with pytest.raises(
        SchemaError, match="the pump writes plain text, which kafka_value, of type jsonb, does not accept"
    ):
        prepare(connection, OUTBOX, outbox.shape, load, append=False)


PARTITIONED = """CREATE TABLE events (
    id bigint GENERATED ALWAYS AS IDENTITY, create_time timestamptz NOT NULL DEFAULT now(), kafka_topic text,
    kafka_key text, kafka_value jsonb, kafka_headers jsonb, PRIMARY KEY (id, create_time)
    ) PARTITION BY RANGE (create_time)"""


def test_a_partitioned_outbox_is_refused_with_the_reason_and_the_way_round(connection: psycopg.Connection[Any]) -> None:
    connection.execute(PARTITIONED)
    connection.execute("CREATE TABLE events_1 PARTITION OF events DEFAULT")
    with pytest.raises(SchemaError, match="is a partitioned table: rows are read in the order of one") as refused:
        schema.init(connection, OutboxTable.parse("events"))
    assert "`harvester adopt TABLE --topic '{kafka_topic}'" in (refused.value.hint or "")
    outbox = Outbox.make(connection)
    templates = {"topic": "{kafka_topic}", "key": "{kafka_key}", "value": "{kafka_value}"}
    adopt(connection, OUTBOX, "events", Route.parse(**templates, headers=[], headers_from="kafka_headers"))
    connection.execute(
        "INSERT INTO events (kafka_topic, kafka_key, kafka_value, kafka_headers)"
        " VALUES ('t', 'k', '{\"a\": 1}', '{\"source\": \"shop\"}')"
    )
    connection.execute("DROP TABLE events_1")  # what they were partitioned for takes no record away
    [record] = marked(outbox)
    assert (record.topic, record.key, record.value) == ("t", b"k", b'{"a": 1}')
    assert record.headers == [("source", b"shop")]


@pytest.mark.parametrize(
    ("kind", "written", "read"),
    [
        ("jsonb", '{"n": 1}', [("n", b"1")]),
        ("json", '{"b": "1", "b": "2"}', [("b", b"1"), ("b", b"2")]),
        ("text[]", "{b,1,a,2}", [("b", b"1"), ("a", b"2")]),
        ("text[]", None, []),
    ],
)
def test_an_adopted_table_may_have_its_headers_in_one_column(
    connection: psycopg.Connection[Any], kind: str, written: str | None, read: list[tuple[str, bytes]]
) -> None:
    outbox = Outbox.make(connection)
    connection.execute(f'CREATE TABLE events (id int, body text, "The headers" {kind})'.encode())
    route = Route.parse(topic="t", key="", value="{body}", headers=["id={id}"], headers_from="The headers")
    adopt(connection, OUTBOX, "events", route)
    connection.execute("INSERT INTO events VALUES (7, 'v', %s)", (written,))
    [record] = marked(outbox)
    assert record.headers == [("id", b"7"), *read]
    with pytest.raises(SchemaError, match="has body as text, which holds no headers"):
        adopt(connection, OUTBOX, "events", Route.parse(topic="t", key="", value="v", headers=[], headers_from="body"))


def test_the_statements_of_a_drain_and_of_the_doctor_read_such_columns(connection: psycopg.Connection[Any]) -> None:
    outbox = make(connection, key="json", value="jsonb", headers="kafka_headers jsonb")
    put(outbox, "1", '{"a": 1}', '{"b": "2"}')
    put(outbox, "1", "7", "[]")
    [(topic, count, *_, least, most, odd, shifted, ids)] = connection.execute(drain.choose(OUTBOX, outbox.shape, 10))
    assert (topic, count, least, most, odd, shifted, sorted(ids)) == ("t", 2, 0, 1, True, False, [1, 2])
    good, _ = outbox.run(f"SELECT * FROM {drain.read(OUTBOX, outbox.shape, (1, 2), 1, 4)} ORDER BY id").fetchall()
    assert (bytes(good["key"]), bytes(good["value"])) == (b"1", b'{"a": 1}')
    assert (good["name_1"], bytes(good["value_1"])) == ("b", b"2")
    rules = DrainRules(reserved={}, header="harvester-origin", header_bytes=100)
    shares = [(Share("t", 2, 100, 50, None, (0, 1), True), TopicLimits(1, 1_000_000))]
    statement = drain.doubtful(OUTBOX, outbox.shape, (1, 2), shares, rules, 10)
    [broken] = decode(b"".join(raw for _, _, raw in copy_rows(connection, statement, 10)))
    assert broken.id == 2
    facts = schema.read_facts(connection, OUTBOX)
    assert _skew(connection, OUTBOX, facts) == KeySkew(2, 1.0)


@BOTH
def test_a_relay_publishes_them_and_refused_ones_come_back(scene: Scene, marking: str) -> None:
    scene.db.execute("DROP TABLE outbox, outbox_term, outbox_quarantine")
    scene.db.execute(table(key="uuid", value="jsonb", headers="kafka_headers jsonb NOT NULL DEFAULT '{}'"))
    schema.init(scene.db, OUTBOX)
    rows = [(f"{UUID(int=n % 5)}", f'{{"n": {n}}}', f'{{"source": "s{n}"}}') for n in range(50)]
    with scene.db.cursor() as cursor:
        query = "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value, kafka_headers) VALUES (%s, %s, %s, %s)"
        cursor.executemany(query, [(scene.topic, *row) for row in rows])
        cursor.execute(query, (scene.topic, None, '{"n": "poison"}', "[]"))
    with scene.embedded(marking=marking):
        scene.wait_left()
    assert scene.published() == {
        str(UUID(int=k)): [row[1] for row in rows if row[0] == str(UUID(int=k))] for k in range(5)
    }
    sources = {value.encode(): name for _, value, name in rows}
    for one in scene.log():
        assert sources[one.value or b""] == f'{{"source": "{(dict(one.headers)["source"] or b"").decode()}"}}'
    [(poison, error)] = scene.quarantined().items()
    assert "0 header keys but 1 header values" in error
    # Its headers are mended where it stands, and it goes back.
    scene.db.execute("UPDATE outbox_quarantine SET kafka_header_keys = '{fixed}', kafka_header_values = '{yes}'")
    run_cli("dead", "redrive", "-f", str(scene.config_file()), "--id", str(poison), "--yes")
    assert scene.db.execute("SELECT kafka_headers ->> 'fixed' FROM outbox").fetchone() == ("yes",)
    with scene.embedded(marking=marking):
        scene.wait_left()
    assert scene.published()[None] == ['{"n": "poison"}']
