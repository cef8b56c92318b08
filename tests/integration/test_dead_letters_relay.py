"""Dead letters end to end: with a running harvester a refused record leaves its notice, goes back, or ends it; what
was published stands in the archive."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from harvester.errors import ExitCode, PoisonRecord
from harvester.outbox.key_order import ORIGIN_HEADER
from harvester.outbox.schema import init
from harvester.outbox.tables import OutboxTable
from tests.conftest import MakeTopic
from tests.support.cli import run_cli
from tests.support.harvesting import Scene, causal
from tests.support.hooks import Fault, Plan
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]

TABLE = OutboxTable.parse("outbox")
NO_TOPIC = "UNKNOWN_TOPIC_OR_PART"

_NOTE_TRANSACTIONS = """
    CREATE TABLE noted (what text, id bigint, xid bigint);
    CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO noted VALUES (TG_TABLE_NAME || ' ' || TG_OP, coalesce(NEW.id, OLD.id), txid_current());
        RETURN NULL;
    END $$;
    CREATE TRIGGER note AFTER INSERT OR DELETE ON outbox FOR EACH ROW EXECUTE FUNCTION note();
    CREATE TRIGGER note AFTER INSERT ON outbox_quarantine FOR EACH ROW EXECUTE FUNCTION note();
"""


def poison(scene: Scene, key: str = "p") -> int:
    """A record that the client refuses under `SMALL`."""
    (record,) = scene.add((key, "x" * 20_000))
    return record


SMALL: dict[str, Any] = {"producer_kafka_config": {"message.max.bytes": "10000"}}


@pytest.mark.parametrize("marking", ["memory", "table"])
def test_the_notice_of_a_refused_record_reaches_kafka(scene: Scene, make_topic: MakeTopic, marking: str) -> None:
    """It enters the outbox in the transaction in which the record leaves it, and comes before the key's next record."""
    notices = make_topic(1)
    scene.db.execute(_NOTE_TRANSACTIONS)
    scene.add(("p", "before"), ("q", "before"))
    record = poison(scene)
    scene.add(("p", "after"), ("q", "after"))
    with scene.embedded(poison={"policy": "quarantine", "notice_topic": notices}, marking=marking, **SMALL) as running:
        scene.wait_left()
        assert running.leadership() == ["LeaderAcquired"]
    assert scene.published() == {"p": ["before", "after"], "q": ["before", "after"]}
    [notice] = scene.log(notices)
    assert notice.key == b"p"
    said = json.loads(notice.value or b"")
    row = scene.db.execute("SELECT id, incarnation::text, error, attempts FROM outbox_quarantine").fetchone()
    assert row is not None
    assert (said["id"], said["incarnation"], said["error"], said["attempts"]) == row
    assert (said["id"], said["topic"], said["key"]) == (record, scene.topic, "p")
    assert "MSG_SIZE_TOO_LARGE" in said["error"]
    transactions = scene.db.execute(
        """SELECT array_agg(n.what || CASE n.id WHEN %(id)s THEN ' record' ELSE ' notice' END ORDER BY n.what)
           FROM noted n WHERE n.xid = (SELECT xid FROM noted WHERE what = 'outbox_quarantine INSERT')""",
        {"id": record},
    ).fetchone()
    assert transactions == (["outbox DELETE record", "outbox INSERT notice", "outbox_quarantine INSERT record"],)


def test_a_notice_that_is_refused_itself_breeds_no_other(scene: Scene, plan: Plan) -> None:
    missing = f"missing-{uuid.uuid4().hex}"
    plan.add(Fault(NO_TOPIC, key="p", times=4))  # twice the record, twice its notice, which has the same key
    (record,) = scene.add(("p", "1"))
    with scene.embedded(poison={"notice_topic": missing}, max_attempts=2):
        scene.wait_left()
    topics = dict(scene.db.execute("SELECT kafka_topic, id = %s FROM outbox_quarantine", (record,)).fetchall())
    assert topics == {scene.topic: True, missing: False}
    assert plan.struck() == 4
    assert scene.log(missing) == []


