"""Load under which faults are injected: rows with a counter for each key, written in the background, and the check.

The counters stand in a table beside the outbox (`written`), raised in the transaction that inserts the rows, under a
lock on the key's counter. So the rows of a key are causally ordered, several writers may share a key, and what was
committed is known whatever happens to the connections: the database says it.

    with writing(scene, rate=600) as load:
        load.wait(1000)          # until so many rows more are committed
        ...                      # the fault
        load.wait(1000)
    repeats = verify(scene, load)
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg

from .consuming import Published
from .harvesting import Scene
from .hooks import sender
from .wait import eventually

_TABLE = """CREATE TABLE IF NOT EXISTS written (
    key text PRIMARY KEY, count bigint NOT NULL DEFAULT 0) WITH (fillfactor = 50)"""

# Locks in the order of the keys, so that two transactions never wait for each other in a circle.
_INSERT = """
    WITH wanted AS (
        SELECT key, place FROM unnest(%(keys)s::text[]) WITH ORDINALITY AS w(key, place)
    ), locked AS MATERIALIZED (
        SELECT key, count FROM written WHERE key = ANY(%(keys)s::text[]) ORDER BY key FOR UPDATE
    ), counted AS (
        UPDATE written AS s SET count = locked.count + more.rows
        FROM locked JOIN (SELECT key, count(*) AS rows FROM wanted GROUP BY key) AS more USING (key)
        WHERE s.key = locked.key
    ), numbered AS (
        SELECT place, key, count + row_number() OVER (PARTITION BY key ORDER BY place) AS seq
        FROM wanted JOIN locked USING (key)
    )
    INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values)
    SELECT clock_timestamp(), %(topic)s, key,
           rpad(seq || ':' || %(era)s || ':' || (extract(epoch FROM clock_timestamp()) * 1000)::bigint || ':',
                %(size)s, '.'),
           '{}', '{}'
    FROM numbered ORDER BY place"""

_RETRY_S = 0.05
_LATE_S = 0.03


@dataclass(frozen=True)
class Row:
    """What a value says: the number within the key, the era of the load, and when it was inserted."""

    seq: int
    era: int
    inserted_ms: int


def parse(value: bytes | str | None) -> Row:
    """Read a value of the load."""
    assert value is not None
    text = value.decode() if isinstance(value, bytes) else value
    seq, era, inserted_ms, _ = text.split(":", 3)
    return Row(int(seq), int(era), int(inserted_ms))


@dataclass
class Load:
    """A load that runs. `committed` counts rows whose commit came back; `losses` the errors that writers survived."""

    keys: Sequence[str]
    era: int = 1
    committed: int = 0
    losses: list[str] = field(default_factory=list)
    seconds: float = 0.0  # with commits: pauses of more than a second (the database's outages) left out
    _last_commit: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def rate_per_s(self) -> float:
        """Committed rows per second in which the database took any."""
        return self.committed / self.seconds if self.seconds else 0.0

    def wait(self, more: int, timeout_s: float = 60.0) -> None:
        """Until so many rows more are committed."""
        goal = self.committed + more
        eventually(
            lambda: self.committed >= goal, timeout_s, f"{more} more rows committed (errors: {self.losses[-3:]})"
        )

    def count(self, rows: int, now: float) -> None:
        """A transaction's commit has come back."""
        with self._lock:
            self.committed += rows
            if self._last_commit is not None and now - self._last_commit < 1.0:
                self.seconds += now - self._last_commit
            self._last_commit = now


@contextmanager
def writing(
    scene: Scene,
    *,
    rate: float = 600.0,
    keys: int = 50,
    writers: int = 2,
    batch: int = 6,
    seed: int = 1,
    era: int = 1,
    value_bytes: int = 40,
    dsn: str | None = None,
    topic: str | None = None,
    prefix: str = "key",
) -> Iterator[Load]:
    """Write rows at this rate (per second, in transactions of up to 2 * `batch` - 1 rows) until the block is left.

    One transaction in 20 is rolled back, one in 20 commits late, after others that began later. `dsn` is another way
    to the scene's database than its own.
    """
    names = [f"{prefix}-{number}" for number in range(keys)]
    scene.db.execute(_TABLE)
    with scene.db.cursor() as cursor:
        cursor.executemany("INSERT INTO written (key) VALUES (%s) ON CONFLICT DO NOTHING", [(name,) for name in names])
    load = Load(names, era)
    stop = threading.Event()
    where = dsn or scene.dsn
    values = {"topic": topic or scene.topic, "era": era, "size": value_bytes}
    threads = [
        threading.Thread(
            target=_write, args=(where, load, rate / writers, batch, seed * 1000 + n, values, stop), daemon=True
        )
        for n in range(writers)
    ]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads), "a writer does not end: is its server frozen?"


def _write(
    dsn: str, load: Load, rate: float, batch: int, seed: int, values: dict[str, Any], stop: threading.Event
) -> None:
    rng = random.Random(seed)
    connection: psycopg.Connection[Any] | None = None
    due = time.monotonic()
    while not stop.is_set():
        keys = rng.choices(load.keys, k=rng.randint(1, 2 * batch - 1))
        ending = rng.random()
        due = max(due + len(keys) / rate, time.monotonic() - 0.2)  # what an outage has cost is not made up for
        if stop.wait(max(0.0, due - time.monotonic())):
            break
        try:
            if connection is None:
                connection = psycopg.connect(dsn, connect_timeout=5, application_name="load", tcp_user_timeout=10_000)
            connection.execute(_INSERT, {**values, "keys": keys})
            if ending < 0.05:
                connection.rollback()
                continue
            if ending > 0.95:
                stop.wait(_LATE_S)
            connection.commit()
            load.count(len(keys), time.monotonic())
        except psycopg.Error as error:
            load.losses.append(str(error).splitlines()[0])
            if connection is not None:
                with contextlib.suppress(psycopg.Error):
                    connection.close()
            connection = None
            stop.wait(_RETRY_S)
    if connection is not None:
        with contextlib.suppress(psycopg.Error):
            connection.close()


