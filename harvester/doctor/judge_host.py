"""What this machine gives to a harvester with this configuration (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from harvester.config import Config
from harvester.config.model import WORTHWHILE_SHARDS_PER_CORE
from harvester.doctor.facts import CheckResult, Clock, HostFacts, JavaFacts, ok, problem, warning

# The supervisor's pipes and pidfds for a shard, and room for its Kafka clients and sessions.
_FILES, _FILES_PER_SHARD = 64, 8
_NOTICEABLE_S = 1.0


def judge_host(host: HostFacts, config: Config) -> list[CheckResult]:
    """Versions, cores against shards, open files."""
    found = [ok("host.versions", f"Python {host.python}, {host.kafka_client}, {host.postgres_client}")]
    shards, most = config.limits.shards, WORTHWHILE_SHARDS_PER_CORE * host.cores
    text = f"{shards} shards on {host.cores} {'core' if host.cores == 1 else 'cores'}"
    if shards > most:
        found.append(
            warning(
                "host.shards",
                f"{text}: more than {WORTHWHILE_SHARDS_PER_CORE} for each core",
                f"set limits.shards to {most} or less: more processes take memory and sessions, and move no more",
            )
        )
    else:
        found.append(ok("host.shards", text))
    wanted = _FILES + _FILES_PER_SHARD * shards
    if host.open_files is not None and host.open_files < wanted:
        found.append(
            warning(
                "host.open_files",
                f"a process may have {host.open_files} files open, about {wanted} are needed",
                "raise the limit: LimitNOFILE= in the unit, or ulimit -n",
            )
        )
    else:
        limit = "no limit" if host.open_files is None else f"{host.open_files} files"
        found.append(ok("host.open_files", f"{limit}, about {wanted} are needed"))
    return found


def judge_java(runtimes: Sequence[JavaFacts]) -> list[CheckResult]:
    """Only for commands that were asked about: the relay itself needs none."""
    found = []
    for java in runtimes:
        check = f"java.{java.command}"
        if java.version is not None:
            found.append(ok(check, f"`harvester {java.command}` runs on Java {java.version}"))
        else:
            found.append(problem(check, java.error or "there is no Java", java.hint or "install Java 17 or 21"))
    return found


def judge_clock(check: str, whose: str, clock: Clock, matters: str) -> CheckResult:
    """Nothing that the relay promises depends on clocks that agree; figures do."""
    off = abs(clock.offset_s)
    text = f"{whose} clock is {_ms(off)} {'ahead of' if clock.offset_s > 0 else 'behind'} this machine's"
    if off - clock.uncertainty_s > _NOTICEABLE_S:
        return warning(check, f"{text} (± {_ms(clock.uncertainty_s)})", f"synchronise both (NTP): {matters}")
    if off <= clock.uncertainty_s:
        return ok(check, f"{whose} clock agrees with this machine's within {_ms(clock.uncertainty_s)}")
    return ok(check, f"{text} (± {_ms(clock.uncertainty_s)})")


def _ms(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
