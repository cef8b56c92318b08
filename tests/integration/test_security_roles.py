"""Least privilege on a real server: the relay's role and a writer's can do what they must, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from harvester import OutboxRecord, Stasher
from harvester.config import Config
from harvester.doctor.database import read_database
from harvester.errors import ConfigurationError
from harvester.outbox import schema
from harvester.outbox.archive import create_archive
from harvester.outbox.connection import connect, server_identity
from harvester.outbox.leader_session import MarkSession
from harvester.outbox.sql import settle
from harvester.outbox.sql.grants import GrantTarget, script
from harvester.outbox.tables import OutboxTable
from tests.support.cli import run_cli
from tests.support.harvesting import Scene
from tests.support.outboxes import poor_role, seed_ddl
from tests.support.roles import TABLE, Roles, separate_roles
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]


@pytest.fixture
def roles(empty_database: str) -> Iterator[Roles]:
    with separate_roles(empty_database) as made:
        yield made


def user(dsn: str) -> str:
    return str(conninfo_to_dict(dsn)["user"])


RELAY_MAY_NOT = {
    "insert": "INSERT INTO billing.outbox (kafka_topic) VALUES ('t')",
    "change a key": "UPDATE billing.outbox SET kafka_key = 'x'",
    "change a value": "UPDATE billing.outbox SET kafka_value = 'x'",
    "change a topic": "UPDATE billing.outbox SET kafka_topic = 'x'",
    "change an id": "UPDATE billing.outbox SET id = id + 1",
    "empty the outbox": "TRUNCATE billing.outbox",
    "alter": "ALTER TABLE billing.outbox ADD COLUMN x INT",
    "drop": "DROP TABLE billing.outbox",
    "make a trigger": "CREATE TRIGGER t AFTER DELETE ON billing.outbox EXECUTE FUNCTION billing.outbox_notify()",
    "use the sequence up": "SELECT nextval('billing.outbox_id_seq')",
    "set the sequence back": "SELECT setval('billing.outbox_id_seq', 1)",
    "delete the term row": "DELETE FROM billing.outbox_term",
    "make a second term row": "INSERT INTO billing.outbox_term (schema_version) VALUES (1)",
    "delete quarantined records": "DELETE FROM billing.outbox_quarantine",
    "change a quarantined record": "UPDATE billing.outbox_quarantine SET kafka_value = 'x'",
    "read other tables": "SELECT * FROM billing.customers",
    "make tables": "CREATE TABLE billing.mine (x INT)",
    "make tables elsewhere": "CREATE TABLE public.mine (x INT)",
    "read the server's files": "SELECT pg_read_file('postgresql.conf')",
    "become the owner": "SET ROLE {owner}",
}
WRITER_MAY_NOT = {
    "read a value": "SELECT kafka_value FROM billing.outbox",
    "read rows": "SELECT * FROM billing.outbox",
    "read its own row": "INSERT INTO billing.outbox (kafka_topic) VALUES ('t') RETURNING kafka_topic",
    "choose an id": "INSERT INTO billing.outbox (id, kafka_topic) VALUES (1, 't')",
    "choose a leader": "INSERT INTO billing.outbox (kafka_topic, leader_id) VALUES ('t', gen_random_uuid())",
    "update": "UPDATE billing.outbox SET kafka_value = 'x'",
    "delete": "DELETE FROM billing.outbox",
    "lock rows": "SELECT id FROM billing.outbox FOR UPDATE",
    "set the sequence back": "SELECT setval('billing.outbox_id_seq', 1)",
    "read the term": "SELECT * FROM billing.outbox_term",
    "take the term": "UPDATE billing.outbox_term SET term = term + 1",
    "read the quarantine": "SELECT * FROM billing.outbox_quarantine",
    "read other tables": "SELECT * FROM billing.customers",
    "become the relay": "SET ROLE {relay}",
}


def test_the_relay_may_do_no_more(roles: Roles) -> None:
    assert _allowed(roles.relay, RELAY_MAY_NOT, roles) == []


def test_a_writer_may_do_no_more(roles: Roles) -> None:
    assert _allowed(roles.writer, WRITER_MAY_NOT, roles) == []


def _allowed(dsn: str, statements: dict[str, str], roles: Roles) -> list[str]:
    """Those that were not refused. The row is there, so that none of them has nothing to do."""
    with psycopg.connect(roles.owner, autocommit=True) as owner:
        owner.execute("INSERT INTO billing.outbox (kafka_topic) VALUES ('t')")
    done = []
    with psycopg.connect(dsn, autocommit=True) as connection:
        for what, statement in statements.items():
            try:
                connection.execute(statement.format(owner=user(roles.owner), relay=user(roles.relay)).encode())
            except psycopg.errors.InsufficientPrivilege:
                continue
            done.append(what)
    return done


def test_a_writer_can_write_in_every_way(roles: Roles) -> None:
    stasher, record = Stasher("billing.outbox"), OutboxRecord("t", "k", "v", (("h", "1"),))
    with psycopg.connect(roles.writer) as writer:
        stasher.stash(writer, record)
        stasher.stash_many(writer, [record, record])
        stasher.prepare(writer).stash(record)
        writer.commit()
    with psycopg.connect(roles.owner) as owner:
        assert owner.execute("SELECT count(*) FROM billing.outbox").fetchone() == (4,)


@pytest.mark.parametrize("marking", ["table", "memory"])
def test_the_whole_relay_runs_as_its_role(scene: Scene, marking: str) -> None:
    with separate_roles(scene.dsn) as roles, psycopg.connect(roles.owner, autocommit=True) as owner:

        def left() -> int:
            row = owner.execute("SELECT count(*) FROM billing.outbox").fetchone()
            assert row is not None
            return int(row[0])

        with psycopg.connect(roles.writer, autocommit=True) as writer:
            stash = Stasher("billing.outbox")
            first = [OutboxRecord(scene.topic, f"k{n % 3}", str(n)) for n in range(30)]
            stash.stash_many(writer, first)
            poison = writer.execute(
                "INSERT INTO billing.outbox (kafka_topic, kafka_key, kafka_header_keys)"
                " VALUES (%s, 'poison', '{a,b}') RETURNING id",
                (scene.topic,),
            ).fetchone()
            assert poison is not None
            for term in (1, 2):  # a second leader takes the term over
                with scene.embedded(data_source=roles.relay, outbox_table="billing.outbox", marking=marking) as running:
                    assert running.wait_leading().term == term
                    eventually(lambda: left() == 0, what="an empty outbox")
                    stash.stash(writer, OutboxRecord(scene.topic, "k0", f"later {term}"))
                    eventually(lambda: left() == 0, what="an empty outbox")
                    assert running.harvester.status().problem is None
        assert owner.execute("SELECT id, attempts FROM billing.outbox_quarantine").fetchall() == [(poison[0], 1)]
    expected = {f"k{key}": [str(n) for n in range(30) if n % 3 == key] for key in range(3)}
    expected["k0"] += ["later 1", "later 2"]
    assert scene.published() == expected


def test_row_security_that_begins_while_it_runs_is_told_and_reorders_nothing(scene: Scene) -> None:
    """Rows that a policy hides would be taken for rows that are gone: gaps would close, and purges count as done."""
    with separate_roles(scene.dsn) as roles, psycopg.connect(roles.owner, autocommit=True) as owner:

        def left() -> int:
            row = owner.execute("SELECT count(*) FROM billing.outbox").fetchone()
            assert row is not None
            return int(row[0])

        with (
            psycopg.connect(roles.writer, autocommit=True) as writer,
            scene.embedded(data_source=roles.relay, outbox_table="billing.outbox") as running,
        ):
            stash = Stasher("billing.outbox")
            running.wait_leading()
            stash.stash(writer, OutboxRecord(scene.topic, "k", "1"))
            eventually(lambda: left() == 0, what="an empty outbox")
            owner.execute(f'CREATE POLICY writes ON billing.outbox TO "{user(roles.writer)}" USING (true)')
            owner.execute("ALTER TABLE billing.outbox ENABLE ROW LEVEL SECURITY")
            stash.stash(writer, OutboxRecord(scene.topic, "k", "2"))
            eventually(lambda: "row" in (running.harvester.status().problem or ""), what="a problem that is told")
            owner.execute("ALTER TABLE billing.outbox DISABLE ROW LEVEL SECURITY")
            stash.stash(writer, OutboxRecord(scene.topic, "k", "3"))
            eventually(lambda: left() == 0, what="an empty outbox")
            eventually(lambda: running.harvester.status().problem is None, what="the end of the problem")
    assert scene.published() == {"k": ["1", "2", "3"]}


def test_what_the_relay_looks_at_beside_the_tables(roles: Roles) -> None:
    """The server's identity (P9), and the sessions of a deposed leader, which has the same role (P7)."""
    with (
        psycopg.connect(roles.relay, autocommit=True) as deposed,
        psycopg.connect(roles.owner) as other,
        connect(roles.relay, application_name="test") as relay,
    ):
        assert server_identity(relay) is not None
        terminate = (
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE pid = %s AND backend_start < now()"
        )
        assert relay.execute(terminate, (deposed.info.backend_pid,)).fetchone() == (True,)
        with pytest.raises(psycopg.OperationalError):
            deposed.execute("SELECT 1")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            relay.execute("SELECT pg_terminate_backend(%s)", (other.info.backend_pid,))


