"""How many of the shards new keys go to: as many as the load is worth. Pure.

Theory. A shard that gets one record at a time wakes its threads, asks its broker and commits its purge for that one;
eight such shards cost a small machine four times what one of them costs that sees eight records at a time. So keys of
which nothing is under way go to the first `active` shards only, chosen among these by the key's hash: one shard while
little is unsettled, all that the cores can carry when there is a backlog. It grows at once and shrinks by one at a
time.

Order. A key with anything unsettled stays with its shard, whatever the hash says (`harvester.relay.ledger`), and so
does one with a lane; so no key is ever in two shards. Rows in a shard's lane are known by their ids alone: while there
is such a lane the number stays, so that what is read behind them finds its way into the same lane.
"""

from __future__ import annotations


class Spread:
    """See the module's text. One thread only."""

    def __init__(self, shards: int, unsettled: int, records: int, most: int) -> None:
        """Of so many shards, and records that may be unsettled at all; a further shard for each `records` of them.

        As many as there may be, `most` at the most, from half of the bound on at the latest. `records` 0: always all.
        """
        self._shards, self._unsettled, self._records, self._most = shards, unsettled, records, most
        self.active = shards if not records else 1

    def wanted(self, unsettled: int) -> int:
        """How many shards so many unsettled records are worth."""
        if not self._records:
            return self._shards
        usable = max(1, min(self._shards, self._most))
        each = max(1, min(self._records, self._unsettled // (2 * usable)))
        return min(usable, 1 + unsettled // each)

    def grow(self, unsettled: int) -> None:
        """More has come."""
        self.active = max(self.active, self.wanted(unsettled))

    def shrink(self, unsettled: int) -> None:
        """Time has passed: a little fewer, if that is enough."""
        self.active = max(self.active - 1, self.wanted(unsettled))

    def resize(self, shards: int) -> None:
        """There are this many shards now."""
        self._shards = shards
        self.active = min(self.active, shards) if self._records else shards