def drain(scene: Scene, timeout_s: float = 90.0) -> None:
    """Wait until nothing stands in the outbox."""

    def empty() -> bool:
        row = scene.db.execute("SELECT count(*), min(id) FROM outbox").fetchone()
        assert row is not None
        last[:] = row
        return bool(row[0] == 0)

    last: list[Any] = []
    try:
        eventually(empty, timeout_s, "an empty outbox", interval_s=0.05)
    except AssertionError as error:
        raise AssertionError(f"{error}; rows left and the first id: {last}") from None


def committed(scene: Scene) -> dict[str, int]:
    """How many rows of each key were committed: the truth."""
    return dict(scene.db.execute("SELECT key, count FROM written").fetchall())


def rows_by_key(log: Sequence[Published]) -> dict[str, list[Row]]:
    """The load's records in the order of the log."""
    found: dict[str, list[Row]] = {}
    for record in log:
        assert record.key is not None
        found.setdefault(record.key.decode(), []).append(parse(record.value))
    return found


@dataclass(frozen=True)
class Findings:
    """What is wrong with a log, in words, and how many of its records are repeats."""

    lost: list[str]
    order: list[str]
    strange: list[str]
    repeats: int


def judge(counts: dict[str, int], found: dict[str, list[Row]], quarantined: int = 0) -> Findings:
    """Compare what was committed with what was delivered, key by key.

    Numbers of a key may only stay (a repeat with no successor before it) or grow by one (a first delivery; by more
    where a record of the key is in quarantine). `lost` allows for as many records as stand in quarantine.
    """
    lost, order, strange, repeats = [], [], [], 0
    for key, count in counts.items():
        numbers = [row.seq for row in found.get(key, [])]
        missing = sorted(set(range(1, count + 1)) - set(numbers))
        lost += [f"{key}/{number}" for number in missing]
        strange += [f"{key}/{number} was never committed" for number in sorted({n for n in numbers if n > count})]
        strange += _forged(key, found.get(key, []))
        repeats += len(numbers) - len(set(numbers))
        gone = set(missing) if quarantined else set()
        last = 0
        for number in numbers:
            if number != last and any(skipped not in gone for skipped in range(last + 1, number)):
                order.append(f"{key}: {number} after {last}")
            elif number < last:
                order.append(f"{key}: {number} again after {last}")
            last = number
    strange += [f"key {key!r} was never written" for key in found.keys() - counts.keys()]
    return Findings(lost if len(lost) > quarantined else [], order, strange, repeats)


def _forged(key: str, rows: Sequence[Row]) -> list[str]:
    """Numbers delivered with two contents: one of them was rolled back."""
    contents: dict[int, set[Row]] = {}
    for row in rows:
        contents.setdefault(row.seq, set()).add(row)
    return [f"{key}/{number} was delivered from two rows" for number, seen in contents.items() if len(seen) > 1]


def verify(scene: Scene, load: Load, *, timeout_s: float = 90.0, quarantined: int = 0, topic: str | None = None) -> int:
    """Wait until everything is delivered; lost 0, order violations 0 or AssertionError; the number of repeats.

    `quarantined`: so many records stand in quarantine, by the test's own doing.
    """
    drain(scene, timeout_s)
    in_quarantine = scene.quarantined()
    assert len(in_quarantine) == quarantined, f"in quarantine: {dict(list(in_quarantine.items())[:5])}"
    counts = committed(scene)
    assert sum(counts.values()) >= load.committed, "the database has lost commits that it had confirmed"
    log = scene.log(topic)
    findings = judge(counts, rows_by_key(log), quarantined)
    assert not findings.lost, f"{len(findings.lost)} lost: {findings.lost[:10]}"
    assert not findings.order, f"{len(findings.order)} out of order: {_story(log, findings.order[0])}"
    assert not findings.strange, f"{len(findings.strange)} strange: {findings.strange[:10]}"
    return findings.repeats


def _story(log: Sequence[Published], finding: str) -> str:
    """A finding, and all deliveries of its key from the first that came again: who sent what, and when."""
    key = finding.partition(":")[0].encode()
    found = [record for record in log if record.key == key]
    again = {value for value, count in Counter(record.value for record in found).items() if count > 1}
    first = next((place for place, record in enumerate(found) if record.value in again), 0)
    told = [
        f"{parse(each.value).seq} at {each.created_ms} by {sender(each.headers)} ({each.partition}@{each.offset})"
        for each in found[first:]
    ]
    return f"{finding}: {', '.join(told)}"


def longest_gap_ms(log: Sequence[Published]) -> int:
    """The longest time in which nothing was handed to a producer, between the log's first record and its last."""
    times = sorted(record.created_ms for record in log)
    return max((later - sooner for sooner, later in itertools.pairwise(times)), default=0)


def figure(name: str, value: float, unit: str) -> None:
    """Print a figure in the form that the documentation quotes."""
    print(f"FIGURE {name} {value:g} {unit}")
