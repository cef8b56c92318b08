"""From one version of the schema to the next, with records in the tables and harvesters at work."""

from __future__ import annotations

import pytest

from harvester.outbox import shape
from harvester.outbox.schema import init
from harvester.outbox.sql import ddl
from harvester.outbox.tables import OutboxTable
from tests.support.cli import run_cli
from tests.support.harvesting import Scene, wait_leads

pytest_plugins = ["tests.support.scenes"]
pytestmark = pytest.mark.servers

OUTBOX = OutboxTable.parse("outbox")
NEWEST = ddl.schema_version()
ADDED = (
    "progress_topic", "origin", "holder_kind", "lease_until", "wanted_by", "wanted_until",
    "leader_group", "kafka_cluster", "closed_floor", "open_ids", "floor_space",
)  # fmt: skip


@pytest.fixture
def old(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """An outbox as version 1 of the schema had it, with records in it and one in quarantine."""
    scene.db.execute("DROP TABLE outbox, outbox_term, outbox_quarantine, outbox_lease CASCADE")
    with monkeypatch.context() as older:
        older.setattr(ddl, "MIGRATIONS", ())
        for name in ("TERM_COLUMNS", "QUARANTINE_COLUMNS"):
            older.setattr(shape, name, [column for column in getattr(shape, name) if column not in ADDED])
        init(scene.db, OUTBOX)
    scene.add(*((f"k{number % 3}", str(number)) for number in range(30)))
    scene.db.execute(
        """INSERT INTO outbox_quarantine (id, incarnation, kafka_topic, kafka_key, kafka_value, error, attempts)
           SELECT 0, incarnation, %s, 'k', 'v', 'refused', 1 FROM outbox_term""",
        (scene.topic,),
    )
    return scene


def version(scene: Scene) -> int:
    return int(scene.db.execute("SELECT schema_version FROM outbox_term").fetchall()[0][0])


def test_init_migrates_a_schema_with_records_in_it(old: Scene) -> None:
    assert version(old) == 1
    config = str(old.config_file())
    refused = run_cli("start", "-f", config, check=False)
    assert refused.returncode == 65
    assert "run `harvester init`" in refused.stderr
    assert "Traceback" not in refused.stderr
    before = old.left()

    done = run_cli("init", "-f", config)
    assert f"migrated the schema from version 1 to {NEWEST}" in done.stdout + done.stderr
    assert (version(old), old.left()) == (NEWEST, before)

    run_cli("start", "-f", config, "--until-empty")
    assert old.left() == []
    assert old.published() == {f"k{key}": [str(number) for number in range(key, 30, 3)] for key in range(3)}
    assert old.quarantined() == {0: "refused"}


def test_a_newer_schema_is_refused_in_one_line(scene: Scene) -> None:
    scene.db.execute("UPDATE outbox_term SET schema_version = %s", (NEWEST + 1,))
    done = run_cli("start", "-f", str(scene.config_file()), check=False)
    assert done.returncode == 65
    said = [line for line in done.stderr.splitlines() if line.startswith("harvester: ")]
    assert said == [
        f'harvester: the schema of "outbox" has version {NEWEST + 1}, but this harvester only supports {NEWEST}'
    ]
    assert "hint: use a newer harvester: one has migrated the database" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_leader_of_the_version_before_goes_on_while_its_session_lasts(scene: Scene) -> None:
    """So machines may be changed one after the other: `init` of the next version stops nobody. Then it hands over."""
    with scene.cli() as running:
        wait_leads(running)
        scene.add(("k", "1"))
        scene.wait_left()
        scene.db.execute("UPDATE outbox_term SET schema_version = %s", (NEWEST + 1,))
        scene.add(("k", "2"))
        scene.wait_left()
        for pid in scene.sessions("harvester test"):
            scene.db.execute("SELECT pg_terminate_backend(%s)", (pid,))
        running.wait_for_line("use a newer harvester: one has migrated the database")
        running.wait_for_line("fenced: the database has been out of reach")  # another one may lead
        assert running.stop() == 0
    assert scene.published() == {"k": ["1", "2"]}
