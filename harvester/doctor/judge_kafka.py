"""Judges the cluster and its topics: what brokers permit, and whether topics keep what is written to them (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harvester.config import Config
from harvester.config.kafka_options import get
from harvester.config.model import AROUND_A_RECORD, LEADER_TOPIC_SUFFIX
from harvester.delivery.progress import LEAST_RECORD_BYTES, most_ids
from harvester.doctor.facts import CheckResult, Kafka, TopicFacts, listed, ok, problem, skipped, warning
from harvester.neli.heartbeat import LEAST_MESSAGE_BYTES

_HAS_NO_VERSION = "4.0 or newer"
_NEEDED_FOR_GROUP = ("READ",)
_NEEDED = {
    "leader": ("READ", "WRITE", "DESCRIBE"),
    "progress": ("READ", "WRITE", "DESCRIBE"),
    "record": ("WRITE", "DESCRIBE"),
}
_SIZE_BYTES = 1_048_588  # the brokers' default
_BATCH_BYTES = 1_000_000  # librdkafka's default of batch.size
_RESERVED = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state", "__cluster_metadata"})


def judge_kafka(kafka: Kafka, config: Config) -> Iterator[CheckResult]:
    """Brokers, version, limits of sessions and transactions, permissions on the group."""
    yield _brokers(kafka)
    if kafka.settings is None:
        why = kafka.unread.get("broker's settings", "no answer")
        yield skipped("kafka.settings", f"the brokers' settings could not be read: {why}", "ask an administrator")
    else:
        yield _session(kafka.settings, config)
        if config.delivery == "exactly-once":
            yield from _transactions(kafka, kafka.settings, config)
    yield from _group(kafka, config)
    for part, why in kafka.unread.items():
        if part != "broker's settings":
            yield skipped(f"kafka.{part.replace(' ', '_')}", f"could not be read: {why}", "ask an administrator")


def _brokers(kafka: Kafka) -> CheckResult:
    text = f"{kafka.brokers} {'broker' if kafka.brokers == 1 else 'brokers'}, Kafka {version_of(kafka.settings)}"
    if kafka.brokers == 1:
        return warning("kafka.brokers", text, "use three for anything that matters: one broker's disk holds everything")
    return ok("kafka.brokers", text)


def version_of(settings: Mapping[str, str] | None) -> str:
    """What brokers before 4.0 reveal of their version; later ones have no such setting."""
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
            f"limits.session_timeout is {ours} ms, but the brokers permit {low} to {high} ms: no harvester can join",
            "choose a permitted value, or change the brokers' group.min/max.session.timeout.ms",
        )
    return ok("kafka.session_timeout", f"{ours} ms is within what the brokers permit ({low} to {high} ms)")


def _transactions(kafka: Kafka, settings: Mapping[str, str], config: Config) -> Iterator[CheckResult]:
    check = "kafka.transactions"
    ours = int(config.lane_options()["transaction.timeout.ms"])
    most = int(settings.get("transaction.max.timeout.ms", ours))
    copies = int(settings.get("transaction.state.log.replication.factor", 0))
    single = copies == 1 or int(settings.get("transaction.state.log.min.isr", 2)) < 2
    if ours > most:
        advice = "raise the brokers' transaction.max.timeout.ms, or lower delivery.timeout.ms"
        yield problem(check, f"transactions may take {ours} ms, but the brokers permit {most} ms", advice)
    if copies > kafka.brokers:
        yield problem(
            check,
            f"the transaction state log needs {copies} copies, but there are {kafka.brokers} brokers: no transaction"
            " can begin",
            "start the missing brokers, or lower transaction.state.log.replication.factor",
        )
    elif single:
        advice = "set transaction.state.log.replication.factor 3 and transaction.state.log.min.isr 2"
        yield warning(check, "the record of what was committed is on one broker's disk", advice)
    elif ours <= most:
        yield ok(check, f"transactions of {ours} ms are permitted; their log has {copies} copies")


def _group(kafka: Kafka, config: Config) -> Iterator[CheckResult]:
    group, name = kafka.group, config.leader_group_id
    if group is None:
        return
    lacks = [right for right in _NEEDED_FOR_GROUP if group.operations is not None and right not in group.operations]
    if lacks:
        advice = f"allow this user {', '.join(lacks)} on the group"
        yield problem("kafka.group", f"this user may not {', '.join(lacks)} the group {name!r}", advice)
    elif not group.members:
        yield ok("kafka.group", f"the group {name!r} has no members: no harvester is running")
    else:
        count = f"{group.members} {'harvester is running' if group.members == 1 else 'harvesters are running'}"
        yield ok("kafka.group", f"{count} in the group {name!r} ({group.state})")


def topics_of(config: Config, in_rows: Sequence[str], recorded: str | None = None) -> list[str]:
    """All topics that this harvester uses or will use; `recorded`: the id of the progress topic that it will need."""
    names = [config.leader_topic]
    if config.delivery == "exactly-once" or recorded is not None:
        names.append(config.progress_topic)
    if config.poison.notice_topic:
        names.append(config.poison.notice_topic)
    return list(dict.fromkeys([*names, *in_rows]))


def judge_topics(
    kafka: Kafka, config: Config, in_rows: Sequence[str], recorded: str | None = None
) -> Iterator[CheckResult]:
    """The leader topic, the progress topic, the notices' topic, and those of waiting rows; `recorded` as above."""
    yield from _leader_topic(kafka, config)
    if config.delivery == "exactly-once" or recorded is not None:
        yield from _progress_topic(kafka, config, recorded)
    own = {config.leader_topic, config.progress_topic}
    others = [name for name in topics_of(config, in_rows) if name not in own]
    missing = [name for name in others if name not in kafka.topics]
    if missing:
        text = f"topics named in rows or in the configuration do not exist, or may not be seen: {listed(missing)}"
        if (kafka.settings or {}).get("auto.create.topics.enable") == "true":
            advice = (
                "create them with the partitions and replicas that you want, before the broker auto-creates them with"
                " its defaults"
            )
            yield warning("topics.missing", text, advice)
        else:
            advice = "create them: until then their records are quarantined (or as set by poison.policy)"
            yield problem("topics.missing", text, advice)
    for name in others:
        if name in kafka.topics:
            check = f"topic.{name}"
            sizes = list(_sizes(kafka.topics[name], config, check))
            yield from sizes
            yield from _topic(kafka.topics[name], kafka, config, "record", check, is_ok=not sizes)


