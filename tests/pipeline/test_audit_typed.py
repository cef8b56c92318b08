"""The audit's history of an outbox with typed columns: keys are the bytes that Kafka has, wherever a row stands."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from harvester.outbox import schema
from harvester.outbox.tables import OutboxTable
from harvester.pipeline.audit.inputs import history_facts, query
from harvester.pipeline.audit.schemas import RecordSource
from tests.integration.test_typed_columns import ARRAYS, TYPES, table

pytestmark = pytest.mark.servers
OUTBOX = OutboxTable.parse("outbox")


@pytest.mark.parametrize("headers", [ARRAYS, "kafka_headers jsonb", "kafka_headers text[]"])
@pytest.mark.parametrize(("kind", "written", "published"), TYPES, ids=[kind for kind, _, _ in TYPES])
def test_the_history_has_the_bytes_of_a_key(
    empty_database: str, headers: str, kind: str, written: str, published: str
) -> None:
    with psycopg.connect(empty_database, autocommit=True) as connection:
        connection.execute(table(key=kind, value=kind, headers=headers).encode())
        schema.init(connection, OUTBOX, archive=True)
        insert = f"INSERT INTO outbox (kafka_topic, kafka_key, kafka_value) VALUES ('t', %s::{kind}, %s::{kind})"
        connection.execute(insert.encode(), (written, written))
        facts = history_facts(empty_database, OUTBOX)
        # As the audit sends it: a sub-query of a statement of Spark's.
        for since in (None, datetime(2020, 1, 1, tzinfo=UTC)):
            statement = f"SELECT * FROM ({query(OUTBOX, facts, since)}) AS history WHERE 1=0"
            columns = connection.execute(statement.encode()).description
            assert columns is not None
            names = [column.name for column in columns]
            rows: list[dict[str, Any]] = [
                dict(zip(names, row, strict=True))
                for row in connection.execute(query(OUTBOX, facts, since).encode()).fetchall()
            ]
            assert [(row["source"], row["topic"]) for row in rows] == [(RecordSource.OUTBOX, "t")]
            assert bytes(rows[0]["key"]) == published.encode()