@pytest.mark.parametrize("marking", ["memory", "table"])
@pytest.mark.parametrize("archive", ["ids", "rows"])
def test_a_drain_leaves_every_published_record_in_the_archive(scene: Scene, archive: str, marking: str) -> None:
    init(scene.db, TABLE, archive=True)
    keys = ("a", "b", "c")
    with scene.db.transaction():
        ids = {
            scene.add((key, str(number)))[0]: (key.encode(), str(number).encode())
            for number in range(1, 51)
            for key in keys
        }
        refused = poison(scene)
    with scene.embedded(archive=archive, marking=marking, **SMALL):
        scene.wait_left()
    assert scene.published() == causal(keys, 50)
    assert scene.quarantined().keys() == {refused}
    found = scene.db.execute(
        """SELECT a.id, a.kafka_topic, a.kafka_key, a.kafka_value, a.incarnation = t.incarnation
           FROM outbox_archive a, outbox_term t ORDER BY a.id"""
    ).fetchall()
    expected = [
        (record, scene.topic, key, value if archive == "rows" else None, True) for record, (key, value) in ids.items()
    ]
    assert found == expected


def test_an_archive_that_is_missing_ends_the_harvester_before_it_publishes(scene: Scene) -> None:
    (record,) = scene.add(("a", "1"))
    with scene.cli(archive="ids") as running:
        assert running.wait() == ExitCode.SCHEMA
    assert "there is no archive" in running.output
    assert "harvester init" in running.output
    assert "Traceback" not in running.output
    assert scene.left() == [record]
    assert scene.published() == {}


@pytest.mark.parametrize("keyless", [False, True], ids=["key", "keyless"])
def test_a_record_goes_back_when_its_topic_is_there(scene: Scene, plan: Plan, keyless: bool) -> None:
    """The harvester runs all the while: refused for want of a topic, put back by the command, published."""
    missing = f"missing-{uuid.uuid4().hex}"
    key = None if keyless else "p"
    plan.add(Fault(NO_TOPIC, key="" if keyless else "p", times=2))  # never sent: or the broker would make the topic
    config = str(scene.config_file())
    with scene.embedded(max_attempts=2) as running:
        (record,) = scene.add((key, "value"), topic=missing)
        eventually(lambda: scene.quarantined().keys() == {record}, what="quarantine")
        assert "UNKNOWN_TOPIC_OR_PART" in scene.quarantined()[record]
        assert scene.log(missing) == []
        plan.heal()
        admin = AdminClient({"bootstrap.servers": scene.bootstrap, "broker.address.family": "v4"})
        admin.create_topics([NewTopic(missing, num_partitions=1)])[missing].result(30)
        listed = json.loads(run_cli("dead", "list", "-f", config, "--json").stdout)
        assert [found["id"] for found in listed["records"]] == [record]
        done = json.loads(run_cli("dead", "redrive", "-f", config, "--id", str(record), "--yes", "--json").stdout)
        scene.wait_left()
        assert running.leadership() == ["LeaderAcquired"]
    assert scene.quarantined() == {}
    [published] = scene.log(missing)
    assert published.value == b"value"
    assert published.key == (None if keyless else b"p")
    incarnation = scene.db.execute("SELECT incarnation::text FROM outbox_term").fetchone()
    assert incarnation is not None
    assert published.headers[:-1] == [(ORIGIN_HEADER, f"{incarnation[0]}:{record}".encode())]
    [redriven] = done["redriven"]
    assert redriven["new_id"] > record


def test_stop_ends_the_harvester_and_names_the_record(scene: Scene) -> None:
    """The row stays, and with it what stands behind it, until somebody has mended it."""
    scene.add(("p", "before"))
    record = poison(scene)
    (behind,) = scene.add(("p", "after"))
    with scene.cli(poison={"policy": "stop"}, **SMALL) as running:
        assert running.wait() == ExitCode.POISON  # 72
    assert f"record {record} cannot be published" in running.output
    assert "MSG_SIZE_TOO_LARGE" in running.output
    assert "Traceback" not in running.output
    assert scene.left() == [record, behind]
    assert scene.quarantined() == {}
    scene.db.execute("DELETE FROM outbox WHERE id = %s", (record,))
    with scene.cli("--until-empty", poison={"policy": "stop"}, **SMALL) as running:
        assert running.wait() == ExitCode.OK
    assert scene.published() == {"p": ["before", "after"]}


def test_stop_in_an_embedded_harvester_is_raised_to_the_host(scene: Scene) -> None:
    record = poison(scene)
    with scene.embedded(poison={"policy": "stop"}, **SMALL) as running:
        with pytest.raises(PoisonRecord, match=f"record {record} cannot be published") as stopped:
            running.harvester.wait(60)
        assert stopped.value.record_id == record
    assert scene.left() == [record]
