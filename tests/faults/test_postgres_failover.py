"""Failover to a standby that lacks the primary's latest commits, its latest term among them (protocol P9).

What the survivor holds reaches Kafka, in order; ids that it gives out a second time are other records, and nothing
that was acknowledged before counts for them. What only the dead primary held is gone, for its writers too.

Exactly once, rows that Kafka has committed are recognised in the survivor, and are not published again (P49).
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from harvester.outbox.schema import init
from harvester.outbox.tables import OutboxTable
from tests.support.cli import RunningCli
from tests.support.harvesting import Scene, wait_leads
from tests.support.private import Private, private
from tests.support.proxy import Proxy
from tests.support.servers import Servers
from tests.support.standby import Standby, standby_of
from tests.support.wait import eventually
from tests.support.writing import Row, committed, drain, figure, rows_by_key, writing

pytest_plugins = ["tests.support.scenes"]

ROWS = 500
MORE_THAN_THE_SEQUENCE_SKIPS = 50  # a promoted sequence goes on up to 32 further than what was logged


@pytest.fixture
def primary(servers: Servers) -> Iterator[Private]:
    """Dead after each test, so there is one for each."""
    with private(servers, "postgres") as server:
        yield server


@pytest.fixture
def scene(primary: Private, tmp_path: Path) -> Iterator[Scene]:
    with primary.scene(tmp_path) as made:
        yield made
        primary.start()  # so that its databases can be dropped


@pytest.fixture
def standby(primary: Private, scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standby]:
    with standby_of(primary, tmp_path_factory.mktemp("standby")) as made:
        yield made


@pytest.fixture
def address(scene: Scene) -> Iterator[Proxy]:
    """The address under which clients know PostgreSQL, whichever server that is."""
    parts = conninfo_to_dict(scene.dsn)
    with Proxy(f"{parts['host']}:{parts['port']}") as proxy:
        proxy.open()
        yield proxy


def fail_over(scene: Scene, primary: Private, standby: Standby, address: Proxy) -> psycopg.Connection[Any]:
    """The primary dies, the standby takes over; `address` is still cut. A session with the survivor."""
    address.cut()
    primary.stop(kill=True)
    standby.promote()
    address.retarget(standby.address)
    host, _, port = standby.address.rpartition(":")
    return psycopg.connect(make_conninfo(scene.dsn, host=host, port=port), autocommit=True)


def incarnation(scene: Scene) -> UUID:
    row = scene.db.execute("SELECT incarnation FROM outbox_term").fetchone()
    assert row is not None
    return UUID(str(row[0]))


def through(scene: Scene, address: Proxy) -> str:
    return make_conninfo(scene.dsn, host="127.0.0.1", port=address.port)


def test_the_survivor_lacks_the_latest_term_and_rows(
    scene: Scene, primary: Private, standby: Standby, address: Proxy
) -> None:
    dsn = through(scene, address)
    with scene.cli(name="one", data_source=dsn) as first, scene.cli(name="two", data_source=dsn) as running:
        leader, _, first_term = wait_one_leads(first, running)
        other = running if leader is first else first
        with writing(scene, dsn=dsn) as load:
            load.wait(ROWS)
            standby.leave_behind(scene.db)
            assert leader.stop() == 0
            _, term = wait_leads(other)  # a term that the survivor does not know
            load.wait(ROWS)
            before = incarnation(scene)
            survivor = fail_over(scene, primary, standby, address)
        scene.db = survivor
        assert scene.term() == first_term < term
        surviving = committed(scene)
        address.open()
        eventually(lambda: scene.term() > term, what="a term above all that were seen")
        _finish(scene, dsn, surviving, load.committed)
        assert incarnation(scene) != before
        assert other.stop() == 0


def wait_one_leads(*running: RunningCli) -> tuple[RunningCli, str, int]:
    """The first of them to lead, its leader id and term."""
    leads = eventually(lambda: [each for each in running if "leads as" in each.output], what="a leader")
    return leads[0], *wait_leads(leads[0])


def _finish(scene: Scene, dsn: str, surviving: dict[str, int], confirmed: int) -> None:
    """Write more, wait, and compare the topic with what the survivor says was committed."""
    with writing(scene, dsn=dsn, era=2) as load:
        load.wait(ROWS)
    drain(scene)
    counts = committed(scene)
    found = rows_by_key(scene.log())
    repeats = 0
    for key, count in counts.items():
        wanted = list(range(1, count + 1))
        # The history that survived; what else stands in the topic is the dead primary's.
        ours = [row for row in found[key] if row.era == 2 or row.seq <= surviving[key]]
        assert not set(wanted) - {row.seq for row in ours}, f"{key} lost records"
        repeats += len(ours) - len({row.seq for row in ours})
        assert _last_deliveries(ours) == wanted, f"order of {key}"
    figure("postgresql_failover_commits_lost_by_the_server", confirmed - sum(surviving.values()), "records")
    figure("postgresql_failover_repeats", repeats, "records")


def _last_deliveries(rows: list[Row]) -> list[int]:
    """Each number once, at its last place: what repeats after the failover say in the end."""
    return list(dict.fromkeys(row.seq for row in reversed(rows)))[::-1]


def test_a_purge_from_before_is_not_applied_to_ids_given_out_again(
    scene: Scene, primary: Private, standby: Standby, address: Proxy
) -> None:
    """Acknowledged, not yet purged, as the primary dies: the survivor gives the same ids to other rows."""
    with Proxy(scene.bootstrap, kafka=True) as kafka:
        kafka.open()
        given: dict[str, Any] = {"session_timeout": "20s", "drain_interval": "10s"}  # acknowledgements may take 9.5 s
        # One request for each partition: the client sends no more than so many that are unanswered.
        producer = {"linger.ms": "300", "max.in.flight.requests.per.connection": "5"}
        given["producer_kafka_config"] = {"bootstrap.servers": kafka.address, **producer}
        with scene.cli(data_source=through(scene, address), **given) as running:
            wait_leads(running)
            first = scene.add(*((f"first-{number}", "1") for number in range(20)))  # both shards know the topic now
            scene.wait_left()
            standby.leave_behind(scene.db)
            kafka.freeze(up=False)  # no acknowledgement comes back
            with scene.db.transaction():
                old = scene.add(*((f"old-{number}", "old") for number in range(2 * MORE_THAN_THE_SEQUENCE_SKIPS)))
            eventually(lambda: len(scene.published()) == len(first + old), what="all of them in the topic")
            before = incarnation(scene)
            scene.db = fail_over(scene, primary, standby, address)
            assert scene.left() == []
            new = scene.add(*((f"new-{number}", "new") for number in range(2 * MORE_THAN_THE_SEQUENCE_SKIPS)))
            assert set(new) & set(old), "no id was given out again: the test proves nothing"
            kafka.thaw()
            address.open()
            scene.wait_left()
            published = scene.published()
            missing = [f"new-{number}" for number in range(len(new)) if published.get(f"new-{number}") != ["new"]]
            assert not missing, f"{len(missing)} of {len(new)} lost or repeated: {missing[:10]}"
            eventually(lambda: incarnation(scene) != before, what="a new incarnation")
            assert running.stop() == 0


EXACTLY_ONCE: dict[str, Any] = {"delivery": "exactly-once", "shards": 1, "session_timeout": "30s"}


def wait_for_standby(scene: Scene) -> None:
    """It has all that was committed by now."""
    caught_up = "SELECT bool_and(replay_lsn >= pg_current_wal_lsn()) FROM pg_stat_replication"
    eventually(lambda: scene.db.execute(caught_up).fetchone() == (True,), what="a standby with all commits")


def test_exactly_once_nothing_is_repeated_where_no_commit_is_lost(
    scene: Scene, primary: Private, standby: Standby, address: Proxy
) -> None:
    """P49: what Kafka has committed is purged in the survivor before anything is published."""
    rows = [(f"k{number}", "1") for number in range(20)]
    given = {**EXACTLY_ONCE, "archive": "ids"}
    init(scene.db, OutboxTable.parse("outbox"), archive=True)
    with scene.cli(data_source=through(scene, address), env=scene.plan.env, **given) as running:
        wait_leads(running)
        before = incarnation(scene)
        with scene.plan.blocked("shard.committed") as reached:
            with scene.db.transaction():
                old = scene.add(*rows)
            reached()  # Kafka has committed, the database has deleted nothing
            wait_for_standby(scene)
            scene.db = fail_over(scene, primary, standby, address)
            assert scene.left() == old
            address.open()
        scene.wait_left()
        assert incarnation(scene) != before
        archived = "SELECT array_agg(id ORDER BY id) FROM outbox_archive WHERE incarnation = %s"
        assert scene.db.execute(archived, (before,)).fetchone() == (old,), "as in the headers of their records"
        scene.add(*((key, "2") for key, _ in rows))
        scene.wait_left()
        assert running.stop() == 0
    assert scene.published() == {key: ["1", "2"] for key, _ in rows}


@pytest.mark.parametrize(
    "successor",
    [{}, {"shards": 3}, {"delivery": "at-least-once"}],
    ids=["as before", "more shards", "at least once"],
)
def test_exactly_once_whoever_leads_after_the_failover_repeats_nothing(
    scene: Scene, primary: Private, standby: Standby, address: Proxy, successor: dict[str, Any]
) -> None:
    """The leader is lost together with its server, with rows of the same keys that it has read and not published."""
    keys = [f"k{number}" for number in range(20)]
    given = {**EXACTLY_ONCE, "session_timeout": "6s", "data_source": through(scene, address)}
    with scene.cli(env=scene.plan.env, **given) as running:
        wait_leads(running)
        with scene.plan.blocked("shard.committed") as reached:
            with scene.db.transaction():
                scene.add(*((key, "1") for key in keys))
            reached()
            scene.add(*((key, "2") for key in keys))
            wait_for_standby(scene)
            scene.db = fail_over(scene, primary, standby, address)
            running.stop(signal.SIGKILL)
    address.open()
    with scene.cli(name="successor", **{**given, **successor}) as running:
        scene.wait_left(timeout_s=60.0)
        scene.add(*((key, "3") for key in keys))
        scene.wait_left()
        assert running.stop() == 0
    assert scene.published() == {key: ["1", "2", "3"] for key in keys}


def test_exactly_once_rows_that_have_the_ids_of_committed_ones_are_published(
    scene: Scene, primary: Private, standby: Standby, address: Proxy
) -> None:
    """P49. They differ in nothing but the time of creation. Those that the survivor has are not repeated."""
    kept = [(f"kept-{number}", "1") for number in range(20)]
    with scene.cli(data_source=through(scene, address), env=scene.plan.env, **EXACTLY_ONCE) as running:
        wait_leads(running)
        with scene.plan.blocked("shard.committed") as reached:
            with scene.plan.blocked("marker.mark") as marking:
                marking()
                scene.add(*kept)
                standby.leave_behind(scene.db)
                lost = scene.add(*((f"lost-{number}", "1") for number in range(2 * MORE_THAN_THE_SEQUENCE_SKIPS)))
            reached()
            named = set(scene.published())  # by the progress record: the shard is held behind its first transaction
            scene.db = fail_over(scene, primary, standby, address)
            assert len(scene.left()) == len(kept)
            names = {record_id: f"lost-{number}" for number, record_id in enumerate(lost)}
            again: list[str] = []
            (last,) = scene.add(("first", "1"))
            while last < lost[-1]:
                again.append(names[last + 1])
                (last,) = scene.add((again[-1], "1"))
            assert len(named.intersection(again)) > 5, "few ids were given out again: the test proves little"
            address.open()
        scene.wait_left()
        assert running.stop() == 0
    published = scene.published()
    assert {key: published[key] for key, _ in kept} == {key: ["1"] for key, _ in kept}
    assert published["first"] == ["1"]
    assert {name: published[name] for name in again if name in named} == {
        name: ["1", "1"] for name in again if name in named
    }
    assert [name for name in again if name not in published] == []