def _leader_topic(kafka: Kafka, config: Config) -> Iterator[CheckResult]:
    check, topic = "topics.leader", kafka.topics.get(config.leader_topic)
    if topic is None:
        yield _created(check, config.leader_topic, kafka)
        return
    settings = topic.settings or {}
    if topic.name in _RESERVED:
        yield problem(
            check,
            f"{topic.name} is reserved by Kafka: it accepts no heartbeats, so nobody can lead",
            f"set another leader_topic; the default is {config.leader_group_id}{LEADER_TOPIC_SUFFIX}",
        )
        return
    if int(settings.get("max.message.bytes", LEAST_MESSAGE_BYTES)) < LEAST_MESSAGE_BYTES:
        yield problem(
            check,
            f"{topic.name} has max.message.bytes={settings['max.message.bytes']}: too small for some heartbeats, so"
            " nobody may be able to lead",
            f"raise it to {LEAST_MESSAGE_BYTES} or more",
        )
    if settings.get("cleanup.policy", "delete") != "delete":
        yield problem(
            check,
            f"{topic.name} has cleanup.policy={settings['cleanup.policy']}: it accepts no heartbeats, since they"
            " have no keys, so nobody can lead",
            "set it to delete, or set another leader_topic",
        )
    if len(topic.partitions) > 1:
        yield warning(
            check,
            f"{topic.name} has {len(topic.partitions)} partitions: a joining member may take partition 0, and with it"
            " leadership, from another",
            "set another leader_topic, with one partition",
        )
    # Heartbeats are worthless once they are read: replicas matter only when someone is about to lead.
    yield from _topic(topic, kafka, config, "leader", check, kept=False)


