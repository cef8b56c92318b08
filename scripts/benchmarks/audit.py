"""`audit`: a lake compared with the archive of as many records, as it is and with defects of each kind in it."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

from harvester.outbox.archive import create_archive
from harvester.outbox.tables import OutboxTable
from scripts.benchmarks._harvest import CREATED_AT, Harvest, harvested
from scripts.benchmarks._lake import CONF
from scripts.benchmarks._place import Place, fresh
from scripts.benchmarks._scenario import Bench, Samples, Scenario
from scripts.benchmarks._worker import Gate, worker

_TABLE = OutboxTable(None, "outbox")
_BATCH = 2_000_000
_SETTLED = 1_000
_SPAN_US = 6 * 3_600_000_000  # of a day; the end of a lake is not judged, nor what was purged after it
_LONGEST_S = 3_600.0
# Only a proof compares contents; only an audit of everything looks at the order and the numbers.
PROOF_FINDS = {"lost": 1, "repeated": 1, "not as archived": 2, "not in the history": 1}
AUDIT_FINDS = {
    "lost": 1, "repeated": 1, "delivered after a successor": 1, "gap in a lane": 1, "not in the history": 1,
}  # fmt: skip


def audit(bench: Bench, samples: Samples) -> None:
    """The times of both kinds of audits, with Spark warm. Fails if one finds more or less than was planted.

    `proof_s` and `proof_planted_s` are `audit --incremental` over all records, `audit_s` and `audit_planted_s` an audit
    of everything, `lake_s` the lake's own time; `per_million_s` divides by millions of records.
    """
    size = bench.share(100, least=20_000)
    for number in bench.each_round():
        with fresh(bench) as place, ExitStack() as kept:
            harvest = Harvest(
                size, size // 10, repeats=0, incarnation=_with_archive(place), settled=_SETTLED, dated=True,
                every_us=_SPAN_US // size,
            )  # fmt: skip
            with _archiving(place) as archive:
                topic = kept.enter_context(harvested(bench, harvest, sent=archive))
            job = kept.enter_context(
                worker(
                    f"{__name__}:audited", bootstrap=bench.bootstrap, dsn=place.dsn, topic=topic, size=size,
                    keys=harvest.keys, place=str(bench.place),
                )
            )  # fmt: skip
            job.start()
            seconds: dict[str, float] = job.result(_LONGEST_S)
        for name, value in seconds.items():
            samples.add(name, value)
            samples.add(f"per_million_s.{name.removesuffix('_s')}", value / size * 1e6)
        took = ", ".join(f"{name} {value:.1f}" for name, value in seconds.items())
        bench.say(f"round {number}: {size:,} records: {took}")


def _with_archive(place: Place) -> UUID:
    """Creates the archive; the columns that are the same for all rows get defaults. Returns the incarnation."""
    with place.connect() as connection:
        row = connection.execute(f"SELECT incarnation FROM {_TABLE.term}").fetchone()
        assert row is not None
        for statement in create_archive(_TABLE):
            connection.execute(statement)
        defaults = {
            "incarnation": f"'{row[0]}'", "purged_at": f"'{CREATED_AT.isoformat()}'",
            "create_time": f"'{CREATED_AT.isoformat()}'",
            "kafka_header_keys": "'{}'", "kafka_header_values": "'{}'",
        }  # fmt: skip
        for column, value in defaults.items():
            connection.execute(f"ALTER TABLE {_TABLE.archive} ALTER {column} SET DEFAULT {value}")
        return UUID(str(row[0]))


@contextmanager
def _archiving(place: Place) -> Iterator[Callable[[str, int, str, str], None]]:
    statement = f"COPY {_TABLE.archive} (kafka_topic, id, kafka_key, kafka_value) FROM STDIN"
    with place.connect() as connection, connection.cursor() as cursor, cursor.copy(statement) as rows:
        yield lambda topic, number, key, value: rows.write_row((topic, number, key.encode(), value.encode()))


def audited(gate: Gate, **given: Any) -> dict[str, float]:
    """In the worker: fills a lake, and audits it before and after defects were planted."""
    from harvester.pipeline.audit import job, proof
    from harvester.pipeline.formats import open_store
    from harvester.pipeline.lake.job import LakeSettings
    from harvester.pipeline.lake.job import run as run_lake
    from harvester.pipeline.session import SessionSettings, session

    seconds: dict[str, float] = {}
    size, topic, kafka = given["size"], given["topic"], {"bootstrap.servers": str(given["bootstrap"])}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        begun = time.monotonic()
        yield
        seconds[name] = time.monotonic() - begun

    def both(suffix: str, proof_finds: dict[str, int], audit_finds: dict[str, int]) -> None:
        with timed(f"proof{suffix}_s"):
            report, proofs = proof.run(spark, settings)
        if (proved := sum(one.to_id - one.from_id for one in proofs)) < size - 3 * _SETTLED:
            raise SystemExit(f"only {proved:,} ids of {size:,} were proved")
        _expect(report, proof_finds)
        with timed(f"audit{suffix}_s"):
            report = job.run(spark, settings)
        _expect(report, audit_finds)
        if report.figures["archived"] < size - 1:
            raise SystemExit(f"the audit judged only {report.figures['archived']:,} archived records of {size:,}")

    with (
        tempfile.TemporaryDirectory(dir=given["place"]) as root,
        session(SessionSettings("bench", None, CONF)) as spark,
    ):
        gate.ready()
        lake = str(Path(root) / "lake")
        with timed("lake_s"):
            run_lake(spark, LakeSettings((topic,), lake, kafka, once=True, most_records=_BATCH, fold_s=math.inf))
        settings = job.AuditSettings(lake=lake, kafka=kafka, dsn=given["dsn"], table=_TABLE)
        both("", {}, {})
        store = open_store(spark, lake)
        _plant(store, given["dsn"], size, given["keys"])
        store.change(f"DELETE FROM {store.at('proofs')}")  # so that everything is compared once more
        both("_planted", PROOF_FINDS, AUDIT_FINDS)
    return seconds


def _plant(store: Any, dsn: str, size: int, keys: int) -> None:
    """One record each: missing, twice, with another value, with another key, swapped, and missing in the archive."""
    import psycopg

    silver, step = store.at("silver"), size // 10
    lost, twice, value, key, early, unknown = (number * step + 7 for number in range(1, 7))
    rows = store.table("silver")
    first, second = (rows.where(f"id = {one}").select("offset").collect()[0][0] for one in (early, early + keys))
    store.append(rows.where(f"id = {twice}"), "silver")
    for change in (
        f"DELETE FROM {silver} WHERE id = {lost}",
        f"UPDATE {silver} SET value = X'00' WHERE id = {value}",
        f"UPDATE {silver} SET key = X'00' WHERE id = {key}",
        f"UPDATE {silver} SET offset = CASE id WHEN {early} THEN {second} ELSE {first} END"
        f" WHERE id IN ({early}, {early + keys})",
    ):
        store.change(change)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"DELETE FROM {_TABLE.archive} WHERE id = {unknown}")


def _expect(report: Any, wanted: dict[str, int]) -> None:
    found: dict[str, int] = {}
    for one in report.found:
        found[str(one.kind)] = found.get(str(one.kind), 0) + one.count
    if found != wanted:
        raise SystemExit(f"the audit found {found}, and {wanted} was to be found")


SCENARIOS = {"audit": Scenario(audit, "audits of a lake and an archive, clean and with planted defects", chosen=True)}
