"""Compares two versions of the harvester, which drain backlogs at the same time on the same servers.

On a machine whose speed changes within seconds, only what runs side by side can be compared. So in each pair both
versions get the same backlog at the same moment, and share cores, broker and database; what counts are the ratios of
their rates and of their CPU per record, and how far the pairs agree.

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
from pathlib import Path
from typing import IO, Any

# Of the worker's tree in a worker: its path precedes.
from scripts.benchmarks import __main__ as program
from scripts.benchmarks._backlog import Rows
from scripts.benchmarks._relay import FULL, drain

_ONCE = "delivery=exactly-once"
_MODES: dict[str, tuple[Sequence[str], int]] = {  # settings, number of keys
    "tuned": (FULL, 1_000),
    "cap-1000": ((*FULL, "limits.max_in_flight_records=1000"), 1_000),
    "defaults": ((), 1_000),
    "once": ((*FULL, _ONCE), 1_000),
    "once-defaults": ((_ONCE,), 1_000),
    "once-one-key": ((*FULL, _ONCE), 1),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/beside", description=__doc__.split("\n")[0])
    parser.add_argument("trees", type=Path, nargs=2, metavar="TREE", help="checkouts of the old and the new version")
    parser.add_argument("--modes", nargs="+", choices=_MODES, default=list(_MODES), help="(default: all)")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--records", type=int, default=200_000, help="in each backlog (200,000)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # after what is being drained; nothing is left running

    from harvester.stack import StackOptions, down, up

    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="harvester-beside-")))
        place.chmod(0o755)  # started by root, PostgreSQL runs under another account
        stack.callback(down, place / "stack", delete=True)
        info = up(place / "stack", StackOptions(), progress=lambda _text: None)
        servers = {program.DSN: info.dsn, program.BOOTSTRAP: info.bootstrap}
        old, new = (stack.enter_context(_worker(tree.resolve(), options.records, servers)) for tree in options.trees)
        for mode in options.modes:
            rates, costs = list[float](), list[float]()
            for number in range(options.pairs + 1):
                first, second = _drain((old, new), mode)
                if not number:
                    continue  # caches and the broker's virtual machine are warm from here on
                rates.append(second["rate"] / first["rate"])
                costs.append(second["cpu"] / first["cpu"])
                shown = " and ".join(f"{one['rate']:,.0f}/s with {one['cpu']:.1f} µs" for one in (first, second))
                print(f"{mode}: {shown}; rate {rates[-1]:.2f}, CPU {costs[-1]:.2f}", flush=True)
            line = {"mode": mode, "rate": statistics.median(rates), "cpu": statistics.median(costs)}
            print(json.dumps(line | {"rates": rates, "cpus": costs}), flush=True)
    return 0


@contextmanager
def _worker(tree: Path, records: int, servers: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | servers | {"PYTHONPATH": f"{tree}{os.pathsep}{tree / 'cli'}"}
    command = [sys.executable, __file__, "--worker", str(records)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tree, env=environment, **pipes) as process:
        try:
            yield process
        finally:
            process.communicate()


def _drain(workers: Sequence[subprocess.Popen[str]], mode: str) -> list[dict[str, float]]:
    for worker in workers:
        assert worker.stdin is not None
        print(mode, file=worker.stdin, flush=True)
    return [_answer(worker.stdout) for worker in workers]


def _answer(lines: IO[str] | None) -> dict[str, float]:
    assert lines is not None
    for line in lines:
        if line.startswith("{"):
            found: dict[str, float] = json.loads(line)
            return found
    raise SystemExit("one of the two has ended; its error is above")


def work(records: int) -> None:
    """Drain a backlog for each mode that is read, with the version on this process's path."""
    with program._bench(program._options(program.find(), ["drain"]), servers=True) as bench:
        for line in sys.stdin:
            settings, keys = _MODES[line.strip()]
            done = drain(bench, Rows(records, keys=keys), settings=settings)
            print(json.dumps({"rate": done.rate_per_s, "cpu": done.figures()["cpu_us_per_record"]}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        del sys.path[0]  # this file's directory: only the worker's tree is meant
        work(int(sys.argv[2]))
    else:
        sys.exit(main())
