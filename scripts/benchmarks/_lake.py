"""The job `lake`, and for comparison the least that Spark can do with the same topic: copy it into one Delta table.

Each runs in a Spark of its own, in a process of its own, and has it to itself. Both read with the same options, as many
records in a batch, to the end that the topic has (availableNow), and write files partitioned by day. Rates are from the
beginning of the first batch to the end of the last, as the stream's own reports say, so Spark's start is in none of
them, and neither is what the lake does after its last batch; `after_s` has that.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from scripts.benchmarks._scenario import Bench
from scripts.benchmarks._worker import Gate, run

CONF = {
    "spark.driver.memory": "3g",
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


@dataclass(frozen=True, slots=True)
class Streamed:
    """What a stream did, by its own reports: batches, the median of their times, and milliseconds by what took them.

    `after_s`: from the end of the last batch to the end of the run. `sizes`: bytes by table.
    """

    records: int
    seconds: float
    batches: int
    batch_s: float
    spent_ms: Mapping[str, int]
    after_s: float = 0.0
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def per_s(self) -> float:
        """Records per second."""
        return self.records / self.seconds


@dataclass(frozen=True, slots=True)
class Warm:
    """A topic that the same Spark reads before, unmeasured, and how many records a batch of that has.

    Spark's own code is run a few times for each batch, however large it is; Java compiles what is run often. So it
    takes many batches to warm, not many records.
    """

    topic: str
    most: int


def lake_run(
    bench: Bench,
    topic: str,
    *,
    most: int,
    warm: Warm,
    compact_every: int = 0,
    conf: Mapping[str, str] | None = None,
) -> Streamed:
    """`harvester pipeline lake --once` on a topic.

    Files are not joined unless that is asked for: in the table of the bare copy nobody does it.
    """
    return _measured("lake", bench, topic, most, warm, conf, compact_every)


def bare_copy_run(bench: Bench, topic: str, *, most: int, warm: Warm) -> Streamed:
    """The topic into one table, record for record, as Spark's and Delta's own manuals have it."""
    return _measured("bare_copy", bench, topic, most, warm)


def lake(gate: Gate, **given: Any) -> dict[str, Any]:
    """In the worker."""
    from harvester.pipeline.lake.job import LakeSettings, run

    def copy(spark: Any, topic: str, most: int, root: str) -> None:
        settings = LakeSettings((topic,), root, _kafka(given), once=True, most_records=most)
        run(spark, replace(settings, compact_every=given["compact_every"]))

    return _worked(gate, given, copy)


def bare_copy(gate: Gate, **given: Any) -> dict[str, Any]:
    """In the worker."""
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

    from harvester.pipeline import source

    def copy(spark: Any, topic: str, most: int, root: str) -> None:
        records = source.stream(spark, _kafka(given), (topic,), most, {})
        writer = records.withColumn("day", F.to_date("timestamp")).writeStream.format("delta").partitionBy("day")
        query = writer.option("checkpointLocation", f"{root}/checkpoint").trigger(availableNow=True)
        query.start(f"{root}/copy").awaitTermination()

    return _worked(gate, given, copy)


def _measured(
    name: str,
    bench: Bench,
    topic: str,
    most: int,
    warm: Warm,
    conf: Mapping[str, str] | None = None,
    compact_every: int = 0,
) -> Streamed:
    found = run(
        f"{__name__}:{name}",
        bootstrap=bench.bootstrap, topic=topic, most=most, warm=asdict(warm), conf={**CONF, **(conf or {})},
        place=str(bench.place), compact_every=compact_every,
    )  # fmt: skip
    return Streamed(**found)


def _kafka(given: Mapping[str, Any]) -> dict[str, str]:
    return {"bootstrap.servers": str(given["bootstrap"])}


def _worked(gate: Gate, given: Mapping[str, Any], copy: Any) -> dict[str, Any]:
    from harvester.pipeline.session import SessionSettings, session

    root = tempfile.mkdtemp(prefix="lake-", dir=given["place"])
    try:
        with session(SessionSettings("bench", None, given["conf"])) as spark:
            reports = _listen(spark)
            copy(spark, given["warm"]["topic"], given["warm"]["most"], f"{root}/warm")
            _settled(reports)
            reports.clear()
            gate.ready()
            copy(spark, given["topic"], given["most"], f"{root}/measured")
            ended = time.time()
            found = _sum(_settled(reports), ended)
            return asdict(replace(found, sizes=_sizes(Path(root) / "measured")))
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _listen(spark: Any) -> list[dict[str, Any]]:
    """The reports of every batch that has records, as they come."""
    import json

    from pyspark.sql.streaming.listener import StreamingQueryListener

    reports: list[dict[str, Any]] = []

    class Listener(StreamingQueryListener):
        def onQueryStarted(self, event: Any) -> None:  # noqa: N802
            pass

        def onQueryProgress(self, event: Any) -> None:  # noqa: N802
            report = json.loads(event.progress.json)
            if report["numInputRows"]:
                reports.append(report)

        def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
            reports.append({})

    spark.streams.addListener(Listener())
    return reports


def _settled(reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    # Reports come from a thread of Spark's own; the last one is that of the end.
    deadline = time.monotonic() + 30
    while not (reports and not reports[-1]):
        if time.monotonic() > deadline:
            raise SystemExit("Spark did not say how the stream went")
        time.sleep(0.05)
    return [report for report in reports if report]


def _sizes(root: Path) -> dict[str, int]:
    """Of the data files by table; the log and the checkpoint are left out."""
    found: dict[str, int] = {}
    for file in root.glob("**/*.parquet"):
        name = file.relative_to(root).parts[0]
        if "_delta_log" not in file.parts and name != "checkpoint":
            found[name] = found.get(name, 0) + file.stat().st_size
    return found


def _sum(reports: Sequence[dict[str, Any]], run_ended: float) -> Streamed:
    begun = [datetime.fromisoformat(report["timestamp"]).timestamp() for report in reports]
    ended = [at + report["durationMs"]["triggerExecution"] / 1000 for at, report in zip(begun, reports, strict=True)]
    spent: dict[str, int] = {}
    for report in reports:
        for name, milliseconds in report["durationMs"].items():
            spent[name] = spent.get(name, 0) + milliseconds
    times = [end - begin for begin, end in zip(begun, ended, strict=True)]
    return Streamed(
        sum(report["numInputRows"] for report in reports),
        max(ended) - min(begun),
        len(reports),
        statistics.median(times),
        spent,
        run_ended - max(ended),
    )
