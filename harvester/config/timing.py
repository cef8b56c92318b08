"""Checks how the time limits depend on each other, and derives defaults from others (P12, P13, P39).

Everything a frozen leader could still send must have expired before the group can have elected another one: heartbeat
timeout + delivery timeout + 1 s <= session timeout (the Kafka client checks for expired records once a second). A
leader whose partition is revoked must be able to finish what is on the wire within the drain, and the drain must fit
into the time for which the group waits.

The group also removes a member that misses a rebalance, counted from the beginning of the rebalance, which an accepted
commit does not reveal (`harvester.neli.election`). The rebalance timeout exceeds the session timeout by the time that a
leader needs to notice a rebalance, so that this removal never precedes the one by the session timeout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from harvester.config.durations import format_duration
from harvester.errors import Problem

MS = timedelta(milliseconds=1)
PURGE_MARGIN = timedelta(milliseconds=500)  # part of the drain, reserved for purging what was acknowledged last
SCAN_INTERVAL = timedelta(seconds=1)  # how often the Kafka client checks for expired records
MIN_DELIVERY_TIMEOUT = timedelta(milliseconds=100)  # healthy brokers would miss a shorter one
MIN_POLLS_PER_HEARTBEAT = 4
HEARTBEATS_PER_TIMEOUT = 10  # a leader's heartbeats and commits per timeout
CLIENT_TICK = timedelta(seconds=1)  # the Kafka client does what is due at least this often
REJOIN_DELAY = 2 * CLIENT_TICK  # the longest time for the Kafka client to answer a known rebalance
_USUAL_DELIVERY = timedelta(seconds=2)
_MIN_GROUP_HEARTBEAT = timedelta(milliseconds=100)
_MAX_GROUP_HEARTBEAT = timedelta(milliseconds=500)
_DELIVERY_PATH = 'producer_kafka_config."delivery.timeout.ms"'
_REBALANCE_PATH = 'base_kafka_config."max.poll.interval.ms"'


def group_heartbeat_interval(session_timeout: timedelta) -> timedelta:
    """g: how often the Kafka client proves to the group that it is alive; a thirtieth of the session, 100 to 500 ms."""
    return min(max(session_timeout / 30, _MIN_GROUP_HEARTBEAT), _MAX_GROUP_HEARTBEAT)


def missed_heartbeats(session_timeout: timedelta) -> timedelta:
    """How long a rebalance can go unnoticed on a working connection: two group heartbeats, as one can be lost with a
    connection.
    """
    return 2 * (group_heartbeat_interval(session_timeout) + CLIENT_TICK)


def heartbeat_interval(heartbeat_timeout: timedelta, min_poll_interval: timedelta) -> timedelta:
    """How often a leader sends a heartbeat and commits."""
    return max(heartbeat_timeout / HEARTBEATS_PER_TIMEOUT, min_poll_interval)


def rebalance_notice(session: timedelta, heartbeat: timedelta, min_poll: timedelta) -> timedelta:
    """By how much a rebalance unnoticed by its sender may precede an accepted commit."""
    return missed_heartbeats(session) + REJOIN_DELAY + 2 * heartbeat_interval(heartbeat, min_poll)


def default_session_timeout(heartbeat: timedelta) -> timedelta:
    """S: leaves two seconds for a delivery, or the heartbeat timeout minus one second if that is more."""
    return heartbeat + max(heartbeat, _USUAL_DELIVERY + SCAN_INTERVAL)


def default_drain_interval(session: timedelta, heartbeat: timedelta, queue_timeout: timedelta) -> timedelta:
    """The shortest in which the longest delivery allowed by P12 can end; at most the queue timeout."""
    longest_delivery = max(session - heartbeat - SCAN_INTERVAL, MIN_DELIVERY_TIMEOUT)
    return min(longest_delivery + PURGE_MARGIN, queue_timeout)


def default_delivery_timeout(session: timedelta, heartbeat: timedelta, drain: timedelta) -> timedelta:
    """D: the longest allowed by P12 and P13, in whole milliseconds; not positive if they leave no room."""
    longest = min(session - heartbeat - SCAN_INTERVAL, drain - PURGE_MARGIN)
    return longest // MS * MS


def default_rebalance_timeout(
    session: timedelta, heartbeat: timedelta, min_poll: timedelta, drain: timedelta
) -> timedelta:
    """R: the shortest allowed by session and drain, in whole milliseconds."""
    shortest = max(
        session + rebalance_notice(session, heartbeat, min_poll),
        drain + group_heartbeat_interval(session) + SCAN_INTERVAL,
    )
    return -(-shortest // MS) * MS


@dataclass(frozen=True, slots=True)
class Timing:
    """The effective values of the interdependent limits. `delivery_given`: set by the user, not derived."""

    heartbeat_timeout: timedelta
    session_timeout: timedelta
    min_poll_interval: timedelta
    drain_interval: timedelta
    delivery_timeout: timedelta
    delivery_given: bool
    rebalance_timeout: timedelta

    def problems(self) -> Iterator[Problem]:
        """All broken rules, with the numbers and the setting to change."""
        yield from self._polling()
        if not self.delivery_given:
            yield from self._room_for_delivery()
        else:
            yield from self._delivery()
        yield from self._rebalance()

    def _polling(self) -> Iterator[Problem]:
        least = self.min_poll_interval * MIN_POLLS_PER_HEARTBEAT
        heartbeat, poll = format_duration(self.heartbeat_timeout), format_duration(self.min_poll_interval)
        if self.heartbeat_timeout < least:
            yield Problem(
                "limits.heartbeat_timeout",
                f"is {heartbeat}, less than {MIN_POLLS_PER_HEARTBEAT} times min_poll_interval ({poll}); one late poll"
                " would cost the leadership",
                f"at least {format_duration(least)}, or a lower limits.min_poll_interval",
            )

    def _delivery(self) -> Iterator[Problem]:
        delivery, heartbeat = format_duration(self.delivery_timeout), format_duration(self.heartbeat_timeout)
        if self.delivery_timeout < MIN_DELIVERY_TIMEOUT:
            yield Problem(
                _DELIVERY_PATH,
                f"is {delivery}; 0 would mean forever" if not self.delivery_timeout else f"is {delivery}",
                f"at least {format_duration(MIN_DELIVERY_TIMEOUT)}",
            )
        least = self.heartbeat_timeout + self.delivery_timeout + SCAN_INTERVAL
        if self.session_timeout < least:
            yield Problem(
                "limits.session_timeout",
                f"is {format_duration(self.session_timeout)}, but heartbeat_timeout {heartbeat} + delivery timeout"
                f" {delivery} + 1s = {format_duration(least)}: a frozen leader could still send after another"
                " was elected (P12)",
                f"session_timeout of at least {format_duration(least)}, or "
                f"{_at_most(_DELIVERY_PATH, self.session_timeout - self.heartbeat_timeout - SCAN_INTERVAL)}",
            )
        least = self.delivery_timeout + PURGE_MARGIN
        if self.drain_interval < least:
            yield Problem(
                "limits.drain_interval",
                f"is {format_duration(self.drain_interval)}, but delivery timeout {delivery} +"
                f" {format_duration(PURGE_MARGIN)} for the last purge = {format_duration(least)}: a drain could end"
                " with records on the wire (P13)",
                f"drain_interval of at least {format_duration(least)}, or "
                f"{_at_most(_DELIVERY_PATH, self.drain_interval - PURGE_MARGIN)}",
            )

    def _room_for_delivery(self) -> Iterator[Problem]:
        """The derived delivery timeout is the longest that the other limits allow: they must allow one."""
        shortest = format_duration(MIN_DELIVERY_TIMEOUT)
        if self.delivery_timeout >= MIN_DELIVERY_TIMEOUT:
            return
        least = self.heartbeat_timeout + SCAN_INTERVAL + MIN_DELIVERY_TIMEOUT
        if self.session_timeout < least:
            yield Problem(
                "limits.session_timeout",
                f"is {format_duration(self.session_timeout)}; after heartbeat_timeout "
                f"{format_duration(self.heartbeat_timeout)} and 1s, less than {shortest} is left for a delivery (P12)",
                f"at least {format_duration(least)}",
            )
        else:
            yield Problem(
                "limits.drain_interval",
                f"is {format_duration(self.drain_interval)}; after {format_duration(PURGE_MARGIN)} for the last purge, "
                f"less than {shortest} is left for a delivery (P13)",
                f"at least {format_duration(PURGE_MARGIN + MIN_DELIVERY_TIMEOUT)} (unless set, it follows"
                " session_timeout, heartbeat_timeout and queue_timeout)",
            )

    def _rebalance(self) -> Iterator[Problem]:
        interval = group_heartbeat_interval(self.session_timeout)
        rebalance = format_duration(self.rebalance_timeout)
        notice = rebalance_notice(self.session_timeout, self.heartbeat_timeout, self.min_poll_interval)
        least = self.session_timeout + notice
        if self.rebalance_timeout < least:
            yield Problem(
                _REBALANCE_PATH,
                f"is {rebalance}, but session_timeout {format_duration(self.session_timeout)} +"
                f" {format_duration(notice)} in which a leader notices a rebalance = {format_duration(least)}: a leader"
                " that missed one could still send after another was elected (P39)",
                f"at least {format_duration(least)}",
            )
        least = self.drain_interval + interval + SCAN_INTERVAL
        if self.rebalance_timeout < least:
            yield Problem(
                _REBALANCE_PATH,
                f"is {rebalance}, but drain_interval {format_duration(self.drain_interval)} + group heartbeat"
                f" {format_duration(interval)} + 1s = {format_duration(least)}: the group would not wait for the end of"
                " a drain (P13)",
                f"at least {format_duration(least)}, or "
                f"{_at_most('limits.drain_interval', self.rebalance_timeout - interval - SCAN_INTERVAL)}",
            )


def _at_most(path: str, limit: timedelta) -> str:
    if limit <= timedelta(0):
        return f"a lower {path} together with larger limits"
    return f"{path} of at most {format_duration(limit)}"
