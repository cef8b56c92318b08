"""The stasher for asyncpg: what is said in `harvester.outbox.stasher` holds here too, but for leases.

    async with connection.transaction():
        await connection.execute("UPDATE account SET …")
        await AsyncpgStasher("outbox").stash(connection, OutboxRecord("billing.paid", key="42", value="{…}"))

asyncpg commits each statement by itself unless told otherwise, so a transaction that was forgotten would be noticed by
nobody: it is an error here.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from harvester.errors import NoTransaction
from harvester.outbox.catalog import CATALOG_SQL, catalog_parameters, parse_catalog
from harvester.outbox.insertion import Insertion
from harvester.outbox.placeholders import Style, rewritten
from harvester.outbox.shape import column_shape
from harvester.outbox.tables import OutboxTable
from harvester.record import OutboxRecord

Connection: TypeAlias = asyncpg.Connection | PoolConnectionProxy


class AsyncpgStasher:
    """Writes records into one outbox over connections of asyncpg, pooled ones too; keep one for the program's life.

    The table's columns are looked up once per connection, with its first use.
    """

    def __init__(self, table: str | OutboxTable = "outbox") -> None:
        self.table = table if isinstance(table, OutboxTable) else OutboxTable.parse(table)
        self._insertions: WeakKeyDictionary[asyncpg.Connection, Insertion] = WeakKeyDictionary()

    async def stash(self, connection: Connection, record: OutboxRecord) -> int:
        """Write one record; returns its id. Raises NoTransaction, RecordRejected, SchemaError or asyncpg's errors."""
        insertion = await self._insertion(connection)
        row = await connection.fetchrow(insertion.one_sql, *insertion.parameters(record))
        return insertion.one_id(row)

    async def stash_many(self, connection: Connection, records: Iterable[OutboxRecord]) -> list[int]:
        """Write records in order, all or none; returns their ids, which grow in that order. All are checked first."""
        insertion = await self._insertion(connection)
        batches = insertion.batches(records)
        ids: list[int] = []
        async with connection.transaction() if len(batches) > 1 else nullcontext():
            for parameters in batches:
                ids += insertion.many_ids(await connection.fetch(insertion.many_sql, *parameters), parameters)
        return ids

    async def _insertion(self, connection: Connection) -> Insertion:
        if not connection.is_in_transaction():
            raise NoTransaction(
                f"a record for {self.table} was to be written outside of a transaction",
                hint="write it within the `async with connection.transaction():` that makes the change",
            )
        # A pool wraps its connections anew for each user of theirs.
        known: Any = connection._con if isinstance(connection, PoolConnectionProxy) else connection
        insertion = self._insertions.get(known)
        if insertion is None:
            parameters = catalog_parameters(self.table)
            query = rewritten(CATALOG_SQL, Style.DOLLAR, parameters)
            row = await connection.fetchrow(query, *parameters.values())
            assert row is not None, "the query has no condition on its one row"
            shape = column_shape(self.table, parse_catalog(tuple(row)))
            insertion = Insertion.build(self.table, shape, "utf-8", Style.DOLLAR)  # the only one that asyncpg speaks
            self._insertions[known] = insertion
        return insertion
