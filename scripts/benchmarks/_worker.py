"""Runs a part of a measurement in a separate process, so that it does not compete for one interpreter.

`python -m scripts.benchmarks._worker module:function JSON` calls the function with the JSON's values and a `Gate`, and
prints what it returns as JSON.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from scripts.benchmarks._place import ROOT


class Gate:
    """The worker's side: `ready` waits until all may start, `stopped` is set when it shall end."""

    def __init__(self) -> None:
        self.stopped = threading.Event()

    def ready(self) -> None:
        """Say so, and wait for the start."""
        print("ready", flush=True)
        sys.stdin.readline()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        sys.stdin.readline()  # a line, or the end of a parent that is gone
        self.stopped.set()


class Worker:
    """The parent's side."""

    def __init__(self, function: str, arguments: dict[str, Any]) -> None:
        self._function = function
        self._process = subprocess.Popen(
            [sys.executable, "-m", "scripts.benchmarks._worker", function, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def wait_ready(self) -> None:
        """Until it has connected and prepared."""
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "ready":
            raise SystemExit(f"{self._function} did not get ready")

    def start(self) -> None:
        """Let it work."""
        self._tell()

    def stop(self) -> None:
        """Ask it to end."""
        self._tell()

    def result(self, timeout_s: float = 600.0) -> Any:
        """Wait for its end; what it returned."""
        # Not `communicate`: it closes the standard input first, which tells the worker to stop.
        late = threading.Timer(timeout_s, self._process.kill)
        late.start()
        try:
            assert self._process.stdout is not None
            output = self._process.stdout.read()
            self._process.wait()
        finally:
            late.cancel()
        if self._process.returncode:
            raise SystemExit(f"{self._function} ended with exit code {self._process.returncode}")
        return json.loads(output.splitlines()[-1])

    def end(self) -> None:
        """Gone afterwards, whatever happened."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()

    def _tell(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()


@contextmanager
def worker(function: str, **arguments: Any) -> Iterator[Worker]:
    """A worker that is ready; gone at the end."""
    made = Worker(function, arguments)
    try:
        made.wait_ready()
        yield made
    finally:
        made.end()


def run(function: str, **arguments: Any) -> Any:
    """Start one, and wait for its result."""
    with worker(function, **arguments) as alone:
        alone.start()
        return alone.result()


def _main() -> None:
    module, _, name = sys.argv[1].partition(":")
    function = getattr(importlib.import_module(module), name)
    print(json.dumps(function(Gate(), **json.loads(sys.argv[2]))), flush=True)


if __name__ == "__main__":
    _main()