def test_sessions_of_a_role_that_may_not_be_ended_do_not_keep_a_successor_from_the_term(
    roles: Roles, empty_database: str
) -> None:
    """The doctor suggests pg_read_all_stats, with which a successor of another role sees whose sessions they are."""
    first, second = (MarkSession(dsn, TABLE, "harvester test/mark", 10.0) for dsn in (roles.owner, roles.relay))
    with psycopg.connect(empty_database, autocommit=True) as admin, closing(first), closing(second):
        admin.execute(f"GRANT pg_read_all_stats TO {user(roles.relay)}".encode())
        row = first.read_term()
        assert first.take_term(row.term, 0, uuid4(), "first") == row.term + 1
        assert first.session is not None
        assert second.take_term(row.term + 1, 0, uuid4(), "second") == row.term + 2
        there = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s"
        assert admin.execute(there, (first.session[0],)).fetchone() == (1,)


def test_granting_again_takes_away_what_is_no_longer_needed(roles: Roles) -> None:
    place = GrantTarget.of(TABLE, None)
    with psycopg.connect(roles.owner, autocommit=True) as owner:
        owner.execute(f"GRANT ALL ON billing.outbox, billing.outbox_term TO {user(roles.relay)}".encode())
        owner.execute(f"GRANT UPDATE (kafka_key) ON billing.outbox TO {user(roles.relay)}".encode())
        owner.execute(script(place, relays=[user(roles.relay)]).encode())
    assert _allowed(roles.relay, RELAY_MAY_NOT, roles) == []


