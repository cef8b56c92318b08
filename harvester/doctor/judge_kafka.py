"""Judges the cluster and its topics: what they permit, and whether topics keep what they are given (pure).

Whether topics keep what they are given, and whether we may write to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harvester.config import Config
from harvester.config.model import LEADER_TOPIC_SUFFIX
from harvester.delivery.progress import LEAST_RECORD_BYTES, most_ids
from harvester.doctor.facts import CheckResult, Kafka, TopicFacts, listed, ok, problem, skipped, warning
from harvester.neli.heartbeat import LEAST_MESSAGE_BYTES

_HAS_NO_VERSION = "4.0 or newer"
_NEEDED_FOR_GROUP = ("READ",)


def judge_kafka(kafka: Kafka, config: Config) -> list[CheckResult]:
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


def _brokers(kafka: Kafka) -> CheckResult:
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


def _session(settings: Mapping[str, str], config: Config) -> CheckResult:
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


def _transactions(kafka: Kafka, settings: Mapping[str, str], config: Config) -> list[CheckResult]:
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


def _group(kafka: Kafka, config: Config) -> list[CheckResult]:
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


_NEEDED = {
    "leader": ("READ", "WRITE", "DESCRIBE"),
    "progress": ("READ", "WRITE", "DESCRIBE"),
    "record": ("WRITE", "DESCRIBE"),
}
_SIZE_BYTES = 1_048_588  # what brokers come with


_RESERVED = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state", "__cluster_metadata"})


def topics_of(config: Config, in_rows: Sequence[str]) -> list[str]:
    """All topics that this harvester uses or will use."""
    names = [config.leader_topic]
    if config.delivery == "exactly-once":
        names.append(config.progress_topic)
    if config.poison.notice_topic:
        names.append(config.poison.notice_topic)
    return list(dict.fromkeys([*names, *in_rows]))


def judge_topics(kafka: Kafka, config: Config, in_rows: Sequence[str]) -> list[CheckResult]:
    """The leader topic, the progress topic, the notices', and those that waiting rows name."""
    found = _leader_topic(kafka, config)
    if config.delivery == "exactly-once":
        found += _progress_topic(kafka, config)
    others = [name for name in topics_of(config, in_rows) if name not in _own(config)]
    missing = [name for name in others if name not in kafka.topics]
    if missing:
        creates = (kafka.settings or {}).get("auto.create.topics.enable") == "true"
        text = f"topics that rows or the configuration name do not exist, or may not be seen: {listed(missing)}"
        if creates:
            advice = (
                "create them with the partitions and copies that you want, before the broker auto-creates them with its"
                " defaults"
            )
            found.append(warning("topics.missing", text, advice))
        else:
            advice = "create them: their records go to quarantine (or what poison.policy says)"
            found.append(problem("topics.missing", text, advice))
    for name in others:
        if name in kafka.topics:
            found += _topic(kafka.topics[name], kafka, "record", f"topic.{name}")
    return found


def _own(config: Config) -> set[str]:
    return {config.leader_topic, config.progress_topic}


def _leader_topic(kafka: Kafka, config: Config) -> list[CheckResult]:
    topic = kafka.topics.get(config.leader_topic)
    if topic is None:
        return [ok("topics.leader", f"{config.leader_topic} does not exist: the first harvester makes it")]
    settings = topic.settings or {}
    found = []
    if topic.name in _RESERVED:
        found.append(
            problem(
                "topics.leader",
                f"{topic.name} is Kafka's own: it takes no heartbeat, so nobody can lead",
                f"name another leader_topic; without one it is {config.leader_group_id}{LEADER_TOPIC_SUFFIX}",
            )
        )
        return found
    if int(settings.get("max.message.bytes", LEAST_MESSAGE_BYTES)) < LEAST_MESSAGE_BYTES:
        found.append(
            problem(
                "topics.leader",
                f"{topic.name} has max.message.bytes={settings['max.message.bytes']}: it may take no heartbeat, so"
                " that nobody can lead",
                f"raise it to {LEAST_MESSAGE_BYTES} or more",
            )
        )
    if settings.get("cleanup.policy", "delete") != "delete":
        found.append(
            problem(
                "topics.leader",
                f"{topic.name} has cleanup.policy={settings['cleanup.policy']}: it takes no heartbeat, since they have"
                " no keys, so nobody can lead",
                "set it to delete, or name another leader_topic",
            )
        )
    if len(topic.partitions) > 1:
        found.append(
            warning(
                "topics.leader",
                f"{topic.name} has {len(topic.partitions)} partitions: a member that joins may take partition 0, and"
                " leadership, from another",
                "name another leader_topic, of one partition",
            )
        )
    # Heartbeats are worth nothing once they are read: copies matter only while somebody is to lead.
    return found + _topic(topic, kafka, "leader", "topics.leader", kept=False)


