"""The leader's database session: marks, fetches, wake-up. Thin.

Marks are autocommit, READ COMMITTED, one statement a transaction (P3). What `TermSession` says of errors holds here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from harvester.errors import TermLost
from harvester.outbox.libpq import copy_durable_rows, copy_rows, wait_readable
from harvester.outbox.shape import OutboxShape
from harvester.outbox.sql import queries
from harvester.outbox.sql.queries import Row
from harvester.outbox.tables import OutboxTable
from harvester.outbox.term_session import SILENCE_MARGIN_S, TermSession


@dataclass(frozen=True, slots=True)
class Holders:
    """Who holds a RowExclusiveLock on the outbox, and where its sequence stands.

    `transactions`: by virtual transaction id the id of the transaction, of 64 bits; None: it has none yet.

    `sequence_file` changes when the sequence is restarted (TRUNCATE … RESTART IDENTITY), not when it is called.
    `wanted_by`: who asks for the term (P32). `table`: the oid of the table that bears the outbox's name now.
    """

    transactions: dict[str, int | None]
    last_value: int | None
    sequence_file: int | None
    wanted_by: str | None = None
    table: int | None = None


class MarkSession(TermSession):
    """See the module's text."""

    def __init__(self, dsn: str, table: OutboxTable, application_name: str, statement_timeout_s: float) -> None:
        super().__init__(dsn, table, application_name, statement_timeout_s)
        self.over: tuple[int, ...] = ()  # transactions for whose rows the last mark was held back

    def mark(
        self,
        *,
        term: int,
        holder: UUID,
        leader_id: UUID | None,
        limit: int,
        high: int | None,
        gaps: Sequence[tuple[int, int]],
        kept: tuple[int, ...] = (),
        watched: tuple[int, ...] = (),
        checks_term: bool = True,
    ) -> list[Row]:
        """The next rows, sorted by id: those in the gaps, then those above `high`; None: from the head.

        There are none if one of the `watched` transactions is over: `over` names them then. They are marked in the
        table with `leader_id`; None: nothing is written. Where there are none because of the fence (P8) it raises
        TermLost, if it `checks_term`.
        """
        connection, shape, fence = self._open(), self._shape(), self._fence(term, holder, watched)
        if leader_id is None:
            statement = queries.mark_in_memory(self.table, shape, fence=fence, limit=limit, high=high, gaps=gaps)
        else:
            statement = queries.mark_in_table(
                self.table, shape, fence=fence, leader_id=leader_id, limit=limit, high=high, gaps=gaps, kept=kept
            )
        # The commit of a mark that writes is durable, and with it all that was committed before.
        copy = copy_durable_rows if leader_id is None else copy_rows
        rows = copy(connection, statement, self._statement_timeout_s + SILENCE_MARGIN_S)
        self.over = ()
        if not rows and (checks_term or watched):
            self.over = self._check_term(term, holder, watched)
        return rows

    def fetch(self, *, term: int, holder: UUID, ids: tuple[int, ...]) -> list[Row]:
        """These rows, as far as they are there, sorted by id. Raises TermLost as `mark` does."""
        statement = queries.fetch(self.table, self._shape(), fence=self._fence(term, holder), ids=ids)
        rows = copy_durable_rows(self._open(), statement, self._statement_timeout_s + SILENCE_MARGIN_S)
        if not rows:
            self._check_term(term, holder)
        return rows

    def _fence(self, term: int, holder: UUID, watched: tuple[int, ...] = ()) -> queries.Fence:
        return queries.Fence(term, holder, self.place.space if self.place is not None else None, watched)

    def all_ids(self, high: int) -> list[int]:
        """Every id up to `high`."""
        return [row[0] for row in self._open().execute(queries.all_ids(self.table, high), binary=True)]

    def holders(self) -> Holders:
        """Who could still fill a gap (P10)."""
        shape = self._shape()
        row = self._open().execute(queries.holders(self.table, shape.oid, shape.sequence)).fetchone()
        assert row is not None
        transactions = {name: _whole(number, row[4]) for name, number in (row[0] or {}).items()}
        return Holders(transactions, row[1], row[2], row[3], row[5])

    def read_bookmark(self) -> tuple[int, list[int]] | None:
        """Where a scan may begin: a highest id, and ranges below it as low and high in turn; None: at the head."""
        sequence = self._shape().sequence
        if sequence is None:
            return None
        row = self._open().execute(queries.read_bookmark(self.table, sequence)).fetchone()
        return (row[0], row[1]) if row is not None else None

    def save_bookmark(self, term: int, holder: UUID, high: int, open_ids: Sequence[int]) -> None:
        """Keep where a scan may begin, if the term is still ours."""
        sequence = self._shape().sequence
        if sequence is not None:
            values = {"term": term, "holder": holder, "high": high, "open": list(open_ids)}
            self._open().execute(queries.save_bookmark(self.table, sequence), values)

    def wait(self, timeout_s: float, wake_fd: int) -> bool:
        """Wait until a notification arrives, `wake_fd` is readable or the time is up. True: a notification."""
        connection = self._connection
        if connection is None:
            wait_readable([wake_fd], timeout_s)
            return False
        pgconn = connection.pgconn
        if self._notified():
            return True
        if pgconn.socket in wait_readable([pgconn.socket, wake_fd], timeout_s):
            pgconn.consume_input()
        return self._notified()

    def _notified(self) -> bool:
        assert self._connection is not None
        found = False
        while self._connection.pgconn.notifies():
            found = True
        return found

    def _check_term(self, term: int, holder: UUID, watched: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Raises TermLost; returns those of the watched transactions that are over."""
        row = self._open().execute(queries.check_term(self.table, watched)).fetchone()
        if row is None or row[:2] != (term, holder):
            found = self.read_term()
            raise TermLost(f"term {term} of this harvester has ended: the term row says {found.term} of {found.holder}")
        return tuple(row[2])

    def _shape(self) -> OutboxShape:
        assert self.shape is not None, "open() sets it"
        return self.shape


def _whole(number: int | None, following: int) -> int | None:
    """The transaction id of 64 bits that has these 32 and is nearest to the next one to be given out."""
    if number is None:
        return None
    half = 1 << 31
    return following + (number - following + half) % (2 * half) - half
