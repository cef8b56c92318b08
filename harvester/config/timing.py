"""How the time limits depend on each other: the defaults that follow from others, and rules P12 and P13.

A leader that was frozen and thaws must find that everything it could still send has expired before the group
can have elected another one: heartbeat timeout + delivery timeout + 1 s <= session timeout (the Kafka client looks
for expired records once a second). And a leader whose partition is revoked must be able to finish what is on the
wire within the drain, and the drain within the time the group waits for it.

The group also removes a member that misses a rebalance, counted from its begin, which a commit that the group accepts
does not tell (`harvester.neli.election`). The rebalance timeout exceeds the session timeout by the time in which a
leader notices a rebalance, so that this removal never comes before the one that the session timeout allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from harvester.config.durations import format_duration
from harvester.errors import Problem

MS = timedelta(milliseconds=1)
PURGE_MARGIN = timedelta(milliseconds=500)  # of the drain, kept for the purge of what was acknowledged last
SCAN_INTERVAL = timedelta(seconds=1)  # how often the Kafka client looks for expired records
MIN_DELIVERY_TIMEOUT = timedelta(milliseconds=100)  # below, healthy brokers miss it
MIN_POLLS_PER_HEARTBEAT = 4
HEARTBEATS_PER_TIMEOUT = 10  # what a leader says of itself, and commits, is that much more frequent than the timeout
CLIENT_TICK = timedelta(seconds=1)  # the Kafka client does what is due at least that often
_USUAL_DELIVERY = timedelta(seconds=2)
_MIN_GROUP_HEARTBEAT = timedelta(milliseconds=100)
_MAX_GROUP_HEARTBEAT = timedelta(milliseconds=500)
_DELIVERY_PATH = 'producer_kafka_config."delivery.timeout.ms"'
_REBALANCE_PATH = 'base_kafka_config."max.poll.interval.ms"'


def group_heartbeat_interval(session_timeout: timedelta) -> timedelta:
    """g: how often the Kafka client proves to the group that it lives; a thirtieth of the session, 100 to 500 ms."""
    return min(max(session_timeout / 30, _MIN_GROUP_HEARTBEAT), _MAX_GROUP_HEARTBEAT)


def missed_heartbeats(session_timeout: timedelta) -> timedelta:
    """The longest that a rebalance goes unnoticed on a connection that works: two group heartbeats, since one may be
    lost with a connection."""
    return 2 * (group_heartbeat_interval(session_timeout) + CLIENT_TICK)


def rejoin_delay() -> timedelta:
    """The longest that the Kafka client waits before it answers a rebalance that it knows of."""
    return 2 * CLIENT_TICK


def heartbeat_interval(heartbeat_timeout: timedelta, min_poll_interval: timedelta) -> timedelta:
    """How often a leader sends a heartbeat and commits."""
    return max(heartbeat_timeout / HEARTBEATS_PER_TIMEOUT, min_poll_interval)


def rebalance_notice(session: timedelta, heartbeat: timedelta, min_poll: timedelta) -> timedelta:
    """How much older than an accepted commit a rebalance may be that its sender had not noticed."""
    return missed_heartbeats(session) + rejoin_delay() + 2 * heartbeat_interval(heartbeat, min_poll)


def default_session_timeout(heartbeat: timedelta) -> timedelta:
    """S: leaves two seconds for a delivery, or the heartbeat timeout less a second where that is more."""
    return heartbeat + max(heartbeat, _USUAL_DELIVERY + SCAN_INTERVAL)


def default_drain_interval(session: timedelta, heartbeat: timedelta, queue_timeout: timedelta) -> timedelta:
    """The shortest in which the longest delivery that P12 allows can end; at most the queue timeout."""
    longest_delivery = max(session - heartbeat - SCAN_INTERVAL, MIN_DELIVERY_TIMEOUT)
    return min(longest_delivery + PURGE_MARGIN, queue_timeout)


def default_delivery_timeout(session: timedelta, heartbeat: timedelta, drain: timedelta) -> timedelta:
    """D: the longest that P12 and P13 allow, in whole milliseconds; not positive when they leave no room."""
    longest = min(session - heartbeat - SCAN_INTERVAL, drain - PURGE_MARGIN)
    return longest // MS * MS


def default_rebalance_timeout(
    session: timedelta, heartbeat: timedelta, min_poll: timedelta, drain: timedelta
) -> timedelta:
    """R: the shortest that the session and the drain allow, in whole milliseconds."""
    shortest = max(
        session + rebalance_notice(session, heartbeat, min_poll),
        drain + group_heartbeat_interval(session) + SCAN_INTERVAL,
    )
    return -(-shortest // MS) * MS


@dataclass(frozen=True, slots=True)
class Timing:
    """The limits that hang together, all in effect. `delivery_given`: set by the user, not derived."""

    heartbeat_timeout: timedelta
    session_timeout: timedelta
    min_poll_interval: timedelta
    max_poll_interval: timedelta
    drain_interval: timedelta
    delivery_timeout: timedelta
    delivery_given: bool
    rebalance_timeout: timedelta

    def problems(self) -> list[Problem]:
        """Everything that breaks a rule, with the numbers and the setting to change."""
        return [*self._polling(), *self._delivery(), *self._rebalance()]

    def _polling(self) -> list[Problem]:
        found = []
        needed = self.min_poll_interval * MIN_POLLS_PER_HEARTBEAT
        heartbeat = format_duration(self.heartbeat_timeout)
        if self.heartbeat_timeout < needed:
            found.append(
                Problem(
                    "limits.heartbeat_timeout",
                    f"is {heartbeat}, less than {MIN_POLLS_PER_HEARTBEAT} times min_poll_interval "
                    f"({format_duration(self.min_poll_interval)}); a late poll would cost the leadership",
                    f"at least {format_duration(needed)}, or a lower limits.min_poll_interval",
                )
            )
        if not self.min_poll_interval <= self.max_poll_interval < self.heartbeat_timeout:
            found.append(
                Problem(
                    "limits.max_poll_interval",
                    f"is {format_duration(self.max_poll_interval)}; heartbeats go out that often",
                    f"at least min_poll_interval ({format_duration(self.min_poll_interval)}) "
                    f"and below heartbeat_timeout ({heartbeat})",
                )
            )
        return found

    def _delivery(self) -> list[Problem]:
        heartbeat, session, drain, delivery = (
            format_duration(max(value, timedelta(0)))
            for value in (self.heartbeat_timeout, self.session_timeout, self.drain_interval, self.delivery_timeout)
        )
        if not self.delivery_given:
            return [] if self.delivery_timeout >= MIN_DELIVERY_TIMEOUT else [self._no_room()]
        found = []
        if self.delivery_timeout < MIN_DELIVERY_TIMEOUT:
            found.append(
                Problem(
                    _DELIVERY_PATH,
                    f"is {delivery}; 0 would mean for ever" if not self.delivery_timeout else f"is {delivery}",
                    f"at least {format_duration(MIN_DELIVERY_TIMEOUT)}",
                )
            )
        needed = self.heartbeat_timeout + self.delivery_timeout + SCAN_INTERVAL
        if needed > self.session_timeout:
            longest = self.session_timeout - self.heartbeat_timeout - SCAN_INTERVAL
            found.append(
                Problem(
                    "limits.session_timeout",
                    f"is {session}, but heartbeat_timeout {heartbeat} + delivery timeout {delivery} + 1s = "
                    f"{format_duration(needed)}: a leader that was frozen could still send after another was elected "
                    f"(P12)",
                    f"session_timeout of at least {format_duration(needed)}, or {_at_most(_DELIVERY_PATH, longest)}",
                )
            )
        needed = self.delivery_timeout + PURGE_MARGIN
        if needed > self.drain_interval:
            found.append(
                Problem(
                    "limits.drain_interval",
                    f"is {drain}, but delivery timeout {delivery} + {format_duration(PURGE_MARGIN)} for the last "
                    f"purge = {format_duration(needed)}: a drain could end with records on the wire (P13)",
                    f"drain_interval of at least {format_duration(needed)}, or "
                    f"{_at_most(_DELIVERY_PATH, self.drain_interval - PURGE_MARGIN)}",
                )
            )
        return found

    def _no_room(self) -> Problem:
        by_session = self.session_timeout - self.heartbeat_timeout - SCAN_INTERVAL
        least = format_duration(MIN_DELIVERY_TIMEOUT)
        if by_session < MIN_DELIVERY_TIMEOUT:
            needed = self.heartbeat_timeout + SCAN_INTERVAL + MIN_DELIVERY_TIMEOUT
            return Problem(
                "limits.session_timeout",
                f"is {format_duration(self.session_timeout)}; after heartbeat_timeout "
                f"{format_duration(self.heartbeat_timeout)} and 1s, less than {least} is left for a delivery (P12)",
                f"at least {format_duration(needed)}",
            )
        return Problem(
            "limits.drain_interval",
            f"is {format_duration(self.drain_interval)}; after {format_duration(PURGE_MARGIN)} for the last purge, "
            f"less than {least} is left for a delivery (P13)",
            f"at least {format_duration(PURGE_MARGIN + MIN_DELIVERY_TIMEOUT)} (it follows "
            f"session_timeout, heartbeat_timeout and queue_timeout unless it is set)",
        )

    def _rebalance(self) -> list[Problem]:
        interval = group_heartbeat_interval(self.session_timeout)
        session, rebalance = format_duration(self.session_timeout), format_duration(self.rebalance_timeout)
        found = []
        notice = rebalance_notice(self.session_timeout, self.heartbeat_timeout, self.min_poll_interval)
        needed = self.session_timeout + notice
        if self.rebalance_timeout < needed:
            found.append(
                Problem(
                    _REBALANCE_PATH,
                    f"is {rebalance}, but session_timeout {session} + {format_duration(notice)} in which a leader"
                    f" notices a rebalance = {format_duration(needed)}: a leader that missed one could still send"
                    " after another was elected (P39)",
                    f"at least {format_duration(needed)}",
                )
            )
        needed = self.drain_interval + interval + SCAN_INTERVAL
        if needed > self.rebalance_timeout:
            longest = self.rebalance_timeout - interval - SCAN_INTERVAL
            found.append(
                Problem(
                    _REBALANCE_PATH,
                    f"is {rebalance}, but drain_interval {format_duration(self.drain_interval)} + group heartbeat "
                    f"{format_duration(interval)} + 1s = {format_duration(needed)}: the group would not "
                    f"wait for the end of a drain (P13)",
                    f"at least {format_duration(needed)}, or {_at_most('limits.drain_interval', longest)}",
                )
            )
        return found


def _at_most(path: str, limit: timedelta) -> str:
    if limit <= timedelta(0):
        return f"a lower {path} together with larger limits"
    return f"{path} of at most {format_duration(limit)}"
