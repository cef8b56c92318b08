"""P49: rows that a lane has committed are recognised by all that marks bring of them, and purged in a key's order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from harvester.delivery.progress import Progress, same_rows
from harvester.errors import DatabaseUnavailable
from harvester.outbox import purge_session
from harvester.outbox.leader_session import MarkSession
from harvester.outbox.purge_session import PurgeSession, Rules
from harvester.outbox.sql.queries import Row
from harvester.record import RowVersions
from tests.support.harvesting import Scene
from tests.support.marking import BOTH, TABLE
from tests.support.rows import progress_of

pytest_plugins = ["tests.support.scenes", "tests.support.mark_sessions"]
pytestmark = pytest.mark.servers

Sessions = Callable[[], MarkSession]


@pytest.fixture
def purging(scene: Scene) -> Iterator[PurgeSession]:
    session = PurgeSession(scene.dsn, TABLE, "test", Rules())
    session.ready()
    yield session
    session.close()


def read(sessions: Sessions, marking: str = "memory") -> list[Row]:
    """All rows, as a shard gets them."""
    session, holder = sessions(), uuid4()
    term = session.take_term(session.read_term().term, 0, holder, "test")
    assert term is not None
    leader_id = uuid4() if marking == "table" else None
    return session.mark(term=term, holder=holder, leader_id=leader_id, limit=10_000, high=None, gaps=())


def progress(rows: Sequence[Row]) -> Progress:
    """What a lane's record says of them."""
    return progress_of([row[2] for row in rows])


def purged(session: PurgeSession, named: Progress) -> list[int]:
    return session.delete_same(named.ids, lambda rows: same_rows(named, rows), named.incarnation)


@BOTH
def test_rows_are_the_same_when_they_are_read_again(
    scene: Scene, sessions: Sessions, purging: PurgeSession, marking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many they are, and whatever a mark has written into them; also from a session of another kind."""
    monkeypatch.setattr(purge_session, "_READ_IDS", 3)
    ids = scene.add(*((f"key-{number % 4}", str(number)) for number in range(10)), (None, None))
    named = progress(read(sessions, marking))
    assert list(named.ids) == ids
    scene.db.execute("DELETE FROM outbox WHERE id = %s", (ids[4],))
    assert purged(purging, named) == [each for each in ids if each != ids[4]]
    assert scene.left() == []
    assert purged(purging, named) == []


@pytest.mark.parametrize(
    "change",
    [
        "kafka_value = 'another'",
        "kafka_value = NULL",
        "kafka_key = 'another'",
        "kafka_topic = 'another'",
        "create_time = create_time + interval '1 microsecond'",
        "kafka_header_keys = '{h}', kafka_header_values = '{v}'",
    ],
)
def test_another_row_under_the_same_id_stays(
    scene: Scene, sessions: Sessions, purging: PurgeSession, change: str
) -> None:
    first, second = scene.add(("a", "1"), ("b", "1"))
    named = progress(read(sessions))
    scene.db.execute(f"UPDATE outbox SET {change} WHERE id = {first}".encode())
    assert purged(purging, named) == [second]
    assert scene.left() == [first]


def test_nothing_is_purged_ahead_of_an_older_row_of_its_key(
    scene: Scene, sessions: Sessions, purging: PurgeSession
) -> None:
    """That one is published, since nobody can tell that it was; it would come behind them, as the key's last word."""
    ids = scene.add(("a", "1"), ("b", "1"), ("a", "2"), (None, "1"), ("c", "1"), ("b", "2"), ("c", "2"), ("a", "3"))
    a1, _, a2, none, c1, _, c2, a3 = ids
    rows = [row for row in read(sessions) if row[0] in (a2, none, c1, a3)]
    assert purged(purging, progress(rows)) == [none, c1], "the purge of a1 was lost, and c2 is younger"
    assert scene.left() == [each for each in ids if each not in (none, c1)]
    scene.db.execute("DELETE FROM outbox WHERE id = %s", (a1,))
    assert purged(purging, progress(rows)) == [a2, a3]
    assert c2 in scene.left()


def test_ids_that_have_started_again_are_those_of_other_rows(
    scene: Scene, sessions: Sessions, purging: PurgeSession
) -> None:
    """P35 holds here, too: the session is with another id space than before, and does nothing more."""
    scene.add(("a", "1"))
    named = progress(read(sessions))

    def restart(rows: list[Row]) -> RowVersions:
        scene.db.execute("TRUNCATE outbox RESTART IDENTITY")
        scene.add(("b", "1"))
        return same_rows(named, rows)

    with pytest.raises(DatabaseUnavailable, match="started again"):
        purging.delete_same(named.ids, restart, named.incarnation)
    assert len(scene.left()) == 1


def test_a_row_that_is_locked_is_an_error_as_for_any_purge(
    scene: Scene, sessions: Sessions, purging: PurgeSession
) -> None:
    (record_id,) = scene.add(("a", "1"))
    named = progress(read(sessions))
    with scene.writer() as other:
        other.execute("SELECT FROM outbox WHERE id = %s FOR UPDATE", (record_id,))
        with pytest.raises(psycopg.errors.LockNotAvailable):
            purged(purging, named)
    purging.ready()
    assert purged(purging, named) == [record_id]


def test_nothing_is_named(purging: PurgeSession) -> None:
    def same(_rows: list[Row]) -> Any:
        raise AssertionError("nothing is read")

    assert purging.delete_same([], same, uuid4()) == []
