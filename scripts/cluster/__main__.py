"""`scripts/spark-cluster up|down|status`. Exits with 1 if `status` finds no complete cluster, or on failure."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harvester.errors import HarvesterError

from .cluster import WORKERS, Cluster, Size

_DEFAULT = Path("build/spark-cluster")


def main() -> int:
    """Do it."""
    options = _options()
    cluster = Cluster(options.dir, size=Size(options.cores, options.memory))
    try:
        if options.what == "up":
            cluster.up(progress=lambda line: print(f"spark-cluster: {line}", file=sys.stderr, flush=True))
        elif options.what == "down":
            print("stopped" if cluster.down() else "nothing was running")
            return 0
        return _show(cluster)
    except HarvesterError as error:
        print(f"spark-cluster: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return 1


def _show(cluster: Cluster) -> int:
    state = cluster.state()
    running = [worker for worker in cluster.workers if worker.process is not None]
    if not cluster.running() and not running:
        print("not running")
        return 1
    print(f"--master {cluster.master_url}")
    print(f"page     {cluster.ui_url}")
    print(f"master   pid {state.master.pid if state.master else '-'}")
    for number, worker in enumerate(cluster.workers):
        executors = ", ".join(str(one.pid) for one in worker.executors()) or "none"
        process = worker.process
        print(f"worker {number} {f'pid {process.pid}, executors: {executors}' if process else 'does not run'}")
    if not cluster.running():
        print(f"spark-cluster: {WORKERS - len(running)} of {WORKERS} workers do not run", file=sys.stderr)
        return 1
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/spark-cluster", description="A Spark cluster of your own on loopback: a master and two workers."
    )
    parser.add_argument("what", choices=("up", "down", "status"))
    parser.add_argument(
        "--dir", type=Path, default=_DEFAULT, metavar="DIR", help=f"where logs and pids are (default: {_DEFAULT})"
    )
    parser.add_argument("--cores", type=int, default=1, metavar="N", help="of each worker (default: 1)")
    parser.add_argument("--memory", type=int, default=1024, metavar="MB", help="of each worker (default: 1024)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
