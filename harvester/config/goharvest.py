"""Converts a configuration of goharvest's `reaper` into ours, with notes on all differences (pure).

Names are those of goharvest's user guide (`reaper.yaml`: `harvest`, `logging`). Options that guard an invariant here
are omitted; a delivery timeout longer than the default session allows lengthens the session. Value formats are
converted: durations are Go's, levels Scribe's, data sources lib/pq's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from fractions import Fraction
from typing import Any
from urllib.parse import parse_qsl, quote

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import Conninfo

from harvester.config import timing
from harvester.config.durations import format_duration, parse_duration
from harvester.config.fields import is_topic
from harvester.config.kafka_options import CONSUMER_ONLY, PRODUCER_ONLY, canonical, flatten, get, refusal
from harvester.errors import ConfigurationError, Problem

_UNIT_NS = {"ns": 1, "us": 1_000, "µs": 1_000, "μs": 1_000, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}
_TERM = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_LEVELS = {"trace": "trace", "debug": "debug", "info": "info", "warn": "warning", "error": "error", "off": "error",
           "all": "trace"}  # fmt: skip
_KEYWORDS = frozenset(option.keyword.decode() for option in Conninfo.get_defaults())
# lib/pq's own parameters; libpq has no equivalent.
_PQ_ONLY = frozenset({"binary_parameters", "disable_prepared_binary_result", "sslinline", "krbspn"})
_PLAIN = "/:,@"  # in a URL's parameters; everything else is percent-encoded
_NOT_UNDERSTOOD = "is not a connection string that libpq understands"
_PAIR = re.compile(r"\s*([^\s=]+)\s*=(\s*)('(?:[^'\\]|\\.)*'|(?!')(?:[^\s\\]|\\.)*)", re.DOTALL)
_NEXT = re.compile(r"([a-z_]+)=")
# goharvest's name, ours.
_LIMITS = {
    "minPollInterval": "min_poll_interval",
    "heartbeatTimeout": "heartbeat_timeout",
    "drainInterval": "drain_interval",
    "queueTimeout": "queue_timeout",
    "markBackoff": "mark_backoff",
    "ioErrorBackoff": "io_error_backoff",
    "minMetricsInterval": "min_metrics_interval",
    "maxInFlightRecords": "max_in_flight_records",
    "sendConcurrency": "shards",
    "sendBuffer": "send_buffer",
    "markQueryRecords": "mark_query_records",
}
# May be 0 there; the minimum here.
_ZEROS: Mapping[str, int | str] = {
    "ioErrorBackoff": "1ms", "markBackoff": "1ms", "minMetricsInterval": "1ms", "sendBuffer": 1,
}  # fmt: skip
_INTERNAL_TOPICS = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state", "__cluster_metadata"})
_COUNTS = frozenset({"maxInFlightRecords", "sendConcurrency", "sendBuffer", "markQueryRecords"})
_MEANINGS = {
    "sendConcurrency": "shards are processes here, not threads; more than four per core are not worthwhile",
    "sendBuffer": "here: records still sent to a shard whose pipe is full; max_queued_per_key limits what is queued",
}
_TEXTS = {"leaderTopic": "leader_topic", "leaderGroupID": "leader_group_id", "outboxTable": "outbox_table",
          "name": "name"}  # fmt: skip
_TABLES = {"baseKafkaConfig": "base_kafka_config", "producerKafkaConfig": "producer_kafka_config"}
_NO_COUNTERPART = "omitted: there is no such setting here"
_DEFAULT_GROUP = "reaper"
_LONGEST = timedelta(days=36_500)  # far more than any limit of ours, and sums of such are still a timedelta
_MS_DIGITS = 10  # of the longest that Kafka's client accepts
_H = timedelta(seconds=3)  # ours; theirs is 5 s
_QUEUE = timedelta(seconds=30)


def duration(value: object) -> str:
    """A duration as written by Go (`1m30s`), or in nanoseconds; raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"{value!r} is not a duration")  # noqa: TRY004 - as for invalid text
    if isinstance(value, int):
        return _format(Fraction(value))
    text, total, at = value.strip().removeprefix("+"), Fraction(0), 0
    if text == "0":  # the only number without a unit
        return _format(total)
    while at < len(text) and (term := _TERM.match(text, at)):
        total += Fraction(term[1].rstrip(".") or "0") * _UNIT_NS[term[2]]
        at = term.end()
    if not text or at != len(text):
        raise ValueError(f"{value!r} is not a duration")
    return _format(total)


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{value!r} is not a whole number")  # noqa: TRY004 - as for invalid text
    return value