def test_an_archive_and_notices_need_more(roles: Roles) -> None:
    """And nothing of it is granted unless it is configured."""
    name = user(roles.relay)
    with psycopg.connect(roles.owner, autocommit=True) as owner, psycopg.connect(roles.relay, autocommit=True) as relay:
        for statement in create_archive(TABLE):
            owner.execute(statement.encode())
        owner.execute("INSERT INTO billing.outbox (kafka_topic) SELECT 't' FROM generate_series(1, 2)")
        owner.execute("UPDATE billing.outbox_term SET term = 1, holder = gen_random_uuid()")
        shape = schema.inspect(relay, TABLE)
        purge = settle.purge(TABLE, "rows", shape).replace("$1", "'{1}'")
        holder = owner.execute("SELECT holder FROM billing.outbox_term").fetchone()
        assert holder is not None
        poison = {
            "id": 2,
            "term": 1,
            "holder": holder[0],
            "xmin": None,
            "error": "e",
            "attempts": 1,
            "first_failed_at": None,
            "origin": None,
        }
        quarantine = settle.quarantine(TABLE, shape, "notices")
        for statement, parameters in ((purge, None), (quarantine, poison)):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                relay.execute(statement.encode(), parameters)
        place = GrantTarget.of(TABLE, schema.read_facts(owner, TABLE), archive=True, notices=True)
        owner.execute(script(place, relays=[name]).encode())
        relay.execute(purge.encode())
        assert relay.execute(quarantine.encode(), poison).fetchone() == (True, False, False)
        assert owner.execute("SELECT id, kafka_topic FROM billing.outbox").fetchall() == [(3, "notices")]
        assert owner.execute("SELECT id FROM billing.outbox_archive").fetchall() == [(1,)]
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            relay.execute("SELECT * FROM billing.outbox_archive")
        owner.execute(script(GrantTarget.of(TABLE, None, archive=True), relays=[name]).encode())
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            relay.execute("INSERT INTO billing.outbox (kafka_topic) VALUES ('t')")


