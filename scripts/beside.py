"""Compares two versions of the harvester, which work at the same time on the same servers.

On a machine whose speed changes within seconds, only what runs side by side can be compared. So in each pair both
versions get the same backlog, or the same steady load, at the same moment, and share cores, broker and database. What
counts are the ratios of their rates and of their CPU per record, or of their latencies, and how far the pairs agree.

Each version runs in a process that imports its own tree. The servers are started by this one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

# Of the worker's tree in a worker: its path precedes.
from scripts.benchmarks import __main__ as program
from scripts.benchmarks._backlog import Rows
from scripts.benchmarks._place import fresh
from scripts.benchmarks._relay import FULL, drain, relay
from scripts.benchmarks._scenario import Bench
from scripts.benchmarks._traffic import Load, percentile, travel
from scripts.benchmarks.latency import lead

_ONCE = "delivery=exactly-once"


@dataclass(frozen=True, slots=True)
class _Mode:
    """A backlog with so many keys, or so many records a second for some seconds."""

    settings: Sequence[str] = ()
    keys: int = 1_000
    per_s: int = 0


_MODES = {
    "tuned": _Mode(FULL),
    "cap-1000": _Mode((*FULL, "limits.max_in_flight_records=1000")),
    "defaults": _Mode(),
    "once": _Mode((*FULL, _ONCE)),
    "once-defaults": _Mode((_ONCE,)),
    "once-one-key": _Mode((*FULL, _ONCE), keys=1),
    **{f"latency-{per_s}": _Mode(per_s=per_s) for per_s in (10, 200, 1_000, 2_500)},
    **{f"once-latency-{per_s}": _Mode((_ONCE,), per_s=per_s) for per_s in (10, 200, 1_000, 2_500)},
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/beside", description=__doc__.split("\n")[0])
    parser.add_argument("trees", type=Path, nargs=2, metavar="TREE", help="checkouts of the old and the new version")
    parser.add_argument("--modes", nargs="+", choices=_MODES, default=list(_MODES), help="(default: all)")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--records", type=int, default=200_000, help="in each backlog (200,000)")
    parser.add_argument("--seconds", type=float, default=15, help="of each steady load (15)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # after what is being drained; nothing is left running

    from harvester.stack import StackOptions, down, up

    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="harvester-beside-")))
        place.chmod(0o755)  # started by root, PostgreSQL runs under another account
        stack.callback(down, place / "stack", delete=True)
        info = up(place / "stack", StackOptions(), progress=lambda _text: None)
        servers = {program.DSN: info.dsn, program.BOOTSTRAP: info.bootstrap}
        old, new = (stack.enter_context(_worker(tree.resolve(), options, servers)) for tree in options.trees)
        for mode in options.modes:
            ratios: dict[str, list[float]] = {}
            for number in range(options.pairs + 1):
                # Whoever begins first has a small advantage, of 5 % at 200 records/s: they take turns.
                if number % 2:
                    second, first = _pair((new, old), mode)
                else:
                    first, second = _pair((old, new), mode)
                if not number:
                    continue  # caches and the broker's virtual machine are warm from here on
                for name in first:
                    ratios.setdefault(name, []).append(second[name] / first[name])
                shown = "; ".join(
                    f"{name} {first[name]:,.1f} and {second[name]:,.1f}: {ratios[name][-1]:.2f}" for name in first
                )
                print(f"{mode}: {shown}", flush=True)
            medians = {name: statistics.median(values) for name, values in ratios.items()}
            print(json.dumps({"mode": mode, "medians": medians, "ratios": ratios}), flush=True)
    return 0


@contextmanager
def _worker(tree: Path, options: argparse.Namespace, servers: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | servers | {"PYTHONPATH": f"{tree}{os.pathsep}{tree / 'cli'}"}
    command = [sys.executable, __file__, "--worker", str(options.records), str(options.seconds)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tree, env=environment, **pipes) as process:
        try:
            yield process
        finally:
            process.communicate()


def _pair(workers: Sequence[subprocess.Popen[str]], mode: str) -> list[dict[str, float]]:
    """Each version's figures; both begin when both are ready."""
    for go in (mode, ""):
        for worker in workers:
            assert worker.stdin is not None
            print(go, file=worker.stdin, flush=True)
        answers = [_answer(worker.stdout) for worker in workers]
    return answers


def _answer(lines: IO[str] | None) -> dict[str, float]:
    assert lines is not None
    for line in lines:
        if line.startswith("{"):
            found: dict[str, float] = json.loads(line)
            return found
    raise SystemExit("one of the two has ended; its error is above")


def work(records: int, seconds: float) -> None:
    """Do what the modes that are read ask for, with the version on this process's path."""
    with program._bench(program._options(program.find(), ["drain"]), servers=True) as bench:
        for line in sys.stdin:
            mode = _MODES[line.strip()]
            figures = _steady(bench, mode, seconds) if mode.per_s else _backlog(bench, mode, records)
            print(json.dumps(figures), flush=True)


def _await_other() -> None:
    print("{}", flush=True)
    sys.stdin.readline()


def _backlog(bench: Bench, mode: _Mode, records: int) -> dict[str, float]:
    _await_other()
    done = drain(bench, Rows(records, keys=mode.keys), settings=mode.settings)
    return {"rate_per_s": done.rate_per_s, "cpu_us_per_record": done.figures()["cpu_us_per_record"]}


def _steady(bench: Bench, mode: _Mode, seconds: float) -> dict[str, float]:
    with fresh(bench, notify=True) as place, relay(place, shards=bench.count, settings=mode.settings):
        lead(place)
        _await_other()
        rows = 5 if mode.per_s > 1_000 else 1
        travel(place, Load(mode.per_s, seconds / 4, rows=rows))  # small transactions are not what drains have warmed up
        latencies = travel(place, Load(mode.per_s, seconds, rows=rows)).latencies_ms()
    return {f"p{share * 100:g}_ms": percentile(latencies, share) for share in (0.5, 0.99)}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        del sys.path[0]  # this file's directory: only the worker's tree is meant
        work(int(sys.argv[2]), float(sys.argv[3]))
    else:
        sys.exit(main())