def is_off(value: object) -> bool:
    """Whether this level logs nothing; unquoted, YAML reads it as False."""
    return value is False or str(value).lower() == "off"


def level(value: object) -> str:
    """A log level; raises ValueError."""
    found = _LEVELS.get("off" if is_off(value) else str(value).lower())
    if found is None:
        raise ValueError(f"{value!r} is not a level")
    return found


def data_source(text: str) -> tuple[str, list[str]]:
    """A lib/pq data source in an equivalent form for libpq, and notes on what was changed.

    Raises ValueError, without quoting any of the text, if it is not a connection string.
    """
    text, notes = text.strip(), list[str]()
    if text.startswith(("postgres://", "postgresql://")):
        address, _, query = text.partition("?")
        # As in lib/pq, the first of several counts, and empty ones are ignored; a + is a space there, but not in libpq.
        given: dict[str, str] = {}
        for name, value in parse_qsl(query):
            given.setdefault(name, value)
        pairs = _adapted(given, notes, at_home=not _names_host(address))
        made = f"{address}?" + "&".join(f"{quote(name)}={quote(value, safe=_PLAIN)}" for name, value in pairs.items())
    else:
        given, rest = _pairs(text, notes)
        if rest:
            raise ValueError("is not a connection string of the form key=value")
        try:
            made = make_conninfo("", **_adapted(given, notes))
        except ProgrammingError:
            raise ValueError(_NOT_UNDERSTOOD) from None
    try:
        conninfo_to_dict(made)
    except ProgrammingError:
        raise ValueError(_NOT_UNDERSTOOD) from None
    return made, notes


def _names_host(address: str) -> bool:
    place = address.partition("//")[2].partition("/")[0].rpartition("@")[2]
    return bool(place.partition(":")[0])


def _adapted(pairs: Mapping[str, str], notes: list[str], *, at_home: bool = True) -> dict[str, str]:
    """lib/pq's parameters as those of libpq. `at_home`: only they can name a host."""
    for name in sorted(_PQ_ONLY & set(pairs)):
        notes.append(f"{name} omitted: only goharvest's driver supports it")
    # lib/pq passes unknown parameters to the server, as session settings.
    runtime = {name: value for name, value in pairs.items() if name not in _KEYWORDS | _PQ_ONLY}
    found = {name: value for name, value in pairs.items() if name in _KEYWORDS}
    if runtime:
        options = " ".join(f"-c {name}={_escaped(value)}" for name, value in runtime.items())
        found["options"] = f"{found['options']} {options}" if found.get("options") else options
        notes.append(f"{', '.join(runtime)} moved to options, where libpq expects session settings")
    if at_home and not found.get("host"):
        found = {"host": "localhost", **{name: value for name, value in found.items() if name != "host"}}
        notes.append("host=localhost added: the default of goharvest's driver; libpq's is a socket")
    if not found.get("sslmode"):
        found["sslmode"] = "require"
        notes.append("sslmode=require added: the default of goharvest's driver; libpq's is weaker")
    return found


def _pairs(text: str, notes: list[str]) -> tuple[dict[str, str], str]:
    """The parameters as lib/pq parses them, and the text that is not a parameter.

    Blanks after = are skipped, so in `password= dbname=x` the password is `dbname=x`, and dbname is not set.
    """
    found: dict[str, str] = {}
    at = 0
    while pair := _PAIR.match(text, at):
        name, gap, value = pair.groups()
        at = pair.end()
        found[name] = re.sub(r"\\(.)", r"\1", value[1:-1] if value.startswith("'") else value, flags=re.DOTALL)
        taken = _NEXT.match(value) if gap else None
        if taken is not None and taken[1] in _KEYWORDS:
            notes.append(
                f"{name} takes the text after it, up to the next blank, as its value, so {taken[1]} is not set:"
                " goharvest's driver interprets it like this. If it should be empty, correct both here"
            )
    return found, text[at:].strip()


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace(" ", "\\ ")


