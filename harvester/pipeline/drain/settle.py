"""What a drain owes to an exactly-once predecessor: fence its lanes, purge what they have committed. Thin."""

from __future__ import annotations

import time
from collections.abc import Callable
from uuid import UUID

from harvester.assembly import take_over_mode
from harvester.config import Config
from harvester.errors import TermLost
from harvester.outbox.term_session import TermRow
from harvester.relay.opening import Deposed, Superseded
from harvester.relay.switching import AT_LEAST_ONCE


def settle(config: Config, is_over: Callable[[], bool]) -> Callable[[TermRow, int, UUID, UUID], None]:
    """For a Borrower: called with the row that the term was taken from, the term, its holder and the incarnation.

    Raises SchemaError, BrokerUnavailable, BrokerError, DatabaseUnavailable, TermLost.
    """
    mode = take_over_mode(config.model_copy(update={"delivery": AT_LEAST_ONCE}), "harvester drain/lanes")

    def settled(row: TermRow, term: int, holder: UUID, incarnation: UUID) -> None:
        mode.check(row)
        try:
            mode.fence(row, term, holder, incarnation, is_over, time.sleep, lambda _text: None)
        except (Superseded, Deposed) as error:
            raise TermLost(f"term {term} of this drain has ended before its predecessor's lanes were fenced") from error

    return settled
