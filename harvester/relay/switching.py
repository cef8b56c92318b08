"""What a take-over owes to the mode of the one before: at least once, or exactly once (rules P19, P22, P24). Thin.

- From at least once: what a killed leader still had on the wire may arrive for a while yet, and nothing fences it. The
  first exactly-once term waits until the last of it has expired, unless the leader released its term in good order.
- From a leader of another group, which did not release its term before the outbox was moved (P37): nothing of Kafka's
  ties the two together, so any first term waits as long.
- From exactly once: lanes may have transactions open, or committed records that are not purged. Where the new leader's
  shards do not open the lanes themselves, because it sends at least once, they are all fenced and purged here.
- A progress topic that is not the one the term row knows is refused: what was committed would be sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from harvester.delivery.lane import Lanes
from harvester.delivery.progress_topic import ProgressTopic
from harvester.errors import SchemaError
from harvester.outbox.place import Place
from harvester.outbox.purge_session import PurgeSession
from harvester.outbox.term_session import TermRow
from harvester.relay.opening import Leadership, Opener, Surroundings

AT_LEAST_ONCE: Literal["at-least-once"] = "at-least-once"
EXACTLY_ONCE: Literal["exactly-once"] = "exactly-once"


@dataclass(slots=True)
class Mode:
    """How this harvester delivers. `find` looks for the progress topic, and in exactly-once mode makes it."""

    delivery: str
    expiry_s: float  # S + H + D: what an at-least-once leader had on the wire is gone after it
    lanes: Lanes | None = None
    session: PurgeSession | None = None
    find: Callable[[], ProgressTopic | None] = lambda: None
    progress: ProgressTopic | None = None

    @property
    def topic_id(self) -> str | None:
        """What the term row is to know from now on; None: what it knows stays."""
        return self.progress.id if self.progress is not None and self.delivery == EXACTLY_ONCE else None

    @property
    def lanes_now(self) -> int:
        """How many lanes shards have to fence."""
        return self.progress.lanes if self.progress is not None and self.delivery == EXACTLY_ONCE else 0

    def check(self, row: TermRow) -> None:
        """Raises SchemaError for a progress topic that is not the one the term row knows, or BrokerError."""
        if row.delivery == self.delivery == AT_LEAST_ONCE:
            return
        self.progress = self.find()  # each time: another harvester may have added lanes, or somebody deleted it
        if row.progress_topic is None:
            return
        if self.progress is None or self.progress.id != row.progress_topic:
            what = "is missing" if self.progress is None else f"is another one than before ({self.progress.id})"
            raise SchemaError(
                f"the progress topic, {row.progress_topic}, {what}: records that are committed in Kafka and still in"
                " the outbox would be published again",
                hint="restore it; or accept repeats: UPDATE <outbox>_term SET progress_topic = NULL",
            )

    @staticmethod
    def is_unreleased(row: TermRow) -> bool:
        """Whether what an at-least-once leader had on the wire may still arrive."""
        return row.holder is not None and row.delivery == AT_LEAST_ONCE

    def wait_s(self, row: TermRow) -> float:
        """For how long nothing may be marked after this row's term was taken."""
        waits = self.delivery == EXACTLY_ONCE or row.kind == "moved"
        return self.expiry_s if self.is_unreleased(row) and waits else 0.0

    def expect(self, place: Place | None, term: int) -> None:
        """What the new term was taken on: `fence` purges nothing elsewhere."""
        if self.session is not None and place is not None:
            self.session.expect(str(place), term)

    def fence(
        self,
        row: TermRow,
        term: int,
        holder: UUID,
        incarnation: UUID,
        is_over: Callable[[], bool],
        pause: Callable[[float], None],
        trouble: Callable[[str | None], None],
    ) -> None:
        """Fence and purge all lanes of an exactly-once predecessor. Raises Superseded, Deposed, or the database's."""
        if self.delivery == EXACTLY_ONCE or row.delivery != EXACTLY_ONCE or self.progress is None:
            return
        session, lanes = self.session, self.lanes
        assert session is not None
        assert lanes is not None

        def known() -> tuple[int, str | None]:
            session.ready()
            return session.term()

        def delete(ids: Sequence[int]) -> bool:
            session.ready()
            session.delete(ids)
            return True

        around = Surroundings(known, delete, is_over, pause, trouble, lambda *_args, **_facts: None)
        opener = Opener(lanes, around)
        try:
            for number in range(self.progress.lanes):
                opener.open(number, Leadership(term, str(holder), incarnation), lambda _ids: None).close()
        finally:
            session.close()
