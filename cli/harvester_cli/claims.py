"""`harvester claims`: show who holds which partitions; release and reposition them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harvester_cli.dashboard.figures import counted, duration, one_line
from harvester_cli.options import CoordinationOptions, JsonOption, group_name, grouped
from harvester_cli.output import console, is_ascii, print_json

if TYPE_CHECKING:
    from rich.text import Text

    from harvester.coordination.admin import Observer, PartitionRow
    from harvester_cli.dashboard.live import Frame

_STYLES = {"fresh": "green", "unknown": "yellow", "stale": "bold red", "free": "bold red"}
_GAP = "  "


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    cell: Callable[[PartitionRow], str]
    right: bool = False


_COLUMNS = (
    _Column("group", lambda row: one_line(row.place.group)),
    _Column("topic", lambda row: one_line(row.place.topic)),
    _Column("#", lambda row: str(row.place.partition), right=True),
    _Column("state", lambda row: row.freshness.value if row.certain else f"{row.freshness.value}?"),
    _Column("age", lambda row: "-" if row.age_s is None else duration(row.age_s), right=True),
    _Column("last offset", lambda row: _number(row.last_offset), right=True),
    _Column("lag", lambda row: _number(row.lag), right=True),
    _Column("generation", lambda row: _number(row.generation), right=True),
    _Column("client", lambda row: "-" if row.holder is None else one_line(row.holder.id)),
)


def as_json(row: PartitionRow) -> dict[str, Any]:
    """The keys are a public interface."""
    return {
        "group": row.place.group,
        "topic": row.place.topic,
        "partition": row.place.partition,
        "state": row.freshness.value,
        "certain": row.certain,
        "client": None if row.holder is None else row.holder.id,
        "instance": None if row.holder is None else row.holder.instance,
        "age_s": row.age_s,
        "generation": row.generation,
        "last_offset": row.last_offset,
        "lag": row.lag,
    }


def summary(rows: Sequence[PartitionRow]) -> str:
    """`32 partitions, 8 clients (4 each); 30 fresh, 2 free; lag 1,234`."""
    if not rows:
        return "nothing has ever been claimed"
    counts = Counter(row.holder.id for row in rows if row.holder is not None)
    least, most = min(counts.values(), default=0), max(counts.values(), default=0)
    shares = f" ({least if least == most else f'{least} to {most}'} each)" if counts else ""
    states = Counter(row.freshness.value for row in rows)
    found = ", ".join(f"{states[state]:,} {state}" for state in _STYLES if states[state])
    lag = sum(row.lag or 0 for row in rows)
    return f"{counted(len(rows), 'partition')}, {counted(len(counts), 'client')}{shares}; {found}; lag {lag:,}"


def table(rows: Sequence[PartitionRow], width: int) -> list[Text]:
    """A heading and one line per row, each of at most `width` cells. The group is omitted if there is only one."""
    from rich.text import Text

    from harvester_cli.dashboard.lines import fit

    one_group = len({row.place.group for row in rows}) < 2
    columns = _COLUMNS[1:] if one_group else _COLUMNS
    cells = [[column.title for column in columns], *([column.cell(row) for column in columns] for row in rows)]
    widths = [max(Text(line[at]).cell_len for line in cells) for at in range(len(columns))]
    lines = []
    for line, row in zip(cells, [None, *rows], strict=True):
        text = Text()
        for column, cell, cell_width in zip(columns, line, widths, strict=True):
            style = "bold" if row is None else _STYLES[row.freshness.value] if column.title == "state" else ""
            blanks = " " * (cell_width - Text(cell).cell_len)
            text.append(blanks if column.right else "").append(cell, style=style or None)
            text.append("" if column.right else blanks).append(_GAP)
        text.rstrip()
        lines.append(fit(text, width))
    return lines


def screen(rows: Sequence[PartitionRow], title: str, clock: str, width: int, height: int) -> Text:
    """`height` lines. If not all rows fit, rows that are not fresh come first, and the last line counts the others."""
    from rich.text import Text

    from harvester_cli.dashboard.lines import fit, rule

    room = max(height - 3, 0)
    shown = list(rows)
    if len(shown) > room:
        shown = sorted(shown, key=lambda row: (row.freshness.value == "fresh", row.place))[: max(room - 1, 0)]
        shown.sort(key=lambda row: row.place)
    lines = [
        rule(one_line(title), width, notes=[clock]),
        fit(Text(summary(rows)), width),
        *table(shown, width),
    ]
    if len(shown) < len(rows):
        lines.append(fit(Text(f"and {len(rows) - len(shown):,} more", style="dim"), width))
    lines.extend(Text() for _ in range(height - len(lines)))
    drawn = Text("\n").join(lines[: max(height, 0)])
    drawn.no_wrap, drawn.overflow, drawn.end = True, "crop", ""
    return drawn


def _number(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


app = typer.Typer(
    invoke_without_command=True, help="Consumers that coordinate through Kafka: show who holds what, and change it."
)

GroupOption = Annotated[str, typer.Option("--group", help="The consumers' group.", callback=group_name)]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
_EVERY_S = 2.0
_PER_SECOND = 2.0
_NARROW = 120


@app.callback()
@grouped
def claims(
    context: typer.Context,
    options: CoordinationOptions,
    group: Annotated[str | None, typer.Option("--group", help="Only this group.", callback=group_name)] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Keep updating until stopped.")] = False,
    json_: JsonOption = False,
) -> None:
    """Show who holds which partition, how recent that is, and how far the holder is behind."""
    if context.invoked_subcommand is not None:
        return
    with _observer(options) as observer:
        if watch:
            _watch(observer, group, options.coordination_topic, json_=json_)
        else:
            _show(_rows(observer, group), json_=json_)


@app.command()
@grouped
def release(
    group: GroupOption,
    client: Annotated[str, typer.Option("--client", help="The id of the client that holds them.")],
    options: CoordinationOptions,
    yes: YesOption = False,
    json_: JsonOption = False,
) -> None:
    """End all claims of a client, so that others need not wait until they are stale. Positions are unchanged.

    If the client is alive, it stops when it reads this, and may claim again.
    """
    _check_asking(yes=yes, json_=json_)

    from harvester.coordination.errors import CoordinationError

    with _observer(options) as observer:
        held = [row for row in _rows(observer, group) if row.holder is not None and row.holder.id == client]
        if not held:
            raise CoordinationError(
                f"client {client!r} holds nothing in group {group!r}", hint="`harvester claims` shows the holders"
            )
        if not yes:
            typer.confirm(f"Release {counted(len(held), 'partition')} of {client}?", abort=True)
        done = observer.release(held)
    if json_:
        print_json({"released": [{**as_json(row), "released": done[row.place]} for row in held]})
    else:
        for row in held:
            typer.echo(f"{row.place}: {'released' if done[row.place] else 'not released'}")
    if not all(done.values()):
        left = list(done.values()).count(False)
        raise CoordinationError(
            f"{counted(left, 'partition')} not released: the holder is not certain, or has changed",
            hint="check again; `harvester claims set-position` ends any claim",
        )


@app.command("set-position")
@grouped
def set_position(
    options: CoordinationOptions,
    group: GroupOption,
    topic: Annotated[str, typer.Option("--topic", help="The topic whose position is set.")],
    offset: Annotated[
        str,
        typer.Option("--offset", metavar="OFFSET", help="Offset of the next record to process; or earliest, latest."),
    ],
    partition: Annotated[
        list[int] | None, typer.Option("--partition", min=0, help="May be given several times (default: all).")
    ] = None,
    yes: YesOption = False,
    json_: JsonOption = False,
) -> None:
    """Set a group's position to an offset; this ends any existing claims.

    Earlier records are not processed any more, and later ones are processed again, even at most once. Best done while
    no consumer of the group is running.
    """
    _check_asking(yes=yes, json_=json_)

    from harvester.coordination.admin import positions

    with _observer(options) as observer:
        chosen = positions(observer.bounds([topic]), topic, partition or (), offset)
        if not yes:
            which = f"{group} in {counted(len(chosen), 'partition')} of {topic}"
            typer.confirm(f"Set the position of {which} to {offset}?", abort=True)
        observer.set_positions(group, chosen)
    if json_:
        begins = [{"partition": each, "offset": at} for (_, each), at in chosen.items()]
        print_json({"group": group, "topic": topic, "positions": begins})
        return
    for (_, each), at in chosen.items():
        typer.echo(f"{topic}[{each}] of {group}: begins at offset {at:,}")


def _observer(options: CoordinationOptions) -> Observer:
    from harvester.coordination.admin import Observer

    return Observer(options.settings(group="", topics=()))


def _rows(observer: Observer, group: str | None) -> list[PartitionRow]:
    from time import time

    from harvester.coordination.admin import rows

    topics = {place.topic for world in observer.worlds.values() for place in world.claims}
    bounds = observer.bounds(sorted(topics))
    return rows(observer.worlds.values(), bounds, round(time() * 1000), group)


def _show(rows: list[PartitionRow], *, json_: bool) -> None:
    if json_:
        print_json({"claims": [as_json(row) for row in rows]})
        return

    from harvester_cli.dashboard.lines import in_ascii

    # Without a terminal nothing is cropped: a script may search for the name of a client.
    to = console(soft_wrap=True)
    width = to.width if to.is_terminal else max((len(row.place.topic) for row in rows), default=0) + 400
    typer.echo(summary(rows))
    for line in table(rows, width) if rows else ():
        to.print(in_ascii(line) if is_ascii() else line)


def _watch(observer: Observer, group: str | None, coordination_topic: str, *, json_: bool) -> None:
    from harvester_cli.dashboard import live
    from harvester_cli.signals import stop_on_signal

    title = f"claims in {coordination_topic}" if group is None else f"claims of {group}"

    def frame() -> Frame:
        observer.follow(0)
        found, clock = _rows(observer, group), f"{datetime.now(UTC):%H:%M:%S} UTC"
        return lambda width, height, _kept: screen(found, title, clock, width, height)

    with stop_on_signal() as stop:
        if not json_ and live.should_show("auto", sys.stdout):
            live.show(frame, refresh_per_second=_PER_SECOND, until=stop)
            return
        while True:
            _show(_rows(observer, group), json_=json_)
            sys.stdout.flush()
            if stop.wait(_EVERY_S):
                return
            observer.follow(0)


def _check_asking(*, yes: bool, json_: bool) -> None:
    if json_ and not yes:
        raise typer.BadParameter("--json cannot ask for confirmation: add --yes", param_hint="--json")
