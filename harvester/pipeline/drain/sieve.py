"""Rows of a slice that can be no record: found before it is sent, moved to quarantine as the relay would. Thin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from harvester import origin
from harvester.config import Config
from harvester.errors import PoisonRecord
from harvester.outbox.lending import Loan
from harvester.pipeline.drain.purge import Purgers
from harvester.pipeline.drain.slices import Rules, Topic, is_doubtful, why_poison
from harvester.pipeline.drain.snapshot import Chosen, Snapshot
from harvester.relay.sender import RESERVED

_OWN_LIMIT = "message.max.bytes"


class Sieve:
    """See the module's text. `keep` is called now and then: it renews the lease."""

    def __init__(self, config: Config, snapshot: Snapshot, purgers: Purgers, keep: Callable[[], None]) -> None:
        self._config, self._snapshot, self._purgers, self._keep = config, snapshot, purgers, keep
        own_limit = config.producer_options().get(_OWN_LIMIT)
        self._rules = Rules(
            dict.fromkeys((config.leader_topic, config.progress_topic), RESERVED),
            config.record_header,
            origin.SIZE,
            None if own_limit is None else int(own_limit),
        )

    def set_aside(self, chosen: Chosen, topics: Mapping[str, Topic], loan: Loan) -> int:
        """Move poison rows to quarantine, some of them at least; how many. Unless 0, the slice has to be chosen anew.

        Raises PoisonRecord where the policy is another one: to hold a key is left to the harvesters.
        """
        shares = [
            (share, topics.get(share.topic or ""))
            for share in chosen.shares
            if is_doubtful(share, topics.get(share.topic or ""), self._rules)
        ]
        low, high = chosen.ids[0], chosen.ids[-1]
        while shares and low <= high and (rows := self._snapshot.doubtful((low, high), shares, self._rules)):
            self._keep()
            judged = [(record.id, why_poison(record, size, topics, self._rules)) for record, size in rows]
            if found := [(record_id, why) for record_id, why in judged if why is not None]:
                return self._quarantine(found, loan)
            low = rows[-1][0].id + 1
        return 0

    def _quarantine(self, found: Sequence[tuple[int, str]], loan: Loan) -> int:
        if self._config.poison.policy != "quarantine":
            raise PoisonRecord(*found[0])
        self._snapshot.end()
        moved = 0
        for record_id, why in found:
            self._keep()
            attempts = self._config.limits.max_attempts if why.startswith("_UNKNOWN") else 1
            moved += self._purgers.quarantine(record_id, why, attempts, loan.term, loan.holder)
        return max(moved, 1)  # a row that is gone has changed the slice as well