def _created(check: str, topic: str, kafka: Kafka) -> CheckResult:
    if kafka.operations is None or "CREATE" in kafka.operations:
        return ok(check, f"{topic} does not exist: the first harvester creates it")
    text = f"{topic} does not exist, and this user may not create topics unless a rule names this one"
    return warning(check, text, "allow this user CREATE on it")


def _progress_topic(kafka: Kafka, config: Config, recorded: str | None) -> Iterator[CheckResult]:
    check, topic = "topics.progress", kafka.topics.get(config.progress_topic)
    if recorded is not None and (topic is None or topic.id not in (None, recorded)):
        what = "does not exist" if topic is None else f"is not the one that the term row records ({recorded})"
        text = f"{config.progress_topic} {what}: no harvester runs, since committed records could be published again"
        accept = f"to accept repeats, run UPDATE {config.table.term} SET progress_topic = NULL"
        yield problem(check, text, f"restore it; or, {accept}")
        return
    if topic is None:
        yield _created(check, config.progress_topic, kafka)
        return
    settings = topic.settings or {}
    alter = f"kafka-configs --alter --entity-type topics --entity-name {topic.name} --add-config"
    policy = settings.get("cleanup.policy", "compact")
    if policy != "compact":
        text = f"{topic.name} has cleanup.policy={policy}: what was committed may be forgotten"
        yield problem(check, text, f"{alter} cleanup.policy=compact")
    size = int(settings.get("max.message.bytes", _SIZE_BYTES))
    names, wanted = most_ids(size), config.limits.max_in_flight_records
    if size < LEAST_RECORD_BYTES:
        text = f"{topic.name} has max.message.bytes={size}: too small for a progress record"
        yield problem(check, text, f"{alter} max.message.bytes={_SIZE_BYTES}")
    elif names < wanted:
        text = (
            f"{topic.name} has max.message.bytes={size}: a shard has at most {names} records committed and not deleted,"
            f" fewer than limits.max_in_flight_records ({wanted})"
        )
        yield warning(check, text, f"{alter} max.message.bytes={_SIZE_BYTES}")
    yield from _topic(topic, kafka, config, "progress", check)


def _sizes(topic: TopicFacts, config: Config, check: str) -> Iterator[CheckResult]:
    """Compares the topic's limit with what the client sends: too large for the topic, or less than it would accept."""
    limit = int((topic.settings or {}).get("max.message.bytes", _SIZE_BYTES))
    has, most = f"{topic.name} has max.message.bytes={limit}", max(1, limit - AROUND_A_RECORD)
    given = get(config.producer_options(), "batch.size") or ""
    batch = int(given) if given.isdecimal() else _BATCH_BYTES  # a value that is not a number is reported separately
    client = config.message_max_bytes
    puts_away = config.oversize.policy == "claim-check"
    sent = config.oversize.above if puts_away and config.oversize.above else config.largest_record_bytes
    if sent > most:
        text = f"{has}: records of {most} to {sent} bytes are sent and refused, unless compressed to less"
        option = "oversize.above" if puts_away else "message.max.bytes in producer_kafka_config"
        yield warning(check, text, f"raise it to {client}, or lower {option} to {most if puts_away else limit}")
    elif min(client, batch) > limit:
        text = f"{has}: batches of up to {min(client, batch)} bytes are refused, and sent again in parts"
        yield warning(check, text, f"raise it to {client}, or set batch.size={limit} in producer_kafka_config")
    elif limit > max(client, _SIZE_BYTES) and not puts_away:
        text = f"{has}, but the client refuses what exceeds its message.max.bytes={client}"
        yield warning(check, text, f"set message.max.bytes={limit} in producer_kafka_config")


