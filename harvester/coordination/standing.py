"""How far the group is behind, and who cannot keep up. Thin.

Belongs to the consumer's thread. A place is looked at once an interval; one that falls behind (`health`) is given up
if another client that is present holds less, one at a time. Ends of partitions are those that came with the last
fetch: to ask for one is to wait behind a fetch on the same connection, half a second each.
"""

from __future__ import annotations

from collections.abc import Callable

from confluent_kafka import Consumer, TopicPartition

from harvester.coordination.health import Health
from harvester.coordination.messages import Place
from harvester.coordination.session import Session
from harvester.coordination.signals import Release


class Standing:
    """See the module's text. `data` fetches the records."""

    def __init__(self, session: Session, data: Consumer) -> None:
        self._session, self._data = session, data

    def processed(self) -> dict[Place, int | None]:
        """The last offset of what is processed without a hole, of each held partition."""
        with self._session.lock:
            return {place: hands.last_offset for place, hands in self._session.hands.items()}

    def lag(self) -> dict[Place, int]:
        """Records that wait in each held partition, as of the last fetch; none once it is closed. Any thread."""
        behind: dict[Place, int] = {}
        for place, last_offset in self.processed().items():
            partition = TopicPartition(place.topic, place.partition)
            try:
                low, high = self._data.get_watermark_offsets(partition, cached=True)
            except RuntimeError:  # it is closed
                return {}
            behind[place] = max(0, high - max(low, 0 if last_offset is None else last_offset + 1))
        return behind

    def look(self, is_paused: Callable[[Place], bool]) -> None:
        """Once an interval: see the module's text."""
        for place, behind in self.lag().items():
            hands = self._session.hands.get(place)
            if hands is None:
                continue
            if not behind or is_paused(place):
                hands.health = Health()
                continue
            with self._session.lock:
                last_offset = hands.last_offset
                position = 0 if last_offset is None else last_offset + 1
                hands.health.look(position, position + behind)
                if hands.health.falls_behind and hands.stopping_at is None and self._session.fewer_elsewhere():
                    self._session.tell(place, Release("it falls behind"))
                    return
