"""`harvester demo`: the main job on real servers, from nothing to a verdict, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from harvester_cli.options import JsonOption

if TYPE_CHECKING:
    from harvester.verify.load import Load

DEFAULT_SECONDS = 30.0
DEFAULT_RATE = 500.0
_TRANSACTIONS_PER_S = 250  # what a small machine commits beside a broker and a harvester, NOTIFY included
_ROWS_UNBOUND = 25


def demo(
    seconds: Annotated[
        float, typer.Option(min=0.1, help="How long to pump; with --records the pump goes on until it is done.")
    ] = DEFAULT_SECONDS,
    records: Annotated[int | None, typer.Option(min=0, help="Records to pump.", show_default=False)] = None,
    keys: Annotated[int, typer.Option(min=1, help="Number of keys.")] = 1_000,
    rate: Annotated[
        float | None,
        typer.Option(
            help=f"Records per second (default: {DEFAULT_RATE:g}; with --records as fast as it goes).",
            show_default=False,
        ),
    ] = None,
    shards: Annotated[int, typer.Option(min=1, help="Shard processes of the harvester.")] = 8,
    keep: Annotated[bool, typer.Option("--keep", help="Leave servers, database and topic for a look.")] = False,
    json_: JsonOption = False,
) -> None:
    """Start servers, run a harvester under load, stop it, verify, clean up.

    On a terminal the harvester shows its dashboard. Servers of your own are used where HARVESTER_TEST_DSN and
    HARVESTER_TEST_BOOTSTRAP name them. With --json the last line of the output is the verdict. Exits with 0 only
    when nothing is lost or out of order.
    """
    import dataclasses
    import json
    import sys

    from rich.console import Console

    from harvester.errors import VerificationFailed
    from harvester_cli.dashboard.live import should_show
    from harvester_cli.demo_place import prepared
    from harvester_cli.demo_run import perform
    from harvester_cli.verdict import answer, render

    load = _load(records, rate, seconds, keys)
    dashboard = not json_ and should_show("auto", sys.stdout)

    def say(text: str) -> None:
        # A terminal that has hung up must not keep the clean-up from being done.
        with suppress(OSError):
            print(text, file=sys.stderr, flush=True)

    with _interruptible():
        with prepared(say, keep=keep) as place:
            report = perform(
                place,
                dataclasses.replace(load, topics=(place.topic,)),
                shards=shards,
                seconds=seconds if records is None else None,
                dashboard=dashboard,
                output=sys.stderr if json_ else None,
                say=say,
            )
        if json_:
            print(json.dumps(report.summary()), flush=True)
        else:
            Console().print(render(report))
    if not (report.verdict.holds and report.verdict.final):
        raise VerificationFailed(answer(report), hint="run it with --keep to look into what it left")


def _load(records: int | None, rate: float | None, seconds: float, keys: int) -> Load:
    """A little of everything that makes order hard: concurrent writers, late commits, rollbacks."""
    from harvester.verify.load import Load

    if records is None:
        rate = DEFAULT_RATE if rate is None else rate
        records = max(1, round(rate * seconds))
    return Load(
        records=records,
        topics=("demo",),
        keys=keys,
        rate_per_s=rate,
        rows_per_transaction=_ROWS_UNBOUND if rate is None else max(1, min(100, round(rate / _TRANSACTIONS_PER_S))),
        writers=4,
        late=0.01,
        rollbacks=0.01,
    )


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and a terminal that hangs up end the demo as Ctrl-C does: with everything cleaned up."""
    import signal

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
