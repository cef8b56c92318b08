"""The tables of an audit: every finding, and one row with the report of each audit. Each audit adds its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester.pipeline import merging, schemas, tables
from harvester.pipeline.audit.report import AuditReport
from harvester.pipeline.audit.schemas import AUDITS_TABLE, FINDINGS_TABLE
from harvester.pipeline.errors import TableMismatch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_LAYOUT = {"delta.autoOptimize.optimizeWrite": "true"}


def prepare(spark: SparkSession, root: str) -> None:
    """Make what is missing; TableMismatch where something else is in the way."""
    for table in (FINDINGS_TABLE, AUDITS_TABLE):
        path = tables.path_of(root, table.name)
        if not tables.exists(spark, path):
            spark.sql(merging.create(path, table, _LAYOUT))
            continue
        missing, problems = schemas.differences(spark.read.format("delta").load(path).schema, table.schema)
        if problems:
            raise TableMismatch(
                f"the table {path} has another schema: {'; '.join(problems)}", hint="write to another directory"
            )
        if missing:
            spark.sql(merging.add_columns(path, missing))


def write(spark: SparkSession, root: str, report: AuditReport, findings: DataFrame) -> None:
    """Add the findings, then the report: a report that is there has all its findings."""
    rows = findings.withColumn("audited_at", F.lit(report.audited_at)).select(*FINDINGS_TABLE.schema.names)
    _append(rows, tables.path_of(root, FINDINGS_TABLE.name))
    row = (report.audited_at, report.holds, report.to_json())
    _append(spark.createDataFrame([row], AUDITS_TABLE.schema), tables.path_of(root, AUDITS_TABLE.name))


def _append(rows: DataFrame, path: str) -> None:
    rows.write.format("delta").mode("append").save(path)
