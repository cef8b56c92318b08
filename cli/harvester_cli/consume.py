"""`harvester consume`: print records as a coordinated consumer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count as numbers
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from harvester_cli.dashboard.figures import one_line
from harvester_cli.options import CoordinationOptions, group_name, grouped

if TYPE_CHECKING:
    import threading

    from harvester.coordination.consumer import CoordinatedConsumer
    from harvester.coordination.events import Event

_POLL_S = 0.1
_WATCH_EVERY_S = 2.0
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_KINDS = {1: "created", 2: "appended"}  # Kafka's numbers for the kinds of timestamp


Format = Literal["json", "value"]
OnError = Literal["retry", "dead-letter", "skip", "stop"]


@grouped
def consume(
    group: Annotated[str, typer.Option(help="Consumers of one group share the partitions.", callback=group_name)],
    topic: Annotated[list[str], typer.Option(help="May be given several times.")],
    options: CoordinationOptions,
    amo: Annotated[
        bool,
        typer.Option(
            "--amo", help="At most once: no record is printed twice, but some are never printed after a kill."
        ),
    ] = False,
    format_: Annotated[
        Format, typer.Option("--format", help="json: the whole record; value: the bytes of its value.")
    ] = "json",
    count: Annotated[int | None, typer.Option(min=1, help="End after this many records, with those given up.")] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.1, help="End when nothing has arrived for this many seconds.")
    ] = None,
    client_id: Annotated[
        str | None,
        typer.Option(help="A permanent name; after a restart its claims are resumed at once. [default: a random one]"),
    ] = None,
    coordination_partitions: Annotated[
        int, typer.Option(min=1, help="Partitions of the coordination topic, fixed for its whole life.")
    ] = 8,
    command: Annotated[
        str | None,
        typer.Option(
            "--exec",
            metavar="COMMAND",
            help="Give each record to this shell command on its standard input instead of printing it.",
        ),
    ] = None,
    on_error: Annotated[
        OnError, typer.Option(help="What to do with a record whose command has failed for the last time.")
    ] = "stop",
    attempts: Annotated[int | None, typer.Option(min=1, help="Tries per record [default: 5; 1 with stop].")] = None,
    dead_letter_topic: Annotated[
        str | None, typer.Option(help="For --on-error dead-letter [default: GROUP.dead-letters].")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="How many commands to run at once, for different keys.")] = 1,
    watch: Annotated[
        bool, typer.Option("--watch", help="Print a line with statistics to standard error every two seconds.")
    ] = False,
) -> None:
    """Print the records of topics, one per line, sharing the partitions with all other consumers of the group.

    A record counts as processed once its line is written; with --exec, once the command has ended with exit code 0. The
    command's environment contains HARVESTER_TOPIC, HARVESTER_PARTITION, HARVESTER_OFFSET and HARVESTER_KEY. SIGTERM and
    Ctrl-C hand over what is held.
    """
    _check(command, timeout, on_error=on_error != "stop", workers=workers > 1)
    settings = options.settings(
        group=group,
        topics=tuple(topic),
        client_id=client_id,
        at_most_once=amo,
        coordination_partitions=coordination_partitions,
        on_error=on_error,
        attempts=attempts,
        dead_letter_topic=dead_letter_topic,
        workers=workers,
    )

    from harvester.coordination.consumer import CoordinatedConsumer
    from harvester.coordination.topic import require_topics
    from harvester_cli.signals import stop_on_signal

    require_topics(topic, settings.kafka)
    watching = _watching if watch else nullcontext
    settled = _Settled(count)
    with (
        stop_on_signal() as stop,
        CoordinatedConsumer(settings, on_event=settled.hear) as consumer,
        watching(consumer),
    ):
        if command is None:
            _print_all(consumer, stop, format_, count, timeout)
        else:
            settled.enough = consumer.stop
            _execute_all(consumer, stop, format_, settled.add, command)


def _check(command: str | None, timeout_s: float | None, **only_with_command: bool) -> None:
    """Raises typer.BadParameter for options that cannot be combined."""
    if command is not None and timeout_s is not None:
        raise typer.BadParameter("cannot be combined with --exec", param_hint="--timeout")
    for name, given in only_with_command.items():
        if given and command is None:
            raise typer.BadParameter(
                "requires --exec: printing does not fail", param_hint=f"--{name.replace('_', '-')}"
            )


@contextmanager
def _watching(consumer: CoordinatedConsumer) -> Iterator[None]:
    """Print statistics now, every two seconds and at the end."""
    import threading

    from harvester.clock import clock_s
    from harvester_cli.dashboard.live import run_lines

    before, since = 0, clock_s()

    def show() -> None:
        nonlocal before, since
        records, now = consumer.statistics().records, clock_s()
        per_s = (records - before) / max(now - since, 1e-3)
        before, since = records, now
        print(figures_line(consumer, datetime.now(UTC), per_s), file=sys.stderr, flush=True)

    ended = threading.Event()
    run = partial(run_lines, show, sys.stderr, every_s=_WATCH_EVERY_S, until=ended)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def figures_line(consumer: CoordinatedConsumer, at: datetime, per_s: float) -> str:
    """Time, group and client, then `name=value` pairs in a fixed order."""
    done, oldest_s = consumer.statistics(), max(consumer.ages().values(), default=None)
    pairs = {
        "claims": len(consumer.claims()),
        "records": done.records,
        "per_s": round(per_s),
        "lag": sum(consumer.lag().values()),
        "oldest_s": None if oldest_s is None else round(oldest_s),
        "open": sum(each.records for each in consumer.open_records().values()),
        "failures": done.failures,
        "retries": done.retries,
        "parked_keys": done.parked,
        "given_up": done.given_up,
    }
    who = f"{one_line(consumer.settings.group)} {one_line(consumer.client.id)}"
    figures = " ".join(f"{name}={value}" for name, value in pairs.items() if value is not None)
    return f"{at:%Y-%m-%dT%H:%M:%SZ} {who} {figures}"


class _Settled:
    """Counts the records that a command has taken and those that were given up; calls `enough` after so many."""

    def __init__(self, most: int | None) -> None:
        self._most, self._numbers = most, numbers(1)
        self.enough: Callable[[], None] = lambda: None

    def add(self) -> None:
        """One more, from any thread."""
        if next(self._numbers) == self._most:
            self.enough()

    def hear(self, event: Event) -> None:
        """The consumer's `on_event`."""
        from harvester.coordination.events import GivenUp

        if isinstance(event, GivenUp):
            self.add()