def _format(nanoseconds: Fraction) -> str:
    microseconds = nanoseconds / 1_000
    if microseconds.denominator != 1 or microseconds < 0:
        raise ValueError("is finer than a microsecond, or negative")
    if microseconds > _LONGEST // timedelta(microseconds=1):
        raise ValueError("is too long")
    return format_duration(timedelta(microseconds=int(microseconds)))


@dataclass(frozen=True, slots=True)
class Note:
    """A difference, or a setting without a counterpart. `path` is goharvest's name."""

    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


@dataclass(frozen=True, slots=True)
class Imported:
    """`settings` as read from TOML; `$` in text is doubled, since ours introduces variables."""

    settings: Mapping[str, Any]
    notes: tuple[Note, ...]


@dataclass(slots=True)
class _Conversion:
    settings: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def run(self, document: object) -> Imported:
        top = self.table("", document)
        harvest = self.table("harvest", top.pop("harvest", {}))
        logging = self.table("logging", top.pop("logging", {}))
        self.texts(harvest)
        tables = {ours: self.table(f"harvest.{theirs}", harvest.pop(theirs, {})) for theirs, ours in _TABLES.items()}
        self.kafka(tables)
        if not any(canonical(name) == "partitioner" for options in tables.values() for name, _ in flatten(options)):
            text = "murmur2_random here, CRC32 there: a key may move to another partition"
            self.notes.append(Note("harvest.producerKafkaConfig.partitioner", text))
        for name, value in self.table("harvest.limits", harvest.pop("limits", {})).items():
            self.limit(f"harvest.limits.{name}", name, value)
        if "level" in logging:
            self.level(logging.pop("level"))
        for path, rest in (("", top), ("harvest.", harvest), ("logging.", logging)):
            self.notes += [Note(f"{path}{name}", _NO_COUNTERPART) for name in rest]
        self.times()
        if self.limits:
            self.settings["limits"] = self.limits
        if self.problems:
            raise ConfigurationError(self.problems, hint="is it a configuration of goharvest's reaper?")
        return Imported(self.settings, tuple(self.notes))

    def table(self, path: str, value: object) -> dict[str, Any]:
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.problems.append(Problem(path or "the document", "is not a mapping"))
            return {}
        # A key without a value counts as not given.
        return {str(name): inner for name, inner in value.items() if inner is not None}

    def texts(self, harvest: dict[str, Any]) -> None:
        for theirs in (*_TEXTS, "dataSource"):
            if harvest.get(theirs) == "":  # counts as not given
                del harvest[theirs]
        topic = str(harvest.get("leaderTopic", ""))
        if topic and (topic in _INTERNAL_TOPICS or not is_topic(topic)):
            why = "it is reserved for Kafka" if topic in _INTERNAL_TOPICS else "no topic can have this name"
            self.notes.append(Note("harvest.leaderTopic", f"omitted: {why}; the default is leader_group_id + '.neli'"))
            del harvest["leaderTopic"]
        for theirs, ours in _TEXTS.items():
            if theirs in harvest:
                self.settings[ours] = plain(str(harvest.pop(theirs)))
        if "leader_group_id" not in self.settings:
            self.settings["leader_group_id"] = _DEFAULT_GROUP
            text = f"not given: {_DEFAULT_GROUP!r}, the name of goharvest's program, unless yours had a different name"
            self.notes.append(Note("harvest.leaderGroupID", text))
        if "dataSource" in harvest:
            self.data_source(str(harvest.pop("dataSource")))

    def level(self, given: object) -> None:
        try:
            found = level(given)
        except ValueError as error:
            self.problems.append(Problem("logging.level", str(error)))
            return
        self.settings["logging"] = {"level": found}
        if is_off(given):
            self.notes.append(Note("logging.level", f"{found} here, Off there: errors are logged at any level"))

    def data_source(self, given: str) -> None:
        try:
            source, notes = data_source(given)
        except ValueError as error:
            self.problems.append(Problem("harvest.dataSource", str(error)))
            return
        self.settings["data_source"] = plain(source)
        self.notes += [Note("harvest.dataSource", text) for text in notes]

    def kafka(self, tables: dict[str, dict[str, Any]]) -> None:
        names = {ours: theirs for theirs, ours in _TABLES.items()}
        for table, options in tables.items():
            for option, value in flatten(options):
                if value is None:
                    continue
                path, meant = f"harvest.{names[table]}.{option}", canonical(option)
                reason = refusal(meant)
                if reason:
                    self.notes.append(Note(path, f"omitted: {reason}"))
                    continue
                into = table
                if table == "base_kafka_config" and meant in PRODUCER_ONLY:
                    into = "producer_kafka_config"
                elif table == "producer_kafka_config" and meant in CONSUMER_ONLY:
                    into = "base_kafka_config"
                if into != table:
                    self.notes.append(Note(path, f"moved to [{into}]: only these clients support it"))
                shown = plain(value) if isinstance(value, str) else value
                options_there = self.settings.setdefault(into, {})
                for alias in [name for name in options_there if canonical(name) == meant]:
                    del options_there[alias]  # given for all clients and again for producers: the latter wins
                options_there[option] = shown

    def limit(self, path: str, theirs: str, given: object) -> None:
        ours = _LIMITS.get(theirs)
        if ours is None:
            self.notes.append(Note(path, _NO_COUNTERPART))
            return
        try:
            self.limits[ours] = _count(given) if theirs in _COUNTS else duration(given)
        except ValueError as error:
            self.problems.append(Problem(path, str(error)))
            return
        if theirs in _ZEROS and self.limits[ours] in (0, "0s"):
            self.limits[ours] = _ZEROS[theirs]
            self.notes.append(Note(path, f"{_ZEROS[theirs]}, the minimum here, for 0 there"))
        if theirs in _MEANINGS:
            self.notes.append(Note(path, _MEANINGS[theirs]))

    def times(self) -> None:
        """Make room for the given polls and delivery timeout (docs/configuration.md, rules 1, 2 and 4)."""
        if self.time("min_poll_interval", timing.MS) * timing.MIN_POLLS_PER_HEARTBEAT > _H:
            self.limits.setdefault("heartbeat_timeout", "5s")
        options = {name: str(value) for name, value in self.settings.get("producer_kafka_config", {}).items()}
        given = get(options, "delivery.timeout.ms")
        if given is None or not given.isdecimal() or len(given) > _MS_DIGITS:  # refused anyway
            return
        delivery = timedelta(milliseconds=int(given))
        heartbeat = self.time("heartbeat_timeout", _H)
        session = timing.default_session_timeout(heartbeat)
        queue = self.time("queue_timeout", _QUEUE)
        drain = self.time("drain_interval", timing.default_drain_interval(session, heartbeat, queue))
        least_drain, least_session = delivery + timing.PURGE_MARGIN, heartbeat + delivery + timing.SCAN_INTERVAL
        for ours, is_, least in (("drain_interval", drain, least_drain), ("session_timeout", session, least_session)):
            if is_ < least:
                self.limits[ours] = format_duration(least)
                why = f"so limits.{ours} is {self.limits[ours]}: a departing leader must know the fate of its records"
                self.notes.append(Note("harvest.producerKafkaConfig.delivery.timeout.ms", why))

    def time(self, ours: str, default: timedelta) -> timedelta:
        return parse_duration(self.limits[ours]) if ours in self.limits else default


def plain(text: str) -> str:
    """Text in which nothing is interpreted as a variable."""
    return text.replace("$", "$$")


def convert(document: object) -> Imported:
    """Convert a parsed `reaper.yaml`. Raises ConfigurationError with everything that is invalid."""
    return _Conversion().run(document)
