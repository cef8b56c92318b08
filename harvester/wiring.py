"""Assembles a harvester from its configuration: the only module that knows all parts.

`assemble` creates them, unconnected. `renew_logins` gives new passwords to running parts: open connections are kept,
new ones use them.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from harvester import failpoints
from harvester.announcer import Announcer
from harvester.bounds import SILENT
from harvester.claim_check.stores import open_store
from harvester.config import Config, timing
from harvester.config.model import WORTHWHILE_SHARDS_PER_CORE
from harvester.delivery.lane import Lanes, LaneSettings
from harvester.delivery.progress import LANES_OF_A_SHARD
from harvester.delivery.progress_topic import ProgressTopic, ensure_progress_topic, find_progress_topic
from harvester.delivery.retries import Policy
from harvester.neli.election import ElectionTiming
from harvester.neli.group import Group, GroupListener, Identity
from harvester.neli.topic import ask_cluster_id
from harvester.outbox.archive import ArchiveKeeper
from harvester.outbox.leader_session import SILENCE_MARGIN_S, MarkSession, Owner
from harvester.outbox.overview import BacklogWatch
from harvester.outbox.purge_session import PurgeSession, Rules
from harvester.relay.core.frames import Login
from harvester.relay.core.leadership import HandOver, RelaySettings, max_unsettled
from harvester.relay.forkserver import Forkserver
from harvester.relay.marker import Marker, RetryDelays
from harvester.relay.put_away import PutAwaySettings
from harvester.relay.shard import ShardSpec
from harvester.relay.shard_pool import RestartBudget
from harvester.relay.supervisor import Host, Supervisor
from harvester.relay.term import EXACTLY_ONCE, DeliveryHandover
from harvester.status_recorder import StatusRecorder

if TYPE_CHECKING:
    from harvester.neli.member import MemberSettings

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]

_REVOKE_MARGIN_S = 1.0
_LINGER_MARGIN_S = 1.0  # a shard checks the clock twice a second
_LONGEST_HAND_OVER_S = 300.0
_STATEMENT_HEARTBEATS, _HAND_OVER_HEARTBEATS = 6, 2  # after which a statement is given up, and leadership
_SHARDS_PER_CORE = 2  # more would compete for the cores, with less to do at a time
_LEAST_ANSWER_S, _LEAST_SILENCE_S = 3.0, 5.0  # a healthy shard on a starved machine needs this long


@dataclass(slots=True)
class Parts:
    """A harvester's parts, wired but not started yet."""

    supervisor: Supervisor
    marker: Marker
    group: Group
    backlog: BacklogWatch
    keeper: ArchiveKeeper | None
    revoke_within_s: float
    joined: threading.Event

    def prepare(self, config: Config, shards: int = 0, recorded: str | None = None) -> None:
        """Provide what the delivery mode needs for `shards` shards. Raises BrokerUnavailable or BrokerError, or
        SchemaError if the progress topic is not the one with the id that the term row records.
        """
        if config.delivery == EXACTLY_ONCE:
            topic = _ensure_progress_topic(config, shards, recorded)
            self.supervisor.lanes_known(topic.lanes)

    def join(self, identity: Identity, listener: GroupListener) -> None:
        """Join the group."""
        self.group.start(identity, listener)
        self.joined.set()

    def end_marker(self, timeout_s: float) -> None:
        """End the mark loop and its session."""
        self.marker.stop()
        if self.marker.is_alive():
            self.marker.join(timeout_s)

    def group_stop(self) -> None:
        """Leave the group, if joined."""
        if self.joined.is_set():
            self.group.stop()