def test_notices_with_headers_in_one_column(roles: Roles) -> None:
    """A notice is written into every column of a record."""
    with psycopg.connect(roles.owner, autocommit=True) as owner, psycopg.connect(roles.relay, autocommit=True) as relay:
        owner.execute(
            "ALTER TABLE billing.outbox DROP kafka_header_keys, DROP kafka_header_values, ADD kafka_headers jsonb"
        )
        config = Config(
            leader_group_id="billing", data_source=roles.relay, outbox_table="billing.outbox",
            poison={"notice_topic": "notices"},
        )  # fmt: skip
        name, facts = user(roles.relay), schema.read_facts(owner, TABLE)
        owner.execute(script(GrantTarget.of(TABLE, facts, notices=True), relays=[name]).encode())
        assert read_database(config).notices
        relay.execute(
            "INSERT INTO billing.outbox (create_time, kafka_topic, kafka_key, kafka_value, kafka_headers)"
            " VALUES (now(), 'notices', NULL, NULL, NULL)"
        )
        owner.execute(f"REVOKE INSERT (kafka_headers) ON billing.outbox FROM {name}".encode())
        assert read_database(config).notices is False


def test_the_owner_keeps_its_tables(roles: Roles) -> None:
    with psycopg.connect(roles.owner, autocommit=True) as owner:
        with pytest.raises(psycopg.errors.RaiseException, match="owns the outbox"):
            owner.execute(script(GrantTarget.of(TABLE, None), relays=[user(roles.owner)]).encode())
        owner.execute("ROLLBACK")
        owner.execute("INSERT INTO billing.outbox (kafka_topic) VALUES ('t')")


@pytest.mark.parametrize("role", ["public", "", "a\x00b"])
def test_everybody_is_no_role(role: str) -> None:
    with pytest.raises(ConfigurationError, match="not a role's name"):
        script(GrantTarget.of(TABLE, None), writers=[role])


@pytest.mark.parametrize("name", ['"O\'u""t % \\ {} %s box"', "outbox"])
def test_nasty_names_and_foreign_columns(empty_database: str, name: str) -> None:
    """The table of the original guide, its own columns beside ours, and a role with a name of its own kind."""
    table = OutboxTable.parse(name)
    with psycopg.connect(empty_database, autocommit=True) as owner, poor_role(empty_database) as dsn:
        role = 'o\'clock "$x$" \\ ' + user(dsn)
        owner.execute(f"ALTER ROLE {user(dsn)} RENAME TO {OutboxTable(None, role).sql}".encode())
        try:
            owner.execute(seed_ddl(table.sql).encode())
            owner.execute(f'ALTER TABLE {table.sql} ADD COLUMN "Tenant" TEXT'.encode())
            schema.init(owner, table)
            place = GrantTarget.of(table, schema.read_facts(owner, table))
            owner.execute(script(place, relays=[role], writers=[role]).encode())
            with psycopg.connect(make_conninfo(dsn, user=role), autocommit=True) as both:
                schema.inspect(both, table)
                assert Stasher(table).stash(both, OutboxRecord("t", "k", "v")) == 1
                both.execute(
                    f'INSERT INTO {table.sql} ("Tenant", create_time, kafka_topic, kafka_key, kafka_header_keys,'
                    " kafka_header_values) VALUES ('t', now(), 't', 'k', '{}', '{}')".encode()
                )
                both.execute(f"UPDATE {table.sql} SET leader_id = gen_random_uuid()".encode())
                both.execute(f"DELETE FROM {table.sql}".encode())
        finally:
            owner.execute(f"ALTER ROLE {OutboxTable(None, role).sql} RENAME TO {user(dsn)}".encode())


