"""Implements `harvester dead --dead-letter-topic`, for records that consumers have given up. Needs only Kafka."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import typer

from harvester_cli.dashboard.figures import counted
from harvester_cli.dead import (
    ChangeOptions,
    DeadLetterOptions,
    DeadLetterTopicOptions,
    bytes_json,
    key_text,
    lines_table,
    one_line,
    text_of,
)
from harvester_cli.output import grid, print_json, print_rich

if TYPE_CHECKING:
    from rich.table import Table

    from harvester.coordination.dead_letters import DeadLetter, DeadLetterTopic
    from harvester.outbox.quarantine import DeadLetterFilter


def list_letters(options: DeadLetterOptions, limit: int, *, json_: bool) -> None:
    """The newest first."""
    topic = _topic(options)
    found = sorted(topic.read(_matching(options)), key=lambda each: each.failed_at_ms, reverse=True)
    letters, more = found[:limit], len(found) > limit
    if json_:
        print_json({**_which(topic), "records": [as_json(letter) for letter in letters], "more": more})
    elif not letters:
        typer.echo("no record matches")
    else:
        print_rich(_table_of(letters))
        if more:
            typer.echo(f"and more: use --limit to show more than {limit}")


def show_letter(options: DeadLetterTopicOptions, place: str, *, json_: bool) -> None:
    """Everything about one."""
    topic = _topic(options)
    found = topic.read(lambda letter: letter.place == place)
    _require(found, topic)
    if json_:
        shown, *others = [as_json(letter, value=True) for letter in found]
        print_json({**_which(topic), "record": shown, "others": others})
        return
    for letter in found:  # of several groups that share the topic, or of a recreated topic
        print_rich(_page_of(letter))


def redrive_letters(options: ChangeOptions) -> None:
    """Put them back at the ends of their partitions, in the order of their places."""
    topic, letters = _chosen(options)
    if not options.dry_run and letters:
        if not options.yes:
            typer.confirm(f"Put {counted(len(letters), 'record')} back into their topics?", abort=True)
        letters = topic.redrive(letters)
    done = "would be put back" if options.dry_run else "put back"
    if options.json_:
        print_json({**_which(topic), "dry_run": options.dry_run, "redriven": [as_json(letter) for letter in letters]})
        return
    for letter in letters:
        typer.echo(f"{_line_of(letter)}: {done}")
    typer.echo(f"{counted(len(letters), 'record')} {done}")


def discard_letters(options: ChangeOptions, reason: str) -> None:
    """Remove them permanently."""
    topic, letters = _chosen(options)
    if letters and not options.dry_run and not options.yes:
        typer.confirm(f"Discard {counted(len(letters), 'record')} permanently?", abort=True)
    done = "would be discarded" if options.dry_run else "discarded"
    if options.json_:
        shown = [as_json(letter, value=True) for letter in letters]
        print_json({**_which(topic), "dry_run": options.dry_run, "reason": reason, "discarded": shown})
    else:
        for letter in letters:
            typer.echo(f"{_line_of(letter)}: {done}, because {one_line(reason)}; {one_line(letter.error)}")
        typer.echo(f"{counted(len(letters), 'record')} {done}")
    if letters and not options.dry_run:  # last: what cannot be printed is not discarded
        topic.discard(letters)


def as_json(letter: DeadLetter, *, value: bool = False) -> dict[str, Any]:
    """The keys are a public interface, like those of `dead.as_json`."""
    shown: dict[str, Any] = {
        "id": letter.place,
        "group": letter.group,
        "topic": letter.topic,
        "partition": letter.partition,
        "offset": letter.offset,
        **bytes_json("key", letter.key),
        "error": letter.error,
        "attempts": letter.attempts,
        "client": letter.client,
        "create_time": None if letter.timestamp_ms is None else _time(letter.timestamp_ms).isoformat(),
        "failed_at": _time(letter.failed_at_ms).isoformat(),
        "value_bytes": None if letter.value is None else len(letter.value),
    }
    if value:
        shown |= bytes_json("value", letter.value)
        shown["headers"] = [{"key": name, **bytes_json("value", each)} for name, each in letter.headers]
    return shown


def matches(choice: DeadLetterFilter, places: list[str], now: datetime) -> Callable[[DeadLetter], bool]:
    """The filter as a predicate; `error_pattern` is a Python regular expression here."""
    since = now - choice.since if isinstance(choice.since, timedelta) else choice.since
    try:
        pattern = re.compile(choice.error_pattern or "", re.IGNORECASE)
    except re.error as error:
        raise typer.BadParameter(str(error), param_hint="--error-regex") from error

    def matching(letter: DeadLetter) -> bool:
        return (
            (not choice.topics or letter.topic in choice.topics)
            and (not places or letter.place in places)
            and (choice.key is None or letter.key == choice.key)
            and (choice.error or "").casefold() in letter.error.casefold()
            and pattern.search(letter.error) is not None
            and (since is None or _time(letter.failed_at_ms) >= since)
        )

    return matching


def _topic(options: DeadLetterTopicOptions) -> DeadLetterTopic:
    from harvester.coordination.dead_letters import DeadLetterTopic

    assert options.dead_letter_topic is not None
    where = [] if options.bootstrap is None else [f"base_kafka_config.bootstrap.servers={options.bootstrap}"]
    kafka = options.load_for_kafka(*where).common_options()
    return DeadLetterTopic(options.dead_letter_topic, kafka)


def _matching(options: DeadLetterOptions) -> Callable[[DeadLetter], bool]:
    if options.incarnation is not None:
        raise typer.BadParameter("applies to an outbox, not to a topic", param_hint="--incarnation")
    return matches(options.choice(None, topic=True), options.id_ or [], datetime.now(UTC))


def _chosen(options: ChangeOptions) -> tuple[DeadLetterTopic, list[DeadLetter]]:
    options.checked_choice(topic=True)
    topic = _topic(options)
    found = topic.read(_matching(options))
    if options.id_:
        _require(found, topic)
    if options.limit is not None:
        oldest = {id(each) for each in sorted(found, key=lambda each: each.failed_at_ms)[: options.limit]}
        found = [letter for letter in found if id(letter) in oldest]
    return topic, found


def _require(found: list[DeadLetter], topic: DeadLetterTopic) -> None:
    from harvester.errors import BrokerError

    if not found:
        hint = f"`harvester dead list --dead-letter-topic {topic.name}` shows those in the topic"
        raise BrokerError(f"no such record is in {topic.name!r}", hint=hint)


def _which(topic: DeadLetterTopic) -> dict[str, Any]:
    return {"dead_letter_topic": topic.name}


def _table_of(letters: list[DeadLetter]) -> Table:
    rows = (
        (
            one_line(letter.place), one_line(letter.group), key_text(letter.key),
            f"{_time(letter.failed_at_ms):%Y-%m-%d %H:%M:%S}", str(letter.attempts), one_line(letter.error),
        )
        for letter in letters
    )  # fmt: skip
    return lines_table(("id", "group", "key", "failed at", "attempts", "error"), rows, numbers=("attempts",))


def _page_of(letter: DeadLetter) -> Table:
    rows = [
        ("id", letter.place),
        ("group", f"{letter.group}, client {letter.client}"),
        ("key", key_text(letter.key)),
        ("error", letter.error),
        ("attempts", str(letter.attempts)),
        ("created", "unknown" if letter.timestamp_ms is None else _time(letter.timestamp_ms).isoformat()),
        ("failed", _time(letter.failed_at_ms).isoformat()),
        *(("header", f"{name}: {'' if value is None else text_of(value)}") for name, value in letter.headers),
        ("value", "none (a tombstone)" if letter.value is None else f"{len(letter.value):,} bytes"),
    ]
    if letter.value is not None:
        rows.append(("", text_of(letter.value)))
    return grid(rows)


def _line_of(letter: DeadLetter) -> str:
    key = "no key" if letter.key is None else f"key {key_text(letter.key)}"
    return f"record {one_line(letter.place)} of group {one_line(letter.group)}, {key}"


def _time(since_epoch_ms: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=since_epoch_ms)