def assemble(
    config: Config,
    *,
    group: Group | None,
    announcer: Announcer,
    recorder: StatusRecorder,
    host: Host,
    log_of: Callable[[int | None], Log],
    forkserver: Forkserver | None = None,
) -> Parts:
    """Create all parts; nothing is connected or started yet."""
    limits = config.limits
    cores = len(os.sched_getaffinity(0))
    if limits.shards > WORTHWHILE_SHARDS_PER_CORE * cores:
        log_of(None).warning(
            "%d shards on %d cores: more than %d per core cost memory and sessions without moving more",
            limits.shards,
            cores,
            WORTHWHILE_SHARDS_PER_CORE,
        )
    heartbeat_s = limits.heartbeat_timeout.total_seconds()
    points = failpoints.load()
    forkserver = forkserver or Forkserver()
    kafka = group if group is not None else kafka_group(config, forkserver)
    supervisor = Supervisor(
        RelaySettings(
            shards=limits.shards,
            max_in_flight_records=limits.max_in_flight_records,
            max_unsettled_records=max_unsettled(limits.max_in_flight_records),
            mark_query_records=limits.mark_query_records,
            send_buffer=limits.send_buffer,
            max_queued_per_key=limits.max_queued_per_key,
            records_per_shard=limits.records_per_shard,
            most_shards=_SHARDS_PER_CORE * cores,
            answer_timeout_s=max(heartbeat_s, _LEAST_ANSWER_S),
            silence_timeout_s=max(2 * heartbeat_s, _LEAST_SILENCE_S),
            look_interval_s=limits.head_scan_interval.total_seconds(),
            exactly_once=config.delivery == EXACTLY_ONCE,
            expiry_s=expiry_s(config),
        ),
        shard_specs(config),
        forkserver,
        kafka,
        host=host,
        recorder=recorder,
        announcer=announcer,
        log_of=log_of,
        budget=RestartBudget(limits.restart_budget, limits.restart_window.total_seconds()),
        hand_over=HandOver(_HAND_OVER_HEARTBEATS * heartbeat_s, _LONGEST_HAND_OVER_S),
    )
    statement_timeout_s = _STATEMENT_HEARTBEATS * heartbeat_s
    marker = supervisor.marker = Marker(
        MarkSession(config.dsn, config.table, f"harvester {config.name}", statement_timeout_s),
        RetryDelays(
            mark_backoff_s=limits.mark_backoff.total_seconds(),
            mark_backoff_max_s=limits.mark_backoff_max.total_seconds(),
            io_error_backoff_s=limits.io_error_backoff.total_seconds(),
            statement_timeout_s=statement_timeout_s,
            writes=config.marking == "table",
        ),
        config.name,
        supervisor,
        kafka,
        points,
        take_over_mode(config, f"harvester {config.name}/lanes"),
        config.leader_group_id,
    )
    return Parts(
        supervisor=supervisor,
        marker=marker,
        group=kafka,
        backlog=BacklogWatch(config.dsn, config.table, f"harvester {config.name}"),
        keeper=_keeper(config, recorder),
        revoke_within_s=_revoke_within_s(config),
        joined=threading.Event(),
    )


def take_over_mode(config: Config, application: str) -> DeliveryHandover:
    """What a term owes to the previous one, and the means for it; `application` is the name of its database session."""
    make = failpoints.load().producer
    lanes = Lanes(_lane_settings(config), lambda options: make({**options, **SILENT}))
    session = PurgeSession(config.dsn, config.table, application, Rules(config.archive, config.poison.notice_topic))
    return DeliveryHandover(config.delivery, expiry_s(config), lanes, session, partial(progress_topic, config))


def owner_of(config: Config) -> Owner:
    """The owner that harvesters of this configuration represent (P37). Raises BrokerUnavailable."""
    return Owner(config.leader_group_id, ask_cluster_id(config.common_options()))


def expiry_s(config: Config) -> float:
    """S + H + D: after this, nothing that an at-least-once leader, or one of its shards, had on the wire remains
    (P24).
    """
    limits = config.limits
    return (limits.session_timeout + limits.heartbeat_timeout + config.delivery_timeout).total_seconds()


def unaware_s(config: Config) -> float:
    """After this, a leader whose term was taken has noticed it, even without its database, and nothing that it sent is
    on the wire (P32). A statement without an answer, and the hand-over after it, take longest.
    """
    limits = config.limits
    heartbeats_s = (_STATEMENT_HEARTBEATS + _HAND_OVER_HEARTBEATS) * limits.heartbeat_timeout.total_seconds()
    blind_s = heartbeats_s + SILENCE_MARGIN_S + config.delivery_timeout.total_seconds()
    return max(blind_s, expiry_s(config))


def progress_topic(config: Config, recorded: str | None) -> ProgressTopic | None:
    """The lanes' topic; created if this harvester needs it. `recorded`: see `ensure_progress_topic`."""
    if config.delivery == EXACTLY_ONCE:
        return _ensure_progress_topic(config, recorded=recorded)
    return find_progress_topic(config.progress_topic, config.common_options())


def _ensure_progress_topic(config: Config, shards: int = 0, recorded: str | None = None) -> ProgressTopic:
    lanes = LANES_OF_A_SHARD * max(shards, config.limits.shards)
    return ensure_progress_topic(config.progress_topic, config.common_options(), lanes, recorded)


def _lane_settings(config: Config) -> LaneSettings:
    return LaneSettings(config.leader_group_id, config.progress_topic, config.common_options(), config.lane_options())


def _keeper(config: Config, recorder: StatusRecorder) -> ArchiveKeeper | None:
    if config.archive == "off":
        return None
    return ArchiveKeeper(
        config.dsn,
        config.table,
        config.archive_retention,
        f"harvester {config.name}",
        lambda problem: recorder.trouble("archive", problem),
    )


