"""Records what a harvester reports about itself: troubles, last events, rates and latencies; takes status snapshots."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

from harvester.announcer import Announcer, Log
from harvester.config import Config
from harvester.events import LeaderAcquired, LeaderFenced, LeaderRefreshed
from harvester.neli.group import Missing
from harvester.relay.shard_pool import Slot
from harvester.status import Backlog, LastEvent, ShardStatus, State, Status
from harvester.telemetry.latency import Histogram, LatencyWindow
from harvester.telemetry.metrics import Meter, RateHistory, Tally, Totals, bare_source
from harvester.telemetry.process import ProcessWatch
from harvester.telemetry.repeats import Ended, Repeats, client_form, form_of

_LATENCY_WINDOW_S = 5.0
_LOOK_EVERY_S = 1.0
_CLIENT = "Kafka's client library"


def _after(at: datetime, within_s: float | None) -> datetime | None:
    return None if within_s is None else at + timedelta(seconds=within_s)


def _more(unsaid: int) -> str:
    return f" (and {unsaid:,} more in the last minute)" if unsaid else ""


def _over(ended: Ended) -> str:
    count = f" ({ended.reports:,} reports)" if ended.reports > 1 else ""
    over = _OVER.get(ended.kind, "recovered")
    return f"{ended.kind}: {over} after {ended.lasted_s:.0f} s{count}"


_OVER = {
    "term": "the wait is over",
    _CLIENT: "nothing more to report,",
}


class StatusRecorder:
    """Written by the relay's threads and read by any thread, under its own briefly held lock."""

    def __init__(self, config: Config, announcer: Announcer, log: Log) -> None:
        self._config, self._announcer, self._log = config, announcer, log
        self._lock = threading.Lock()
        self._troubles: dict[str, str] = {}
        self._events: deque[LastEvent] = deque(maxlen=20)
        self._started_at = datetime.now(UTC)
        self._state = State.CREATED
        self._state_since_at = self._started_at
        self._paused_since_at: datetime | None = None
        now = time.monotonic()
        self._rates = RateHistory(now)
        self._shard_rates: dict[int, tuple[float, int, float]] = {}
        self._latency = LatencyWindow(_LATENCY_WINDOW_S)
        self._meter = Meter(
            config.name, self._started_at, config.limits.min_metrics_interval.total_seconds(), started=now
        )
        self._delivered = 0
        self._tally = Tally()
        self._repeats = Repeats()
        self._watch = ProcessWatch()
        self._usage: dict[int, float] = {}
        self._looked_at = 0.0

    def started(self) -> None:
        """The harvester has been started."""
        self._log.info("starts: outbox %s, %d shards", self._config.outbox_table, self._config.limits.shards)

    def settled(self, count: int, published: int, now: float) -> None:
        """Records have left the outbox; `published` of them were published, the others are in quarantine."""
        if not count:
            return
        with self._lock:
            self._delivered += published
            self._rates.add(count, now)
            reading = self._meter.add(published, now)
        if reading is not None:
            self._announcer.announce(reading)

    def latencies(self, latencies: Histogram, now: float) -> None:
        """A shard's latencies since its last report."""
        with self._lock:
            self._latency.add(latencies, now)
            self._tally.latency.merge(latencies)

    def trouble(self, source: str, text: str | None, level: int = logging.WARNING) -> None:
        """Record what this part is waiting for, or None when that is over; logs what is worth a line (`Repeats`)."""
        now, kind, line = time.monotonic(), bare_source(source), None
        with self._lock:
            before = self._troubles.get(source)
            # Several shards may have lost the same server, and may say so in several ways: that is one trouble.
            self._tally.trouble(source, new=text is not None and not self._is_troubled(kind), over=text is None)
            if text is not None:
                self._troubles[source] = text
                unsaid = self._repeats.report(kind, form_of(text), now)
                if unsaid is not None:
                    line = f"{source}: {text}{_more(unsaid)}"
            elif before is not None:
                del self._troubles[source]
                if not self._is_troubled(kind):
                    ended = self._repeats.end(kind, now)
                    line = None if ended is None else _over(ended)
        if line is not None:
            self._log.log(logging.INFO if text is None else level, "%s", line)
            self.note(line)

    def forget(self, source: str) -> None:
        """The part is gone, and its trouble with it: that is not a recovery."""
        with self._lock:
            self._tally.trouble(source, new=False, over=True)
            if self._troubles.pop(source, None) is not None:
                kind = bare_source(source)
                if not self._is_troubled(kind):
                    self._repeats.forget(kind, time.monotonic())

    def _is_troubled(self, kind: str) -> bool:
        return any(bare_source(source) == kind for source in self._troubles)

    def client_said(self, log: Log, level: int, text: str) -> None:
        """A line that may be the Kafka client's, and then one of many; `log` is the one of its source."""
        form = client_form(text)
        if form is None or level < logging.INFO or not log.isEnabledFor(level):
            log.log(level, "%s", text)
        else:
            self.repeated(log, level, _CLIENT, form, text)

    def repeated(self, log: Log, level: int, kind: str, form: str, text: str) -> None:
        """A line of a kind that ends by silence."""
        with self._lock:
            unsaid = self._repeats.report(kind, form, time.monotonic(), by_silence=True)
        if unsaid is not None:
            log.log(level, "%s", f"{text}{_more(unsaid)}")

    def look(self) -> None:
        """Report what has ended in the meantime; to be called about once a second."""
        with self._lock:
            ended = self._repeats.due(time.monotonic())
        for each in ended:
            self._log.info("%s", _over(each))

    def problem(self) -> str | None:
        """What is being waited for, or has gone wrong; None if all is well."""
        with self._lock:
            return self._problem()

    def _problem(self) -> str | None:
        return "; ".join(f"{source}: {text}" for source, text in sorted(self._troubles.items())) or None

    def paused(self, paused: bool) -> bool:
        """Record that an operator paused or resumed marking; False if nothing changed."""
        with self._lock:
            if paused == (self._paused_since_at is not None):
                return False
            self._paused_since_at = datetime.now(UTC) if paused else None
        text = "paused: nothing is marked until it is resumed" if paused else "resumed"
        self._log.info("%s", text)
        self.note(text)
        return True

    def note(self, text: str) -> None:
        """Add a line to the last events."""
        self._events.append(LastEvent(datetime.now(UTC), text))

    def totals(self, slots: Sequence[Slot]) -> Totals:
        """The counters; `slots` are all shard slots that ever existed."""
        events = self._announcer.counts
        with self._lock:
            return Totals(
                latency=self._tally.copy_of_latency(),
                quarantined=sum(slot.quarantined for slot in slots),
                repeats_suspected=sum(slot.suspected for slot in slots),
                acquired=events[LeaderAcquired],
                remarks=events[LeaderRefreshed],
                fenced=events[LeaderFenced],
                troubles=dict(self._tally.troubles),
                troubled=self._tally.troubled,
            )

    def status(
        self,
        *,
        state: State,
        waits: Missing | None = None,
        leader_id: UUID | None,
        term: int | None,
        slots: Sequence[Slot],
        in_flight: int,
        queued: int,
        backlog: Backlog | None,
    ) -> Status:
        now = time.monotonic()
        at = datetime.now(UTC)
        with self._lock:
            if state is not self._state:
                self._state, self._state_since_at = state, at
            if now - self._looked_at >= _LOOK_EVERY_S:
                pids = [slot.process.pid for slot in slots if slot.process is not None]
                self._usage = self._watch.look(pids, now)
                self._looked_at = now
            latency = self._latency.current(now)
            return Status(
                at=at,
                name=self._config.name,
                outbox=str(self._config.table),
                state=state,
                leader_id=leader_id,
                term=term,
                state_since_at=self._state_since_at,
                started_at=self._started_at,
                shards=tuple(self._shard(index, slot, now) for index, slot in enumerate(slots)),
                in_flight=in_flight,
                max_in_flight=self._config.limits.max_in_flight_records,
                queued=queued,
                delivered=self._delivered,
                quarantined=sum(slot.quarantined for slot in slots),
                rate_per_s=self._rates.rate(now),
                rate_history=self._rates.rates(now),
                p50_ms=latency.percentile(50),
                p99_ms=latency.percentile(99),
                backlog=backlog,
                problem=self._problem(),
                events=tuple(self._events),
                paused_since_at=self._paused_since_at,
                waits_for=waits.text if waits is not None else None,
                waits_until_at=_after(at, waits.within_s) if waits is not None else None,
            )

    def _shard(self, index: int, slot: Slot, now: float) -> ShardStatus:
        process, stats = slot.process, slot.stats
        since, count, rate = self._shard_rates.get(index, (now, slot.settled, 0.0))
        if now - since >= _LOOK_EVERY_S:
            rate = (slot.settled - count) / (now - since)
            since, count = now, slot.settled
        self._shard_rates[index] = (since, count, rate)
        return ShardStatus(
            index=index,
            state=slot.state,
            pid=process.pid if process is not None else None,
            queued=stats.queued,
            in_flight=stats.in_flight,
            parked=slot.parked + stats.parked,
            delivered=stats.delivered,
            rate_per_s=rate,
            retries=stats.retries,
            errors=stats.errors,
            quarantined=stats.quarantined,
            restarts=slot.restarts,
            cpu_percent=self._usage.get(process.pid) if process is not None else None,
            stored=stats.stored,
        )
