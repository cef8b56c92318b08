"""`harvester claims`: who holds which partitions, from the coordination topic alone; release them, set positions."""

from __future__ import annotations

import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from harvester_cli import claims_view as view
from harvester_cli.coordination_options import (
    DEFAULT_INTERVAL,
    DEFAULT_TOPIC,
    BootstrapOption,
    CoordinationTopicOption,
    HeartbeatIntervalOption,
    consumer_settings,
)
from harvester_cli.options import ConfigOption, JsonOption, LogLevelOption, SetOption

if TYPE_CHECKING:
    from pathlib import Path

    from rich.text import Text

    from harvester.coordination.admin import Observer
    from harvester.coordination.overview import Row
    from harvester_cli.dashboard.live import Frame
    from harvester_cli.dashboard.render import Kept

app = typer.Typer(
    invoke_without_command=True, help="Consumers that coordinate through Kafka: who holds what, and change that."
)

GroupOption = Annotated[str, typer.Option("--group", help="The consumers' group.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
_EVERY_S = 2.0
_PER_SECOND = 2.0
_NARROW = 120


@app.callback()
def claims(
    context: typer.Context,
    config: ConfigOption = None,
    set_: SetOption = None,
    log_level: LogLevelOption = None,
    bootstrap: BootstrapOption = None,
    group: Annotated[str | None, typer.Option("--group", help="Only this one.", show_default=False)] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Go on showing, until stopped.")] = False,
    coordination_topic: CoordinationTopicOption = DEFAULT_TOPIC,
    heartbeat_interval: HeartbeatIntervalOption = DEFAULT_INTERVAL,
    json_: JsonOption = False,
) -> None:
    """Show who holds which partition, how fresh that is, and how far it is behind."""
    if context.invoked_subcommand is not None:
        return
    with _observer(config, set_, log_level, bootstrap, coordination_topic, heartbeat_interval) as observer:
        if watch:
            _watch(observer, group, coordination_topic, json_=json_)
        else:
            _show(_rows(observer, group), json_=json_)


@app.command()
def release(
    group: GroupOption,
    client: Annotated[str, typer.Option("--client", help="The id of the client that holds them.")],
    config: ConfigOption = None,
    set_: SetOption = None,
    log_level: LogLevelOption = None,
    bootstrap: BootstrapOption = None,
    coordination_topic: CoordinationTopicOption = DEFAULT_TOPIC,
    heartbeat_interval: HeartbeatIntervalOption = DEFAULT_INTERVAL,
    yes: YesOption = False,
    json_: JsonOption = False,
) -> None:
    """End all claims of a client, so that others need not wait until they are stale. Positions stay as they are.

    A client that lives stops when it reads that, and may claim again.
    """
    _check_asking(yes=yes, json_=json_)

    from harvester.coordination.errors import CoordinationError

    with _observer(config, set_, log_level, bootstrap, coordination_topic, heartbeat_interval) as observer:
        held = [row for row in _rows(observer, group) if row.holder is not None and row.holder.id == client]
        if not held:
            raise CoordinationError(
                f"client {client!r} holds nothing in group {group!r}", hint="`harvester claims` shows who does"
            )
        if not yes:
            typer.confirm(f"Release {_count(len(held))} of {client}?", abort=True)
        done = observer.release(held)
    if json_:
        _print_json(released=[{**view.as_json(row), "released": done[row.place]} for row in held])
    else:
        for row in held:
            typer.echo(f"{row.place}: {'released' if done[row.place] else 'not released'}")
    if not all(done.values()):
        left = list(done.values()).count(False)
        raise CoordinationError(
            f"{_count(left)} not released: who holds them is not certain, or has changed",
            hint="look again; `harvester claims set-position` ends any claim",
        )


@app.command("set-position")
def set_position(
    group: GroupOption,
    topic: Annotated[str, typer.Option("--topic", help="The topic whose position is set.")],
    offset: Annotated[
        str, typer.Option("--offset", metavar="OFFSET", help="Of the next record to be processed; or earliest, latest.")
    ],
    partition: Annotated[
        list[int] | None,
        typer.Option("--partition", min=0, help="May be given several times (default: all).", show_default=False),
    ] = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    log_level: LogLevelOption = None,
    bootstrap: BootstrapOption = None,
    coordination_topic: CoordinationTopicOption = DEFAULT_TOPIC,
    heartbeat_interval: HeartbeatIntervalOption = DEFAULT_INTERVAL,
    yes: YesOption = False,
    json_: JsonOption = False,
) -> None:
    """Let a group go on at an offset; it ends whatever claims there are.

    What lies before is not processed any more, what lies behind again, at most once included. Best done while no
    consumer of the group runs.
    """
    _check_asking(yes=yes, json_=json_)

    from harvester.coordination.positions import positions

    with _observer(config, set_, log_level, bootstrap, coordination_topic, heartbeat_interval) as observer:
        chosen = positions(observer.bounds([topic]), topic, partition or (), offset)
        if not yes:
            typer.confirm(f"Set the position of {group} in {_count(len(chosen))} of {topic} to {offset}?", abort=True)
        observer.set_positions(group, chosen)
    if json_:
        _print_json(
            group=group, topic=topic, positions=[{"partition": each, "offset": at} for (_, each), at in chosen.items()]
        )
        return
    for (_, each), at in chosen.items():
        typer.echo(f"{topic}[{each}] of {group}: begins with offset {at:,}")


def _observer(
    config: Path | None,
    set_: list[str] | None,
    log_level: str | None,
    bootstrap: str | None,
    coordination_topic: str,
    heartbeat_interval: str,
) -> Observer:
    settings = consumer_settings(
        config, set_, log_level, bootstrap, heartbeat_interval, group="", topics=(),
        coordination_topic=coordination_topic,
    )  # fmt: skip

    from harvester.coordination.admin import Observer

    return Observer(settings)


def _rows(observer: Observer, group: str | None) -> list[Row]:
    from time import time

    from harvester.coordination.overview import rows

    topics = {place.topic for world in observer.worlds.values() for place in world.claims}
    bounds = observer.bounds(sorted(topics))
    return rows(observer.worlds.values(), bounds, round(time() * 1000), group)


def _show(rows: list[Row], *, json_: bool) -> None:
    if json_:
        _print_json(claims=[view.as_json(row) for row in rows])
        return

    from rich.console import Console

    # No terminal, no cropping: a script may look for the name of a client.
    console = Console(soft_wrap=True)
    width = console.width if console.is_terminal else max((len(row.place.topic) for row in rows), default=0) + 400
    typer.echo(view.summary(rows))
    for line in view.table(rows, width) if rows else ():
        console.print(line)


def _watch(observer: Observer, group: str | None, coordination_topic: str, *, json_: bool) -> None:
    from datetime import UTC, datetime

    from harvester_cli.dashboard import live
    from harvester_cli.pump import stop_on_signal

    title = f"claims in {coordination_topic}" if group is None else f"claims of {group}"

    def frame() -> Frame:
        observer.follow(0)
        return partial(_draw, _rows(observer, group), title, f"{datetime.now(UTC):%H:%M:%S} UTC")

    with stop_on_signal() as stop:
        if not json_ and live.should_show("auto", sys.stdout):
            live.show(frame, refresh_per_second=_PER_SECOND, until=stop)
            return
        _print_on(observer, group, stop, json_=json_)


def _draw(
    rows: list[Row], title: str, clock: str, width: int, height: int, /, *, kept: Kept | None, ascii_only: bool
) -> Text:
    return view.screen(rows, title, clock, width, height, ascii_only=ascii_only)


def _print_on(observer: Observer, group: str | None, stop: threading.Event, *, json_: bool) -> None:
    while True:
        _show(_rows(observer, group), json_=json_)
        sys.stdout.flush()
        if stop.wait(_EVERY_S):
            return
        observer.follow(0)


def _check_asking(*, yes: bool, json_: bool) -> None:
    if json_ and not yes:
        raise typer.BadParameter("a script cannot be asked: add --yes", param_hint="--json")


def _print_json(**fields: object) -> None:
    import json

    typer.echo(json.dumps(fields))


def _count(partitions: int) -> str:
    return f"{partitions:,} partition{'' if partitions == 1 else 's'}"