def _execute_all(
    consumer: CoordinatedConsumer,
    stop: threading.Event,
    format_: Format,
    settled: Callable[[], None],
    command: str,
) -> None:
    import os
    import subprocess
    import threading

    from harvester.errors import HarvesterError

    def handle(record: Any) -> None:
        key = (record.key() or b"").decode(errors="surrogateescape").replace("\0", "")
        about = {"TOPIC": record.topic(), "PARTITION": record.partition(), "OFFSET": record.offset(), "KEY": key}
        ended = subprocess.run(
            ["/bin/sh", "-c", command],
            input=(record.value() or b"") if format_ == "value" else _json_of(record),
            env=os.environ | {f"HARVESTER_{name}": str(value) for name, value in about.items()},
            start_new_session=True,  # Ctrl-C is for us: the current record is finished
            check=False,
        )
        if ended.returncode:
            raise HarvesterError(f"the command ended with exit code {ended.returncode}")
        settled()

    def await_signal() -> None:
        stop.wait()
        consumer.stop()

    threading.Thread(target=await_signal, daemon=True).start()
    consumer.run(handle)


def _print_all(
    consumer: CoordinatedConsumer,
    stop: threading.Event,
    format_: Format,
    count: int | None,
    timeout_s: float | None,
) -> None:
    from harvester.clock import clock_s

    printed, last_at = 0, clock_s()
    while not stop.is_set() and printed != count:
        record: Any = consumer.poll(_POLL_S)
        if record is None:
            if timeout_s is not None and clock_s() - last_at >= timeout_s:
                return
            continue
        line = (record.value() or b"") if format_ == "value" else _json_of(record)
        sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()
        consumer.commit(record)
        printed, last_at = printed + 1, clock_s()


def _json_of(record: Any) -> bytes:
    """A record as one line. The keys are a public interface; see `bytes_json` for keys and values."""
    from harvester_cli.dead import bytes_json

    kind, at_ms = record.timestamp()
    shown = {
        "topic": record.topic(),
        "partition": record.partition(),
        "offset": record.offset(),
        "timestamp": (_EPOCH + timedelta(milliseconds=at_ms)).isoformat() if kind in _KINDS else None,
        "timestamp_kind": _KINDS.get(kind),
        **bytes_json("key", record.key()),
        **bytes_json("value", record.value()),
        "headers": [{"key": name, **bytes_json("value", value)} for name, value in record.headers() or ()],
    }
    return json.dumps(shown).encode()