def _put_away_settings(config: Config) -> PutAwaySettings | None:
    store = config.oversize.store_settings
    if config.oversize.policy != "claim-check" or store is None:
        return None
    open_store(store)  # raises ConfigurationError if S3's library is missing, before shards start
    return PutAwaySettings(store, config.oversize.above or config.largest_record_bytes)


def shard_specs(config: Config) -> list[ShardSpec]:
    """The specification of each shard process."""
    limits = config.limits
    oversize = _put_away_settings(config)
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
            dsn=config.dsn,
            outbox=config.outbox_table,
            producer_options=dict(config.producer_options()),
            policy=policy,
            rules=Rules(config.archive, config.poison.notice_topic),
            io_error_backoff_s=limits.io_error_backoff.total_seconds(),
            linger_at_end_s=_linger_s(config),
            header=config.record_header,
            lanes=_lane_settings(config) if config.delivery == EXACTLY_ONCE else None,
            transaction_records=limits.max_transaction_records,
            tracing=config.tracing.enabled,
            reserved=frozenset({config.leader_topic, config.progress_topic}),
            dated=config.record_timestamp == "create_time",
            oversize=oversize,
        )
        for index in range(limits.shards)
    ]


def kafka_group(config: Config, forkserver: Forkserver) -> Group:
    """The configured Kafka group's member."""
    from harvester.relay.elector import Elector

    expiry = config.delivery_timeout + timing.SCAN_INTERVAL
    return Elector(member_settings(config), _linger_s(config) + _LINGER_MARGIN_S, expiry.total_seconds(), forkserver)


def member_settings(config: Config) -> MemberSettings:
    """The settings of that group's member."""
    from harvester.neli.member import MemberSettings

    limits = config.limits
    expiry = config.delivery_timeout + timing.SCAN_INTERVAL
    return MemberSettings(
        topic=config.leader_topic,
        group=config.leader_group_id,
        consumer_options=config.consumer_options(),
        producer_options=config.common_options(),
        poll_s=limits.min_poll_interval.total_seconds(),
        join_wait_s=config.join_wait.total_seconds(),
        timing=ElectionTiming(
            heartbeat_interval_s=timing.heartbeat_interval(
                limits.heartbeat_timeout, limits.min_poll_interval
            ).total_seconds(),
            heartbeat_timeout_s=limits.heartbeat_timeout.total_seconds(),
            session_limit_s=(limits.session_timeout - expiry).total_seconds(),
            rebalance_limit_s=(config.rebalance_timeout - expiry).total_seconds(),
            revoke_limit_s=(config.rebalance_timeout - config.group_heartbeat_interval).total_seconds(),
            missed_heartbeats_s=timing.missed_heartbeats(limits.session_timeout).total_seconds(),
            rejoin_delay_s=timing.REJOIN_DELAY.total_seconds(),
        ),
        revoke_within_s=_revoke_within_s(config),
        session_s=limits.session_timeout.total_seconds(),
        foreign_live_s=limits.session_timeout.total_seconds(),
    )


def _linger_s(config: Config) -> float:
    """How long a shard may take to finish what is on the wire."""
    return (config.delivery_timeout + timing.PURGE_MARGIN).total_seconds()


def _revoke_within_s(config: Config) -> float:
    limit = config.rebalance_timeout - config.group_heartbeat_interval
    return max(0.0, limit.total_seconds() - _REVOKE_MARGIN_S)


def renew_logins(parts: Parts, config: Config) -> None:
    """Update all parts, including shards. `config` differs from theirs only in passwords."""
    dsn = config.dsn
    options = config.common_options()
    user, password = options.get("sasl.username", ""), options.get("sasl.password", "")
    shard = config.producer_options()  # which may have separate credentials
    shard_user, shard_password = shard.get("sasl.username", ""), shard.get("sasl.password", "")
    parts.marker.log_in(dsn)
    parts.backlog.log_in(dsn)
    if parts.keeper is not None:
        parts.keeper.log_in(dsn)
    mode = parts.marker.mode
    if mode.session is not None:
        mode.session.log_in(dsn)
    if mode.lanes is not None and shard_user:
        mode.lanes.log_in(shard_user, shard_password)
    mode.find = partial(progress_topic, config)
    parts.supervisor.log_in(shard_specs(config)[0], Login(dsn, shard_user, shard_password))
    log_in = getattr(parts.group, "log_in", None)  # a host's own group has no connection of ours
    if log_in is not None and user and password:
        log_in(config.consumer_options(), options, user)