def _progress_topic(kafka: Kafka, config: Config) -> list[CheckResult]:
    topic = kafka.topics.get(config.progress_topic)
    if topic is None:
        return [ok("topics.progress", f"{config.progress_topic} does not exist: the first harvester makes it")]
    found = []
    settings, alter = topic.settings or {}, f"kafka-configs --alter --entity-type topics --entity-name {topic.name}"
    policy = settings.get("cleanup.policy", "compact")
    if policy != "compact":
        text = f"{topic.name} has cleanup.policy={policy}: what was committed may be forgotten"
        found.append(problem("topics.progress", text, f"{alter} --add-config cleanup.policy=compact"))
    size = int(settings.get("max.message.bytes", _SIZE_BYTES))
    names, wanted = most_ids(size), config.limits.max_in_flight_records
    if size < LEAST_RECORD_BYTES:
        text = f"{topic.name} has max.message.bytes={size}: too little for a progress record"
        found.append(problem("topics.progress", text, f"{alter} --add-config max.message.bytes={_SIZE_BYTES}"))
    elif names < wanted:
        text = (
            f"{topic.name} has max.message.bytes={size}: a shard has at most {names} records committed and not deleted,"
            f" fewer than limits.max_in_flight_records ({wanted})"
        )
        found.append(warning("topics.progress", text, f"{alter} --add-config max.message.bytes={_SIZE_BYTES}"))
    return found + _topic(topic, kafka, "progress", "topics.progress")


def _topic(topic: TopicFacts, kafka: Kafka, use: str, check: str, *, kept: bool = True) -> list[CheckResult]:
    found = [*_rights(topic, use, check), *_state(topic, check)]
    if kept:
        found += _copies(topic, kafka, check)
    if found:
        return found
    partitions = len(topic.partitions)
    noun = "partition" if partitions == 1 else "partitions"
    return [ok(check, f"{topic.name}: {partitions} {noun}, {topic.replication} copies, all in sync")]


def _rights(topic: TopicFacts, use: str, check: str) -> list[CheckResult]:
    if topic.operations is None:
        return []
    lacks = [operation for operation in _NEEDED[use] if operation not in topic.operations]
    if not lacks:
        return []
    advice = f"allow this user {', '.join(lacks)} on it (docs/security.md, rights in Kafka)"
    return [problem(check, f"this user may not {', '.join(lacks)} {topic.name}", advice)]


def _state(topic: TopicFacts, check: str) -> list[CheckResult]:
    """How the partitions stand at this moment."""
    found = []
    headless = [number for number, each in enumerate(topic.partitions) if each.leader < 0]
    if headless:
        text = f"{topic.name}: partitions without a leader: {listed([str(number) for number in headless])}"
        found.append(problem(check, text, "bring their brokers back; their records wait"))
    least = int((topic.settings or {}).get("min.insync.replicas", 1))
    # Where the factor itself is too low, that is what is said.
    short = [
        number
        for number, each in enumerate(topic.partitions)
        if len(each.replicas) >= least > len(each.in_sync) and each.leader >= 0
    ]
    lagging = [number for number, each in enumerate(topic.partitions) if len(each.in_sync) < len(each.replicas)]
    if short:
        text = f"{topic.name}: partitions with fewer than {least} copies in sync: {listed([str(n) for n in short])}"
        found.append(problem(check, text, "bring the brokers back: until then nothing can be written there"))
    elif lagging and not headless:
        text = f"{topic.name}: partitions with copies that lag behind: {listed([str(n) for n in lagging])}"
        found.append(warning(check, text, "see whether a broker is away or slow"))
    return found


def _copies(topic: TopicFacts, kafka: Kafka, check: str) -> list[CheckResult]:
    """What a broker's loss would cost."""
    copies = topic.replication
    if topic.settings is None:
        return []
    least = int(topic.settings.get("min.insync.replicas", 1))
    found = []
    if least > copies:
        found.append(
            problem(
                check,
                f"{topic.name}: min.insync.replicas is {least}, there are {copies} copies: nothing can be written",
                f"lower it to {max(copies - 1, 1)}, or add replicas",
            )
        )
    elif copies == 1:
        advice = "give it three copies, and min.insync.replicas 2" + (
            "" if kafka.brokers > 1 else "; that takes more brokers"
        )
        found.append(warning(check, f"{topic.name}: one copy: records are lost with its broker's disk", advice))
    elif least == 1:
        text = f"{topic.name}: min.insync.replicas is 1: an acknowledged record may stand on one broker only"
        found.append(warning(check, text, "set it to 2"))
    elif least == copies:
        text = f"{topic.name}: min.insync.replicas is {least} of {copies} copies: one broker less stops its records"
        found.append(warning(check, text, f"add a copy, or set it to {copies - 1}"))
    if topic.settings.get("unclean.leader.election.enable") == "true":
        text = f"{topic.name}: unclean leader elections are on: acknowledged records can be lost"
        found.append(problem(check, text, "set unclean.leader.election.enable=false"))
    return found
