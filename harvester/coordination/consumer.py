"""A consumer that shares partitions with others through the coordination topic. Thin.

    settings = ConsumerSettings(kafka={"bootstrap.servers": "…"}, group="billing", topics=("orders",))
    with CoordinatedConsumer(settings) as consumer:
        for record in consumer:
            …
            consumer.commit(record)

or, with a function that is given each record, `CoordinatedConsumer(settings).run(function)`.

The caller's thread fetches from Kafka and hands out (`feed`, `lots`): it asks the claim immediately before each record.
All else is done by a thread of its own (`session`).

At least once: a record counts as processed by `commit`. At most once (`at_most_once`): it counts before it is handed
out, and `commit` does nothing. Kafka's own group offsets follow, for tools that show lag; they are one more than the
last offset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any
from uuid import uuid4

from harvester.clock import clock_s
from harvester.coordination.consumer_settings import ConsumerSettings
from harvester.coordination.events import Event, EventHandler, Paused, Resumed
from harvester.coordination.feed import Feed, connect
from harvester.coordination.figures import Open, Statistics
from harvester.coordination.lot import NOTHING, Lot
from harvester.coordination.lots import Lots
from harvester.coordination.messages import Client, Place
from harvester.coordination.offsets import GroupOffsets
from harvester.coordination.session import Session
from harvester.coordination.signals import Release
from harvester.coordination.standing import Standing
from harvester.coordination.topic import ensure_coordination_topic

_IDLE_S = 0.1
_SHORTEST_S = 0.001  # that the client waits
_WAIT_S = 0.05  # for records, before the claims are looked at again


class CoordinatedConsumer:
    """See the module's text. All but `stop`, `claims`, `lag`, `open_records` and `statistics` belong to one thread.

    `on_event` is told what happens to the claims (`events`), in that thread.
    """

    def __init__(self, settings: ConsumerSettings, *, on_event: EventHandler | None = None) -> None:
        settings.check_subscription()
        self.settings = settings
        self.client = Client(settings.client_id or uuid4().hex[:12], uuid4().hex)
        self._on_event = on_event
        ensure_coordination_topic(
            settings.coordination_topic, settings.kafka, settings.coordination_partitions, settings.timing.interval_ms
        )
        self._session = Session(settings, self.client)
        self._offsets = GroupOffsets(settings)
        self._data = connect(settings)
        self._standing = Standing(self._session, self._data)
        self._feed = Feed(settings, self._session, self._data, self._offsets)
        self._lots = Lots(settings, self._session, self._feed.is_paused)
        self._lot = NOTHING
        self._records = 0  # of the lots before this one
        self._stopping = False
        self._mirror_at = self._look_at = 0.0
        self._session.start()

    # -- records

    def run(self, handler: Callable[[Any], object]) -> None:
        """Give each record to the handler, and commit it when that returns; until `stop`, or the handler raises.

        Closes the consumer, whatever ended it. A record whose handler raised is not committed.
        """
        with self:
            for record in self:
                handler(record)
                self.commit(record)

    def __iter__(self) -> Iterator[Any]:
        """Records, until the consumer is stopped or closed."""
        while not (self._stopping or self._session.ended.is_set()):
            record = self._poll(_IDLE_S)
            if record is not None:
                yield record
                yield from self._lot.handed_out(clock_s)

    def poll(self, timeout_s: float) -> Any:
        """The next record that may be processed, or None. Raises what ended the coordination."""
        record = self._lot.take(clock_s())
        return self._poll(timeout_s) if record is None else record

    def commit(self, record: Any) -> None:
        """The record is processed; in any order."""
        if self._lot.finish(record) or self.settings.at_most_once:
            return
        with self._session.lock:
            hands = self._session.hands.get(self._place(record.topic(), record.partition()))
            if hands is not None:
                hands.finish(record.offset())

    def pause(self, topic: str | None = None, partition: int | None = None) -> None:
        """Hand out nothing of a partition, a topic, or anything; the claims are kept. It outlasts the claim."""
        self._feed.pause(topic, partition)
        self._lot.end()
        self._announce(Paused(topic, partition))

    def resume(self, topic: str | None = None, partition: int | None = None) -> None:
        """End what `pause` began with the same words; without any, all of it."""
        self._feed.resume(topic, partition)
        self._announce(Resumed(topic, partition))

    # -- claims

    def claims(self) -> dict[tuple[str, int], int]:
        """What is held, with the fencing token of each claim, for whatever the records change."""
        with self._session.lock:
            held = {} if self._session.ended.is_set() else self._session.claims()
        return {(place.topic, place.partition): generation for place, generation in held.items()}

    def release(self, topic: str, partition: int) -> None:
        """Give a partition up for others to claim; we do not for 2 intervals. With whole topics, the topic."""
        place = self._place(topic, 0 if self.settings.whole_topics else partition)
        with self._session.lock:
            if place in self._session.hands:
                self._session.tell(place, Release("on request"))

    def lag(self) -> dict[tuple[str, int], int]:
        """Records that wait in each held partition, as of the last fetch."""
        return {(place.topic, place.partition): behind for place, behind in self._standing.lag().items()}

    def open_records(self) -> dict[tuple[str, int], Open]:
        """Of each held partition what is handed out and not committed, if anything is; at most once nothing ever."""
        now = clock_s()
        with self._session.lock:
            found = {place: hands.open(now) for place, hands in self._session.hands.items()}
        return {(place.topic, place.partition): each for place, each in found.items() if each is not None}

    def statistics(self) -> Statistics:
        """What was done so far."""
        return self._session.statistics(self._records + self._lot.given)

    # -- the end

    def stop(self) -> None:
        """Let `run`, or a loop over the consumer, end after the record in hand. From any thread or signal handler."""
        self._stopping = True
        self._lot.end()

    def close(self, *, release: bool = True) -> None:
        """Stop. With `release` everything is handed over, as far as it is committed; else the claims run out, or are
        taken up again by the next life of this client id. At most once, what is left of the last batches is never
        processed.
        """
        if self._session.ended.is_set():
            return
        self._offsets.mirror(self._standing.processed(), unanswered=2)  # others may write them after the release
        self._session.stop(release=release)
        self._replace_lot(NOTHING)
        self._offsets.close()
        self._data.close()
        while self._session.changes:
            self._announce(self._session.changes.popleft()[2])

    def __enter__(self) -> CoordinatedConsumer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- parts

    def _poll(self, timeout_s: float) -> Any:
        deadline = clock_s() + timeout_s
        fetched = False
        while not (self._stopping or self._session.ended.is_set()):
            self._attend()
            record = self._replace_lot(self._lots.after(self._lot)).take(clock_s())
            left_s = deadline - clock_s()
            if record is not None or (fetched and left_s < _SHORTEST_S):
                return record
            self._feed.fetch(max(0.0, min(left_s, _WAIT_S)))
            fetched = True
        return None

    def _attend(self) -> None:
        """What is due besides records."""
        for event in self._feed.follow():
            self._announce(event)
        if self._session.error is not None:
            raise self._session.error
        now, interval_s = clock_s(), self.settings.heartbeat_interval_s
        if now >= self._look_at:
            self._look_at = now + interval_s
            topics = self._feed.topics()  # partitions may have been added, and topics made
            if topics is not None:
                self._session.consume(topics)
            self._standing.look(self._feed.is_paused)
            self._feed.look()
        if now >= self._mirror_at:
            self._mirror_at = now + interval_s / 2
            self._feed.pass_over()
            self._offsets.mirror(self._standing.processed())

    def _replace_lot(self, lot: Lot) -> Lot:
        self._records += self._lot.given
        self._lot = lot
        if self._stopping:  # `stop` ends the lot that it finds
            lot.end()
        return lot

    def _announce(self, event: Event | None) -> None:
        if self._on_event is not None and event is not None:
            self._on_event(event)

    def _place(self, topic: str, partition: int) -> Place:
        return Place(self.settings.group, topic, partition)
