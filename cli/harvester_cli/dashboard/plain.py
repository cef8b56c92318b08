"""The dashboard where there is no terminal: a line every few seconds, easy to read and to grep."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from typing import TextIO

from harvester.status import Backlog, ShardState, Status
from harvester_cli.dashboard.figures import one_line


def status_line(status: Status) -> str:
    """Time, name and state, then `name=value` pairs in a fixed order; unknown figures are left out. Pure."""
    ready = sum(shard.state is ShardState.READY for shard in status.shards)
    pairs: dict[str, object] = {
        "term": status.term,
        "paused_since": None if status.paused_since_at is None else f"{status.paused_since_at:%Y-%m-%dT%H:%M:%SZ}",
        "rate_per_s": round(status.rate_per_s),
        "delivered": status.delivered,
        "queued": status.queued,
        "in_flight": f"{status.in_flight}/{status.max_in_flight}",
        **_backlog(status.backlog),
        "quarantined": status.quarantined,
        "p50_ms": _rounded(status.p50_ms),
        "p99_ms": _rounded(status.p99_ms),
        "shards": f"{ready}/{len(status.shards)}",
        "problem": json.dumps(one_line(status.problem), ensure_ascii=False) if status.problem else None,
    }
    words = [f"{status.at:%Y-%m-%dT%H:%M:%SZ}", one_line(status.name), status.state.value]
    return " ".join(words + [f"{name}={value}" for name, value in pairs.items() if value is not None])


def run(
    get_status: Callable[[], Status],
    *,
    every_s: float = 10,
    until: threading.Event,
    stream: TextIO | None = None,
) -> None:
    """Print a line now, every `every_s` seconds and when `until` is set. A reader that has gone ends the lines
    only; the run goes on."""
    out = sys.stdout if stream is None else stream
    while True:
        stopped = until.is_set()
        line = status_line(get_status())
        try:
            print(line, file=out, flush=True)
        except BrokenPipeError:
            _discard(out)
            until.wait()
            return
        if stopped:
            return
        until.wait(every_s)


def _discard(stream: TextIO) -> None:
    """Make what is left in the buffer vanish; else its flush at exit would turn a good exit code into 120."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _backlog(backlog: Backlog | None) -> dict[str, object]:
    if backlog is None:
        return {}
    return {
        "backlog": f"{backlog.records}{'+' if backlog.capped else ''}",
        "oldest_s": _rounded(backlog.oldest_age_s),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
