"""One batch of the metrics: the windows that it closed, into both tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester.pipeline import merging, tables
from harvester.pipeline.metrics import windows as metrics_windows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class MetricsBatch:
    """`owner` names the checkpoint. `written`: batch → rows of `metrics`, for the report on it."""

    root: str
    owner: str
    most_keys: int
    compact_every: int
    written: dict[int, int] = field(default_factory=dict)

    def write(self, closed: DataFrame, number: int) -> None:
        """Write the COUNTS of windows that are closed. May be cut off anywhere, and called again with the same ones.

        All counts of a window come in the same batch, since they have the same end.
        """
        closed = closed.persist()
        try:
            # Every row has to be asked for, also where none is wanted: only so does each task store its state.
            found = closed.agg(F.count_distinct("window_start", "topic").alias("windows")).first()
            assert found is not None
            if found["windows"]:
                self._append(metrics_windows.windows(closed), metrics_windows.METRICS.name, number)
                if self.most_keys:
                    keys = metrics_windows.top_keys(closed, self.most_keys)
                    self._append(keys, metrics_windows.KEYS.name, number)
            self.written[number] = found["windows"]
        finally:
            closed.unpersist()
        if self.compact_every and (number + 1) % self.compact_every == 0:
            for table in (metrics_windows.METRICS, metrics_windows.KEYS):
                closed.sparkSession.sql(merging.compact(tables.path_of(self.root, table.name)))

    def _append(self, rows: DataFrame, name: str, number: int) -> None:
        # Delta leaves out a transaction whose application has committed this version, or a later one, before.
        options = {"txnAppId": f"{self.owner}-{name}", "txnVersion": str(number)}
        rows.write.format("delta").mode("append").options(**options).save(tables.path_of(self.root, name))
