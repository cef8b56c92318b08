"""A step's statements and their parameters, shared by the leased stasher's sync and async forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psycopg.types.numeric import Int8

from harvester.outbox import lease_queries
from harvester.outbox.insertion import Insertion
from harvester.outbox.leases import Lease, Run


class Statements:
    """The texts for the outboxes that a stasher writes to, each made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[Insertion, bool, bool], str] = {}

    def get(self, insertion: Insertion, *, many: bool, hopeful: bool) -> str:
        """See `lease_queries`."""
        made = self._made.get((insertion, many, hopeful))
        if made is None:
            build = lease_queries.stash_many if many else lease_queries.stash_one
            made = self._made[insertion, many, hopeful] = build(insertion.table, insertion.shape, hopeful=hopeful)
        return made


def parameters(lease: Lease, run: Run, position: str | None, row: Sequence[Any], *, many: bool) -> dict[str, Any]:
    """Of both forms but for `at`. Numbers go as bigint: psycopg would take the smallest type that holds them.

    Each other type would be another prepared statement.
    """
    named = dict(zip(lease_queries.MANY if many else lease_queries.ONE, row, strict=False))
    named["lease"], named["generation"] = Int8(lease.id), Int8(lease.generation)
    named["first"], named["last"], named["position"] = Int8(run.first), Int8(run.last), position
    return named
