"""Puts a harvester together from its configuration: the one place that knows all parts."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from harvester.announcer import Announcer
from harvester.config import Config
from harvester.config.timing import PURGE_MARGIN
from harvester.journal import Journal
from harvester.neli.election import Timing
from harvester.neli.group import Group, GroupCallbacks, Identity
from harvester.outbox.backlog import BacklogWatch
from harvester.outbox.keeper import ArchiveKeeper
from harvester.outbox.marker import MarkSession
from harvester.outbox.purge_session import Rules
from harvester.relay import hooks
from harvester.relay.attempts import Policy
from harvester.relay.machine import Settings, max_unsettled
from harvester.relay.marking import MarkLoop, Pace
from harvester.relay.processes import shared_memory
from harvester.relay.shard import ShardSpec
from harvester.relay.supervision import HandOver, RestartBudget
from harvester.relay.supervisor import Outlets, Supervisor

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]

_REVOKE_MARGIN_S = 1.0
_LONGEST_HAND_OVER_S = 300.0
_SHARDS_PER_CORE = 2  # more would take turns on the cores, with less to do at a time
_LEAST_ANSWER_S, _LEAST_SILENCE_S = 3.0, 5.0  # a healthy shard of a starved machine needs that long


@dataclass(slots=True)
class Parts:
    """A harvester's parts, wired, not yet started."""

    supervisor: Supervisor
    marker: MarkLoop
    group: Group
    backlog: BacklogWatch
    keeper: ArchiveKeeper | None
    revoke_within_s: float
    joined: threading.Event

    def join(self, identity: Identity, callbacks: GroupCallbacks) -> None:
        """Join the group."""
        self.group.start(identity, callbacks)
        self.joined.set()

    def end_marker(self, timeout_s: float) -> None:
        """End the mark loop and its session."""
        self.marker.stop()
        if self.marker.is_alive():
            self.marker.join(timeout_s)

    def group_stop(self) -> None:
        """Leave the group, if it was joined."""
        if self.joined.is_set():
            self.group.stop()


def assemble(
    config: Config,
    *,
    group: Group | None,
    announcer: Announcer,
    journal: Journal,
    emptied: Callable[[], None],
    failed: Callable[[BaseException], None],
    log: Callable[[int | None], Log],
) -> Parts:
    """Make all parts; nothing is connected or started yet."""
    limits = config.limits
    heartbeat_s = limits.heartbeat_timeout.total_seconds()
    test_hooks = hooks.load()
    shared = shared_memory()
    kafka = group if group is not None else kafka_group(config)
    supervisor = Supervisor(
        Settings(
            shards=limits.shards,
            max_in_flight_records=limits.max_in_flight_records,
            max_unsettled_records=max_unsettled(limits.max_in_flight_records),
            mark_query_records=limits.mark_query_records,
            send_buffer=limits.send_buffer,
            max_queued_per_key=limits.max_queued_per_key,
            records_per_shard=limits.records_per_shard,
            most_shards=_SHARDS_PER_CORE * len(os.sched_getaffinity(0)),
            answer_timeout_s=max(heartbeat_s, _LEAST_ANSWER_S),
            silence_timeout_s=max(2 * heartbeat_s, _LEAST_SILENCE_S),
            look_interval_s=limits.head_scan_interval.total_seconds(),
        ),
        shard_specs(config),
        shared,
        kafka,
        Outlets(
            announcer=announcer,
            settled=journal.settled,
            latencies=journal.latencies,
            emptied=emptied,
            failed=failed,
            trouble=journal.trouble,
            log=log,
            note=journal.note,
        ),
        RestartBudget(limits.restart_budget, limits.restart_window.total_seconds()),
        HandOver(2 * heartbeat_s, _LONGEST_HAND_OVER_S),
    )
    statement_timeout_s = 6 * heartbeat_s
    marker = MarkLoop(
        MarkSession(config.dsn, config.table, f"harvester {config.name}", statement_timeout_s),
        Pace(
            mark_backoff_s=limits.mark_backoff.total_seconds(),
            mark_backoff_max_s=limits.mark_backoff_max.total_seconds(),
            io_error_backoff_s=limits.io_error_backoff.total_seconds(),
            statement_timeout_s=statement_timeout_s,
            writes=config.marking == "table",
        ),
        config.name,
        supervisor.report,
        lambda: supervisor.trust.trusted,
        lambda: kafka.highest_term,
        test_hooks,
    )
    supervisor.marker = marker
    return Parts(
        supervisor=supervisor,
        marker=marker,
        group=kafka,
        backlog=BacklogWatch(config.dsn, config.table, f"harvester {config.name}"),
        keeper=_keeper(config, journal),
        revoke_within_s=_revoke_within_s(config),
        joined=threading.Event(),
    )


def _keeper(config: Config, journal: Journal) -> ArchiveKeeper | None:
    if config.archive == "off":
        return None
    return ArchiveKeeper(
        config.dsn,
        config.table,
        config.archive_retention,
        f"harvester {config.name}",
        lambda problem: journal.trouble("archive", problem),
    )


def shard_specs(config: Config) -> list[ShardSpec]:
    """What each shard process is told."""
    limits = config.limits
    policy = Policy(
        max_attempts=limits.max_attempts,
        retry_backoff_s=limits.retry_backoff.total_seconds(),
        retry_backoff_max_s=limits.retry_backoff_max.total_seconds(),
        queue_timeout_s=limits.queue_timeout.total_seconds(),
        poison=config.poison.policy,
    )
    return [
        ShardSpec(
            index=index,
            name=config.name,
            parent_pid=os.getpid(),
            dsn=config.dsn,
            outbox=config.outbox_table,
            producer_options=dict(config.producer_options()),
            policy=policy,
            rules=Rules(config.archive, config.poison.notice_topic),
            io_error_backoff_s=limits.io_error_backoff.total_seconds(),
            linger_at_end_s=(config.delivery_timeout + PURGE_MARGIN).total_seconds(),
        )
        for index in range(limits.shards)
    ]


def kafka_group(config: Config) -> Group:
    """The place in Kafka's group that the configuration names."""
    from harvester.neli.member import KafkaGroup, MemberSettings

    limits = config.limits
    heartbeat_s = limits.heartbeat_timeout.total_seconds()
    poll_s = limits.min_poll_interval.total_seconds()
    revoke_limit_s = (config.rebalance_timeout - config.group_heartbeat_interval).total_seconds()
    return KafkaGroup(
        MemberSettings(
            topic=config.leader_topic,
            group=config.leader_group_id,
            consumer_options=config.consumer_options(),
            producer_options=config.common_options(),
            poll_s=poll_s,
            timing=Timing(max(poll_s, heartbeat_s / 10), heartbeat_s, revoke_limit_s),
            revoke_within_s=_revoke_within_s(config),
            foreign_live_s=limits.session_timeout.total_seconds(),
        )
    )


def _revoke_within_s(config: Config) -> float:
    limit = config.rebalance_timeout - config.group_heartbeat_interval
    return max(0.0, limit.total_seconds() - _REVOKE_MARGIN_S)