def test_the_command_prints_what_the_owner_runs(empty_database: str, tmp_path: Path) -> None:
    config = tmp_path / "h.toml"
    config.write_text(f'data_source = "{empty_database}"\n')
    with psycopg.connect(empty_database, autocommit=True) as owner, poor_role(empty_database) as dsn:
        schema.init(owner, OutboxTable.parse("outbox"))
        printed = run_cli("grants", "-f", str(config), "--relay", user(dsn))
        owner.execute(printed.stdout.encode())
        with psycopg.connect(dsn, autocommit=True) as relay:
            assert schema.inspect(relay, OutboxTable.parse("outbox")).schema == "public"
    offline = run_cli("grants", "--set", "data_source=host=127.0.0.1 port=1", "--relay", "r")
    assert "tables as created by `harvester init`" in offline.stderr
    assert 'GRANT SELECT ON SEQUENCE "public"."outbox_id_seq" TO "r"' in offline.stdout


def test_a_monitor_looks_and_changes_nothing(roles: Roles, tmp_path: Path) -> None:
    config = tmp_path / "h.toml"

    def asks_as(dsn: str) -> list[str]:
        config.write_text(f'data_source = "{dsn}"\noutbox_table = "billing.outbox"\n')
        commands = (("status",), ("dead", "list"), ("dead", "show", "7"))
        return [run_cli(*command, "-f", str(config), check=False).stderr for command in commands]

    with psycopg.connect(roles.owner, autocommit=True) as owner, poor_role(roles.admin) as dsn:
        owner.execute(
            "INSERT INTO billing.outbox_quarantine (id, incarnation, create_time, kafka_topic, error, attempts)"
            " SELECT 7, incarnation, now(), 't', 'refused', 1 FROM billing.outbox_term"
        )
        owner.execute(f"GRANT USAGE ON SCHEMA billing TO {user(dsn)}".encode())
        for said in asks_as(dsn):
            assert "GRANT SELECT ON" in said
            assert "UPDATE" not in said
        config.write_text(f'data_source = "{roles.owner}"\noutbox_table = "billing.outbox"\n')
        printed = run_cli("grants", "-f", str(config), "--monitor", user(dsn))
        owner.execute(printed.stdout.encode())
        assert asks_as(dsn) == ["", "", ""]
        assert "refused" in run_cli("dead", "list", "-f", str(config)).stdout
        assert "1 record" in run_cli("status", "-f", str(config)).stdout
        changes = {**RELAY_MAY_NOT, **{f"writer: {name}": text for name, text in WRITER_MAY_NOT.items()}}
        changes = {name: text for name, text in changes.items() if not text.startswith("SELECT") and "{" not in text}
        changes |= {
            "mark": "UPDATE billing.outbox SET leader_id = gen_random_uuid()",
            "purge": "DELETE FROM billing.outbox",
            "lock a row": "SELECT FROM billing.outbox FOR SHARE",
            "take the term": "UPDATE billing.outbox_term SET term = term + 1",
            "quarantine": "INSERT INTO billing.outbox_quarantine DEFAULT VALUES",
            "read leases": "SELECT * FROM billing.outbox_lease",
        }
        assert len(changes) > 20
        assert _allowed(dsn, changes, roles) == []
        refused = run_cli("dead", "discard", "--id", "7", "--yes", "--reason", "r", "-f", str(config), check=False)
        assert refused.returncode == 65
        assert "lacks privileges" in refused.stderr


def test_the_command_needs_a_role() -> None:
    done = run_cli("grants", check=False)
    assert done.returncode == 2
    assert "--relay" in done.stderr