def _topic(
    topic: TopicFacts, kafka: Kafka, config: Config, use: str, check: str, *, kept: bool = True, is_ok: bool = True
) -> Iterator[CheckResult]:
    # Kafka ends no transaction before each of its partitions has enough replicas.
    stops = "all records" if config.delivery == "exactly-once" else "its records"
    copies = _copies(topic, kafka, check, stops) if kept else ()
    found = [*_rights(topic, use, check), *_state(topic, check, stops), *copies]
    yield from found
    if is_ok and not found:
        noun = "partition" if len(topic.partitions) == 1 else "partitions"
        text = f"{topic.name}: {len(topic.partitions)} {noun}, {topic.replication} copies, all in sync"
        yield ok(check, text)


def _rights(topic: TopicFacts, use: str, check: str) -> Iterator[CheckResult]:
    lacks = [right for right in _NEEDED[use] if topic.operations is not None and right not in topic.operations]
    if lacks:
        advice = f"allow this user {', '.join(lacks)} on it"
        yield problem(check, f"this user may not {', '.join(lacks)} {topic.name}", advice)


def _state(topic: TopicFacts, check: str, stops: str) -> Iterator[CheckResult]:
    """The current state of the partitions."""

    def numbers(which: Sequence[int]) -> str:
        return listed([str(number) for number in which])

    least = int((topic.settings or {}).get("min.insync.replicas", 1))
    leaderless = [number for number, each in enumerate(topic.partitions) if each.leader < 0]
    # If the replication factor itself is too low, only that is reported.
    short = [
        number
        for number, each in enumerate(topic.partitions)
        if len(each.replicas) >= least > len(each.in_sync) and each.leader >= 0
    ]
    lagging = [number for number, each in enumerate(topic.partitions) if len(each.in_sync) < len(each.replicas)]
    if leaderless:
        text = f"{topic.name}: partitions without a leader: {numbers(leaderless)}"
        yield problem(check, text, f"bring their brokers back: until then {stops} may wait")
    if short:
        text = f"{topic.name}: partitions with fewer than {least} copies in sync: {numbers(short)}"
        yield problem(check, text, f"bring the brokers back, or lower min.insync.replicas: until then {stops} may wait")
    elif lagging and not leaderless:
        text = f"{topic.name}: partitions with copies that lag behind: {numbers(lagging)}"
        yield warning(check, text, "check whether a broker is down or slow")


def _copies(topic: TopicFacts, kafka: Kafka, check: str, stops: str) -> Iterator[CheckResult]:
    """The cost of losing a broker."""
    copies, settings = topic.replication, topic.settings
    if settings is None:
        return
    least = int(settings.get("min.insync.replicas", 1))
    if least > copies:
        text = f"{topic.name}: min.insync.replicas is {least}, but there are {copies} copies: nothing can be written"
        yield problem(check, text, f"lower it to {max(copies - 1, 1)}, or add replicas")
    elif copies == 1:
        more = "" if kafka.brokers > 1 else "; that requires more brokers"
        text = f"{topic.name}: a single copy: records are lost with its broker's disk"
        yield warning(check, text, f"give it three copies, and min.insync.replicas 2{more}")
    elif least == 1:
        text = f"{topic.name}: min.insync.replicas is 1: an acknowledged record may be on a single broker"
        yield warning(check, text, "set it to 2")
    elif least == copies:
        text = f"{topic.name}: min.insync.replicas is {least} of {copies} copies: losing one broker stops {stops}"
        yield warning(check, text, f"add a copy, or set it to {copies - 1}")
    if settings.get("unclean.leader.election.enable") == "true":
        text = f"{topic.name}: unclean leader elections are on: acknowledged records can be lost"
        yield problem(check, text, "set unclean.leader.election.enable=false")
