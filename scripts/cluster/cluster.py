"""A cluster in a directory: starts, inspects, kills and ends it.

Every process is identified by its pid and start time, so no other process is ever ended. All changes to a cluster
happen under the directory's lock, and several processes may make them at once.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from harvester.errors import StackError
from harvester.stack.processes import ProcessId, children_of, end, is_alive, send, spawn, tail
from harvester.stack.stack import free_ports

from . import _daemons, _state
from ._daemons import HOST, Size
from ._state import State, locked

WORKERS = 2
_ATTEMPTS = 3
_LOOK_S = 0.05
_TERM = ((signal.SIGTERM, 10.0),)


class Worker:
    """One worker, and the executors that it has started."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self._cluster, self._number = cluster, number

    @property
    def process(self) -> ProcessId | None:
        """The worker that runs now; None where it does not."""
        workers = self._cluster.state().workers
        found = workers[self._number] if self._number < len(workers) else None
        return found if found is not None and is_alive(found) else None

    def executors(self) -> list[ProcessId]:
        """Of all applications that run on it."""
        return [] if self.process is None else children_of(self.process)

    def kill(self) -> list[int]:
        """SIGKILL for the worker and its executors at once, as when the machine goes; returns their pids."""
        worker = self.process
        if worker is None:
            return []
        gone = [worker, *children_of(worker)]
        for process in gone:
            send(process, signal.SIGKILL)
        for process in gone:
            end(process, ())
        return [process.pid for process in gone]


class Cluster:
    """The cluster in `directory`; making this object starts nothing."""

    def __init__(self, directory: Path, *, size: Size | None = None) -> None:
        self.directory = directory.absolute()
        self.workers: Sequence[Worker] = tuple(Worker(self, number) for number in range(WORKERS))
        self._size = size or Size()

    @property
    def master_url(self) -> str:
        """For `--master`."""
        return f"spark://{HOST}:{self.state().port}"

    @property
    def ui_url(self) -> str:
        """The master's page."""
        return f"http://{HOST}:{self.state().ui}"

    def state(self) -> State:
        """As it is written; says nothing about what still runs."""
        return _state.read(self.directory)

    def running(self) -> bool:
        """Whether the master and every worker run."""
        state = self.state()
        return _runs(state.master) and len(state.workers) == WORKERS and all(map(_runs, state.workers))

    def executors(self) -> list[int]:
        """Pids of all executors."""
        return [process.pid for worker in self.workers for process in worker.executors()]

    def up(self, *, timeout_s: float = 60.0, progress: Callable[[str], None] = lambda _: None) -> None:
        """Start what does not run, and wait until the master knows every worker; StackError if that does not come."""
        with locked(self.directory):
            state = self.state()
            if not _runs(state.master):
                # Workers of a master that is gone would look for it at its old address.
                self._end(state)
                self._start_master(state, timeout_s, progress)
            state.workers += [None] * (WORKERS - len(state.workers))
            self._start_workers(state, range(WORKERS), timeout_s, progress)

    def restart_worker(self, number: int, *, timeout_s: float = 60.0) -> None:
        """Start a worker that was killed; returns when the master knows it."""
        with locked(self.directory):
            self._start_workers(self.state(), (number,), timeout_s, lambda _: None)

    def down(self) -> bool:
        """End everything; False where nothing ran."""
        if not (self.directory / "cluster.json").is_file():
            return False
        with locked(self.directory):
            return self._end(self.state())

    def _start_master(self, state: State, timeout_s: float, progress: Callable[[str], None]) -> None:
        progress("starting the master")
        for attempt in range(_ATTEMPTS):
            state.port, state.ui = free_ports(2, [])
            state.master = self._spawn("master", _daemons.master(state.port, state.ui))
            _state.write(self.directory, state)
            try:
                self._await(lambda: _daemons.answers(state.ui), state.master, "master", timeout_s)
            except StackError:
                if attempt + 1 == _ATTEMPTS or is_alive(state.master):
                    raise
            else:
                return

    def _start_workers(
        self, state: State, numbers: Iterable[int], timeout_s: float, progress: Callable[[str], None]
    ) -> None:
        """Those that do not run, together. One that was killed may still be on the master's list: new ones count."""
        before = _daemons.workers(state.ui)
        missing = [number for number in numbers if not _runs(state.workers[number])]
        for number in missing:
            progress(f"starting worker {number}")
            command = _daemons.worker(self.directory, number, state.port, self._size)
            state.workers[number] = self._spawn(f"worker-{number}", command)
            _state.write(self.directory, state)
        for number in missing:
            process = state.workers[number]
            assert process is not None
            self._await(
                lambda: len(_daemons.workers(state.ui) - before) >= len(missing), process, f"worker-{number}", timeout_s
            )

    def _await(self, done: Callable[[], bool], process: ProcessId, name: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            log = self.directory / f"{name}.log"
            if not is_alive(process):
                raise StackError(f"Spark's {name} ended as it started:\n{tail(log)}", hint=f"see {log}")
            if time.monotonic() > deadline:
                raise StackError(f"Spark's {name} is not ready after {timeout_s:g} s:\n{tail(log)}", hint=f"see {log}")
            time.sleep(_LOOK_S)

    def _spawn(self, name: str, command: Sequence[str]) -> ProcessId:
        (self.directory / "scratch").mkdir(exist_ok=True)
        env = _daemons.environment(self.directory)
        return spawn(command, log=self.directory / f"{name}.log", env=env, cwd=self.directory, run_as=None)

    def _end(self, state: State) -> bool:
        running = [process for process in (*state.workers, state.master) if process is not None and is_alive(process)]
        executors = [child for process in running for child in children_of(process)]
        for process in (*running, *executors):
            end(process, _TERM)
        state.workers, state.master = [], None
        _state.write(self.directory, state)
        return bool(running)


def _runs(process: ProcessId | None) -> bool:
    return process is not None and is_alive(process)
