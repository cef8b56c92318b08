"""The relay machine by hand, for tests of single decisions."""

from __future__ import annotations

from uuid import UUID

from harvester.delivery.decode import decode
from harvester.relay.core import frames as f
from harvester.relay.core import messages as c
from harvester.relay.core.leadership import RelaySettings
from harvester.relay.core.ledger import Row
from harvester.relay.core.state_machine import StateMachine
from tests.support.rows import row as raw_row

SETTINGS = RelaySettings(
    shards=2,
    max_in_flight_records=32,
    max_unsettled_records=64,
    mark_query_records=8,
    send_buffer=2,
    max_queued_per_key=4,
    records_per_shard=0,
    most_shards=8,
    answer_timeout_s=5,
    silence_timeout_s=20,
)


class Driver:
    """A relay whose shards answer at once, and everything that it commanded since it was last asked."""

    def __init__(self, settings: RelaySettings = SETTINGS, *, ready: bool = True) -> None:
        self._made = 0
        self.machine = StateMachine(settings, self._new_id)
        self.now = 0.0
        if ready:
            for shard in range(settings.shards):
                self.machine.shard_ready(shard, self.now)

    def _new_id(self) -> UUID:
        self._made += 1
        return UUID(int=self._made)

    def answer(self, wire: dict[int, list[int]] | None = None) -> list[c.Command]:
        """All shards answer the current epoch."""
        said: list[c.Command] = []
        for shard in range(len(self.machine.planner.shards)):
            ids = (wire or {}).get(shard, [])
            said += self.machine.remarked(shard, self.machine.epoch, ids, self.now)
        return said

    def lead(self, term: int = 1, server: str | None = "one", incarnation: UUID | None = None) -> list[c.Command]:
        self.machine.acquire(self.now)
        self.answer()
        assert self.machine.tenure.holder is not None
        self.machine.term_taken(self.machine.tenure.holder, term, server, self.now, incarnation=incarnation)
        return self.answer()

    def mark(self, *rows: Row, floor: int | None = None) -> list[c.Command]:
        """The oldest mark under way returns these rows."""
        return self.machine.marked(self.under_way(c.Mark), rows, self.now, floor)

    def fetch(self, *rows: Row) -> list[c.Command]:
        """The fetch under way returns these rows."""
        return self.machine.fetched(self.under_way(c.Fetch), rows, self.now)

    def under_way(self, kind: type[c.Command]) -> int:
        statements = self.machine.planner.statements.under_way.items()
        return min(number for number, statement in statements if isinstance(statement.asked, kind))


def row(record_id: int) -> Row:
    """A keyless row of shard `record_id % 2`."""
    return (record_id, None, raw_row(record_id=record_id, key=None))


def only(commands: list[c.Command], kind: type[c.Command]) -> list[c.Command]:
    return [command for command in commands if isinstance(command, kind)]


def killed(commands: list[c.Command]) -> list[int]:
    return [command.shard for command in commands if isinstance(command, c.Kill)]


def keyed(*ids: int) -> list[Row]:
    return [(i, b"key", raw_row(record_id=i, key=b"key")) for i in ids]


def sent(commands: list[c.Command]) -> dict[int, list[int]]:
    """The ids of the rows that are sent, by shard."""
    frames = [(s.shard, s.frame) for s in commands if isinstance(s, c.Send)]
    found: dict[int, list[int]] = {}
    for shard, frame in frames:
        if isinstance(frame, f.Dispatch):
            found.setdefault(shard, []).extend(r.id for r in decode(frame.rows))
    return found
