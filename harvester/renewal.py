"""New passwords for a harvester that runs: connections that are open stay, new ones log in with what is given here."""

from __future__ import annotations

from functools import partial

from harvester.assembly import Parts, progress_topic, shard_specs
from harvester.config import Config
from harvester.relay.frames import Login


def renew_logins(parts: Parts, config: Config) -> None:
    """Tell all parts, shards included. `config` differs from theirs in passwords only."""
    dsn = config.dsn
    options = config.common_options()
    user, password = options.get("sasl.username", ""), options.get("sasl.password", "")
    shard = config.producer_options()  # which may have a login of its own
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
    log_in = getattr(parts.group, "log_in", None)  # a group of the host's own has no connection of ours
    if log_in is not None and user and password:
        log_in(config.consumer_options(), options, user)
