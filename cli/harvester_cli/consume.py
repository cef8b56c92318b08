"""`harvester consume`: print records as a coordinated consumer."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from harvester_cli.coordination_options import CoordinationOptions
from harvester_cli.options import grouped

if TYPE_CHECKING:
    import threading

    from harvester.coordination.consumer import CoordinatedConsumer

_POLL_S = 0.1
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_KINDS = {1: "created", 2: "appended"}  # of a timestamp, as Kafka counts them


Format = Literal["json", "value"]


@grouped
def consume(
    group: Annotated[str, typer.Option(help="Consumers of one group share the partitions.")],
    topic: Annotated[list[str], typer.Option(help="May be given several times.")],
    options: CoordinationOptions,
    amo: Annotated[
        bool,
        typer.Option("--amo", help="At most once: none is printed twice, and some never after a kill."),
    ] = False,
    format_: Annotated[
        Format, typer.Option("--format", help="json: all of a record; value: the bytes of its value.")
    ] = "json",
    count: Annotated[int | None, typer.Option(min=1, help="End after so many records.", show_default=False)] = None,
    timeout: Annotated[
        float | None,
        typer.Option(min=0.1, help="End when nothing has come for so many seconds.", show_default=False),
    ] = None,
    client_id: Annotated[
        str | None,
        typer.Option(help="A name that stays: what it held is taken up again at once. Else a random one."),
    ] = None,
    coordination_partitions: Annotated[
        int, typer.Option(min=1, help="Of the coordination topic, for its whole life.")
    ] = 8,
) -> None:
    """Print the records of topics, one a line, sharing their partitions with all consumers of the group.

    A record counts as processed once its line is written. SIGTERM and Ctrl-C hand over what is held.
    """
    settings = options.settings(
        group=group,
        topics=tuple(topic),
        client_id=client_id,
        at_most_once=amo,
        coordination_partitions=coordination_partitions,
    )

    from harvester.coordination.consumer import CoordinatedConsumer
    from harvester.coordination.topic import require_topics
    from harvester_cli.pump import stop_on_signal

    require_topics(topic, settings.kafka)
    with stop_on_signal() as stop, CoordinatedConsumer(settings) as consumer:
        _print_all(consumer, stop, format_, count, timeout)


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
