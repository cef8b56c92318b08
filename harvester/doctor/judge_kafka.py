"""What the cluster is and permits (pure). Topics are judged in `judge_topics`."""

from __future__ import annotations

from collections.abc import Mapping

from harvester.config import Config
from harvester.doctor.facts import Kafka
from harvester.doctor.findings import Finding, ok, problem, skipped, warning

_HAS_NO_VERSION = "4.0 or newer"
_NEEDED_FOR_GROUP = ("READ",)


def judge_kafka(kafka: Kafka, config: Config) -> list[Finding]:
    """Brokers, version, bounds of sessions and transactions, rights on the group."""
    found = [_brokers(kafka)]
    if kafka.settings is None:
        why = kafka.unread.get("broker's settings", "no answer")
        found.append(
            skipped("kafka.settings", f"the brokers' settings could not be read: {why}", "ask an administrator")
        )
    else:
        found += [_session(kafka.settings, config), *_transactions(kafka, kafka.settings, config)]
    found += _group(kafka, config)
    found += [
        skipped(f"kafka.{part.replace(' ', '_')}", f"could not be read: {why}", "ask an administrator")
        for part, why in kafka.unread.items()
        if part != "broker's settings"
    ]
    return found


def _brokers(kafka: Kafka) -> Finding:
    version = version_of(kafka.settings)
    text = f"{kafka.brokers} {'broker' if kafka.brokers == 1 else 'brokers'}, Kafka {version}"
    if kafka.brokers == 1:
        return warning(
            "kafka.brokers", text, "take three for anything that matters: one broker's disk holds everything"
        )
    return ok("kafka.brokers", text)


def version_of(settings: Mapping[str, str] | None) -> str:
    """What brokers before 4.0 tell of their version; later ones have no such setting."""
    if settings is None:
        return "of an unknown version"
    told = settings.get("inter.broker.protocol.version")
    return told.split("-")[0] if told else _HAS_NO_VERSION


def _session(settings: Mapping[str, str], config: Config) -> Finding:
    ours = round(config.limits.session_timeout.total_seconds() * 1000)
    low = int(settings.get("group.min.session.timeout.ms", 0))
    high = int(settings.get("group.max.session.timeout.ms", 2**31))
    if not low <= ours <= high:
        return problem(
            "kafka.session_timeout",
            f"limits.session_timeout is {ours} ms, the brokers permit {low} to {high} ms: no harvester can join",
            "choose one within, or change group.min/max.session.timeout.ms of the brokers",
        )
    return ok("kafka.session_timeout", f"{ours} ms is within what the brokers permit ({low} to {high} ms)")


def _transactions(kafka: Kafka, settings: Mapping[str, str], config: Config) -> list[Finding]:
    if config.delivery != "exactly-once":
        return []
    found = []
    ours = int(config.lane_options()["transaction.timeout.ms"])
    most = int(settings.get("transaction.max.timeout.ms", ours))
    if ours > most:
        advice = "raise transaction.max.timeout.ms of the brokers, or lower delivery.timeout.ms"
        text = f"transactions may take {ours} ms, the brokers permit {most} ms"
        found.append(problem("kafka.transactions", text, advice))
    copies = int(settings.get("transaction.state.log.replication.factor", 0))
    if copies > kafka.brokers:
        found.append(
            problem(
                "kafka.transactions",
                f"the transaction state log wants {copies} copies, there are {kafka.brokers} brokers: no transaction"
                " can begin",
                "start the missing brokers, or lower transaction.state.log.replication.factor",
            )
        )
    elif copies == 1 or int(settings.get("transaction.state.log.min.isr", 2)) < 2:
        advice = "set transaction.state.log.replication.factor 3 and transaction.state.log.min.isr 2"
        found.append(warning("kafka.transactions", "what was committed stands on one broker's disk", advice))
    return found or [
        ok("kafka.transactions", f"transactions of {ours} ms are permitted, their log has {copies} copies")
    ]


def _group(kafka: Kafka, config: Config) -> list[Finding]:
    group = kafka.group
    if group is None:
        return []
    name = config.leader_group_id
    if group.operations is not None:
        lacks = [operation for operation in _NEEDED_FOR_GROUP if operation not in group.operations]
        if lacks:
            advice = f"allow this user {', '.join(lacks)} on the group (docs/security.md, rights in Kafka)"
            return [problem("kafka.group", f"this user may not {', '.join(lacks)} the group {name!r}", advice)]
    if not group.members:
        return [ok("kafka.group", f"the group {name!r} has no members: no harvester runs")]
    count = f"{group.members} {'harvester runs' if group.members == 1 else 'harvesters run'}"
    return [ok("kafka.group", f"{count} in the group {name!r} ({group.state})")]
