"""Judges this machine for a harvester with this configuration, and the servers' clocks against its own (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from harvester.config import Config
from harvester.config.model import WORTHWHILE_SHARDS_PER_CORE
from harvester.doctor.facts import CheckResult, Clock, HostFacts, ok, warning

# The supervisor's pipes and pidfds per shard, and room for its Kafka clients and sessions.
_FILES, _FILES_PER_SHARD = 64, 8
_NOTICEABLE_S = 1.0


def judge_host(host: HostFacts, config: Config) -> Iterator[CheckResult]:
    """Versions, cores against shards, open files."""
    yield ok("host.versions", f"Python {host.python}, {host.kafka_client}, {host.postgres_client}")
    shards, most = config.limits.shards, WORTHWHILE_SHARDS_PER_CORE * host.cores
    text = f"{shards} shards on {host.cores} {'core' if host.cores == 1 else 'cores'}"
    if shards > most:
        advice = f"set limits.shards to {most} or less: more processes cost memory and sessions without moving more"
        yield warning("host.shards", f"{text}: more than {WORTHWHILE_SHARDS_PER_CORE} per core", advice)
    else:
        yield ok("host.shards", text)
    wanted = _FILES + _FILES_PER_SHARD * shards
    if host.open_files is not None and host.open_files < wanted:
        text = f"a process may open {host.open_files} files, but about {wanted} are needed"
        yield warning("host.open_files", text, "raise the limit: LimitNOFILE= in the unit, or ulimit -n")
    else:
        limit = "no limit" if host.open_files is None else f"{host.open_files} files"
        yield ok("host.open_files", f"{limit}, about {wanted} are needed")


def judge_clock(check: str, whose: str, clock: Clock, matters: str) -> CheckResult:
    """The relay's guarantees do not depend on synchronised clocks; its measurements do."""
    off, within = abs(clock.offset_s), _ms(clock.uncertainty_s)
    if off <= clock.uncertainty_s:
        return ok(check, f"{whose} clock agrees with this machine's within {within}")
    side = "ahead of" if clock.offset_s > 0 else "behind"
    text = f"{whose} clock is {_ms(off)} {side} this machine's (± {within})"
    if off - clock.uncertainty_s > _NOTICEABLE_S:
        return warning(check, text, f"synchronise both (NTP): {matters}")
    return ok(check, text)


def _ms(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
