"""P9: a database that is another one than before: nothing is purged there on the word of the old one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from harvester import LeaderAcquired
from harvester.neli.heartbeat import decode
from harvester.outbox.leader_session import MarkSession, TermSession
from harvester.outbox.tables import OutboxTable
from tests.support import places
from tests.support.harvesting import Scene, causal, wait_leads
from tests.support.hooks import Plan
from tests.support.marking import BOTH
from tests.support.proxy import Proxy
from tests.support.servers import Servers
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]

TABLE = OutboxTable.parse("outbox")


class Copy:
    """A second database, as a copy was made of the first; `swap` puts it in its place."""

    def __init__(self, servers: Servers, dsn: str) -> None:
        self._admin = servers.dsn
        self._name = str(conninfo_to_dict(dsn)["dbname"])
        self._copy = f"{self._name}_copy"
        self.dsn = make_conninfo(dsn, dbname=self._copy)

    def make(self) -> None:
        self._run("CREATE DATABASE {} TEMPLATE {}", self._copy, self._name)

    def swap(self) -> None:
        """Nobody may be connected to either."""
        self._run("ALTER DATABASE {} RENAME TO {}", self._name, f"{self._name}_old")
        self._run("ALTER DATABASE {} RENAME TO {}", self._copy, self._name)

    def drop(self) -> None:
        for name in (self._copy, f"{self._name}_old"):
            self._run("DROP DATABASE IF EXISTS {} WITH (FORCE)", name)

    def wait_alone(self) -> None:
        """Until nobody is connected to the first."""
        with psycopg.connect(self._admin, autocommit=True) as admin:
            query = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s"
            eventually(lambda: admin.execute(query, (self._name,)).fetchone() == (0,), what="an unused database")

    def _run(self, statement: str, *names: str) -> None:
        with psycopg.connect(self._admin, autocommit=True) as admin:
            admin.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))


@pytest.fixture
def copy(servers: Servers, scene: Scene) -> Iterator[Copy]:
    made = Copy(servers, scene.dsn)
    yield made
    made.drop()


@pytest.fixture
def postgres(scene: Scene) -> Iterator[Proxy]:
    """A proxy in front of PostgreSQL."""
    parts = conninfo_to_dict(scene.dsn)
    with Proxy(f"{parts.get('host') or '127.0.0.1'}:{parts.get('port') or 5432}") as proxy:
        proxy.open()
        yield proxy


@BOTH
def test_a_database_that_has_gone_back_in_time_loses_nothing(
    scene: Scene, plan: Plan, copy: Copy, postgres: Proxy, marking: str
) -> None:
    """The ids of what was acknowledged and not yet purged belong to other rows there."""
    scene.db.close()
    copy.wait_alone()
    copy.make()
    scene.db = psycopg.connect(scene.dsn, autocommit=True)
    through = make_conninfo(scene.dsn, host="127.0.0.1", port=postgres.port)
    with scene.embedded(marking=marking, data_source=through) as running:
        first = running.wait_leading()
        with scene.writer() as other:
            with plan.blocked("marker.marked") as reached:
                with scene.db.transaction():
                    ids = scene.add(("a", "1"), ("b", "1"), ("c", "1"))
                reached()
                other.execute("SELECT FROM outbox FOR UPDATE")
            eventually(lambda: len(scene.published()) == 3, what="the acknowledgements, whose purges wait")
            postgres.cut()
        scene.db.close()
        with psycopg.connect(copy.dsn, autocommit=True) as restored:
            row = restored.execute("SELECT incarnation FROM outbox_term").fetchone()
            assert row is not None
            assert scene.add(("x", "1"), ("y", "1"), ("z", "1"), db=restored) == ids
        copy.wait_alone()
        copy.swap()
        postgres.open()
        second = running.wait_for(LeaderAcquired, 2)
        assert second.term > first.term
        scene.db = psycopg.connect(scene.dsn, autocommit=True)
        scene.wait_left()
        assert scene.db.execute("SELECT incarnation FROM outbox_term").fetchone() != row
        scene.add(*((key, "2") for key in "xyz"))
        scene.wait_left()
        eventually(lambda: running.harvester.status().problem is None, what="no problem any more")
    assert scene.published() == causal("abc", 1) | causal("xyz", 2)


@BOTH
def test_a_promoted_server_is_noticed_and_what_was_not_purged_is_repeated(scene: Scene, marking: str) -> None:
    """Repeat rather than lose: the acknowledged row may stand there for another one."""
    with scene.cli(env=places.env(scene.plan), marking=marking, shards=2) as running:
        _, first_term = wait_leads(running)
        with scene.writer() as other:
            with scene.plan.blocked("marker.marked") as reached:
                (locked, _) = scene.add(("a", "1"), ("b", "1"))
                reached()
                other.execute("SELECT FROM outbox WHERE id = %s FOR UPDATE", (locked,))
            scene.wait_left(locked)
            before = scene.db.execute("SELECT incarnation, timeline FROM outbox_term").fetchone()
            assert before is not None
            places.promote(scene.plan, before[1] + 1)
            scene.db.execute(
                """SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
                   WHERE datname = current_database() AND application_name LIKE 'harvester%'"""
            )
            running.wait_for_line("the database is a different one: it is server")
            changed = "SELECT incarnation <> %s AND timeline = %s AND term > %s FROM outbox_term"
            expected = (before[0], before[1] + 1, first_term)
            eventually(lambda: scene.db.execute(changed, expected).fetchone() == (True,), what="another incarnation")
            assert scene.left() == [locked]
            other.rollback()
        scene.wait_left()
        scene.add(("a", "2"), ("b", "2"))
        scene.wait_left()
        assert running.stop() == 0
    assert scene.published() == {"a": ["1", "1", "2"], "b": ["1", "2"]}


def test_a_new_connection_to_the_same_server_changes_nothing(scene: Scene) -> None:
    with scene.embedded() as running:
        running.wait_leading()
        before = scene.db.execute("SELECT incarnation, term FROM outbox_term").fetchone()
        scene.add(("a", "1"))
        scene.wait_left()
        pids = running.pids()
        scene.db.execute(
            """SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
               WHERE datname = current_database() AND application_name LIKE 'harvester%'"""
        )
        scene.add(("a", "2"), ("b", "1"))
        scene.wait_left()
        assert scene.db.execute("SELECT incarnation, term FROM outbox_term").fetchone() == before
        assert running.pids() == pids
    assert scene.published() == {"a": ["1", "2"], "b": ["1"]}


@pytest.mark.parametrize(
    ("identifier", "timeline", "renewed"),
    [(0, 0, False), (0, 1, True), (1, 0, True)],
    ids=["same", "promoted", "another"],
)
def test_a_take_over_renews_the_incarnation_on_another_server(
    scene: Scene, identifier: int, timeline: int, renewed: bool
) -> None:
    session = MarkSession(scene.dsn, TABLE, "test", 30.0)
    session.open()
    try:
        assert session.renew_incarnation() is False  # the first one to look has nothing to compare with
        before = session.read_term().incarnation
        assert session.place is not None
        assert session.place.server is not None
        known = session.place.server
        session.place = replace(session.place, server=(known[0] + identifier, known[1] + timeline))
        assert session.renew_incarnation() is renewed
        assert (session.read_term().incarnation != before) is renewed
        assert session.renew_incarnation() is False  # once
        session.place = replace(session.place, server=None)  # it cannot be told: nothing follows from that
        assert session.renew_incarnation() is False
        noted = scene.db.execute("SELECT system_identifier, timeline FROM outbox_term").fetchone()
        assert noted == (known[0] + identifier, known[1] + timeline)
    finally:
        session.close()


def test_a_row_that_has_gone_back_is_noticed_though_the_take_over_fails_once_it_has_the_term(scene: Scene) -> None:
    """That term is above all that anybody has seen: the next attempt finds nothing strange in the row."""
    topic = scene.config().leader_topic
    scene.db.execute("UPDATE outbox_term SET term = 10")
    with scene.member() as running:
        term = running.wait_leading().term

        def told() -> bool:
            beats = [decode(record.value) for record in scene.log(topic)]
            return any(beat is not None and beat.term == term for beat in beats)

        eventually(told, what="its term in a heartbeat")
    scene.db.execute("UPDATE outbox_term SET term = 5")
    before = scene.db.execute("SELECT incarnation FROM outbox_term").fetchone()
    renew, failures = TermSession.renew_incarnation, [psycopg.OperationalError("the connection is lost")]

    def fail_once(session: TermSession) -> bool:
        if failures:
            raise failures.pop()
        return renew(session)

    with mock.patch.object(TermSession, "renew_incarnation", fail_once), scene.member() as running:
        assert running.wait_leading().term > term
    assert not failures
    assert scene.db.execute("SELECT incarnation FROM outbox_term").fetchone() != before
