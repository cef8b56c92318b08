"""Databases whose encoding is not UTF-8: no text in them stops the outbox (P33)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from harvester.errors import SchemaError
from harvester.outbox.connection import connect
from harvester.outbox.quarantine import DeadLetterFilter, list_dead
from harvester.outbox.redrive import plan, redrive
from harvester.outbox.schema import init, inspect, sql
from harvester.outbox.tables import OutboxTable
from tests.conftest import MakeTopic
from tests.support.databases import fresh_database
from tests.support.harvesting import Scene
from tests.support.servers import Servers

OUTBOX = OutboxTable.parse("outbox")
E9 = r"convert_from('\xe9', 'SQL_ASCII')"  # é in Latin-1, and no text in UTF-8
INSERT = (
    "INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values)"
    " VALUES (now(), {topic}, {key}, {value}, ARRAY[{name}], ARRAY[{header}])"
)


@pytest.fixture
def in_encoding(servers: Servers) -> Iterator[Callable[[str], str]]:
    """Makes an empty database in this encoding; returns its DSN."""
    with ExitStack() as cleanup:

        def make(encoding: str) -> str:
            dsn = cleanup.enter_context(fresh_database(servers, "template0", encoding=encoding))
            return make_conninfo(dsn, client_encoding="UTF8")  # as psycopg's own default would be for UTF-8

        yield make


@pytest.fixture
def ascii_scene(
    servers: Servers, in_encoding: Callable[[str], str], topic: str, group: str, tmp_path: Path
) -> Iterator[Scene]:
    """An outbox in a database that does not look at what texts hold."""
    scene = Scene(servers, in_encoding("SQL_ASCII"), topic, group, tmp_path)
    init(scene.db, OUTBOX, archive=True)
    try:
        yield scene
    finally:
        scene.db.close()


def add(scene: Scene, **odd: str) -> None:
    """A row; what is odd about it is SQL."""
    fields = {"topic": f"'{scene.topic}'", "key": "'k'", "value": "'v'", "name": "'n'", "header": "'h'"}
    scene.db.execute(INSERT.format(**(fields | odd)))


@pytest.mark.parametrize("marking", ["memory", "table"])
@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
def test_bytes_that_are_no_text_are_published_as_they_stand(ascii_scene: Scene, delivery: str, marking: str) -> None:
    scene = ascii_scene
    add(scene)
    add(scene, key=E9)
    add(scene, value=E9)
    add(scene, header=E9)
    add(scene, name=E9)  # librdkafka takes names as UTF-8
    add(scene, topic=E9, key=E9, value=E9)
    add(scene, key="'ü'", value="'ü'", name="'ü'", header="'ü'")
    with scene.embedded(max_attempts=2, delivery=delivery, marking=marking, archive="rows"):
        scene.wait_left()
    ue = "ü".encode()
    found = {
        (record.key, record.value, *next((n, v) for n, v in record.headers if n in ("n", "ü")))
        for record in scene.log()
    }
    assert found == {
        (b"k", b"v", "n", b"h"), (b"\xe9", b"v", "n", b"h"), (b"k", b"\xe9", "n", b"h"), (b"k", b"v", "n", b"\xe9"),
        (ue, ue, "ü", ue),
    }  # fmt: skip
    assert sorted(scene.quarantined()) == [5, 6]
    archived = scene.db.execute("SELECT id, kafka_key, kafka_value FROM outbox_archive ORDER BY id").fetchall()
    assert archived == [
        (1, b"k", b"v"), (2, b"\xe9", b"v"), (3, b"k", b"\xe9"), (4, b"k", b"v"), (7, ue, ue)
    ]  # fmt: skip


def test_what_is_no_text_is_found_and_put_back(ascii_scene: Scene, make_topic: MakeTopic) -> None:
    scene = ascii_scene
    add(scene, key=E9, name=E9)
    add(scene, key=E9, topic=E9)
    with scene.embedded(max_attempts=2, poison={"notice_topic": make_topic()}):
        scene.wait_left()
    with connect(scene.dsn, application_name="test") as connection:
        shape = inspect(connection, OUTBOX)
        names, topics = list_dead(connection, OUTBOX, shape, DeadLetterFilter(), oldest_first=True, values=True)
        assert (names.key, names.value, names.topic, names.header_keys) == (b"\xe9", b"v", scene.topic, ["\ufffd"])
        assert (topics.topic, topics.header_keys) == ("\ufffd", ["n"])
        assert "not UTF-8" in names.error
        assert "invalid topic name" in topics.error
        found = list_dead(connection, OUTBOX, shape, DeadLetterFilter(error="not utf-8"))
        assert [record.id for record in found] == [names.id]
        identities = [names.identity, topics.identity]
        assert len(plan(connection, OUTBOX, shape, DeadLetterFilter(), archive=True)) == 2
        assert len(redrive(connection, OUTBOX, shape, identities, archive=True, out_of_order=True)) == 2
        assert connection.execute("SHOW client_encoding").fetchone() == ("UTF8",)
    assert scene.db.execute("SELECT count(*) FROM outbox").fetchone() == (2,)


@pytest.mark.parametrize("encoding", ["LATIN1", "KOI8R"])
def test_an_encoding_of_which_utf_8_has_every_character_fits(in_encoding: Callable[[str], str], encoding: str) -> None:
    with psycopg.connect(in_encoding(encoding), autocommit=True) as connection:
        init(connection, OUTBOX)
        every = "".join(chr(number) for number in range(1, 256)) if encoding == "LATIN1" else "Ж"
        connection.execute("SELECT %s::text", [every])
        assert inspect(connection, OUTBOX).oid


@pytest.mark.parametrize("encoding", ["WIN1252", "EUC_JP"])
def test_an_encoding_with_characters_of_its_own_is_refused(in_encoding: Callable[[str], str], encoding: str) -> None:
    """Such a character could not be read, and no row behind it."""
    dsn = in_encoding(encoding)
    with connect(dsn, application_name="test") as connection:
        with pytest.raises(SchemaError, match=f"the encoding {encoding}") as refused:
            init(connection, OUTBOX)
        assert "UTF8" in str(refused.value.hint)
        connection.execute(sql(OUTBOX))
        with pytest.raises(SchemaError, match=f"the encoding {encoding}"):
            inspect(connection, OUTBOX)
