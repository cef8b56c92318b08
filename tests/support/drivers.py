"""A job of the pipeline as a process: Python, and the Java process that is Spark's driver."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence

from harvester.stack.processes import ProcessId, children_of, identify, is_alive, send

from .cli import RunningCli
from .hooks import Plan
from .sparks import SMALL, arguments
from .wait import eventually

START_S = 300.0
"""Spark, and a first batch or slice, beside whatever else the machine is doing."""


class Driver(RunningCli):
    """`harvester pipeline JOB ARGS` in the background, with a small Spark. As a context manager it leaves nothing."""

    def __init__(
        self,
        job: str,
        *args: str,
        master: str = "local[2]",
        conf: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        given = arguments({**SMALL, **(conf or {})})
        super().__init__("pipeline", job, *args, "--master", master, *given, env=env)
        self._java: list[ProcessId] = []

    def __enter__(self) -> Driver:
        return self

    def java(self) -> list[ProcessId]:
        """The Java process, once there is one."""
        python = identify(self.pid)
        self._java = self._java or ([] if python is None else children_of(python))
        return self._java

    def wait_held(self, plan: Plan, place: str, timeout_s: float) -> None:
        """Until it has come to a place where the plan holds it; fails at once when it has ended."""

        def held() -> bool:
            ended = self.process.poll() is not None
            assert not ended, f"{self} ended (exit code {self.process.returncode}) before {place}:\n{self.output}"
            return (plan.directory / f"{place}.reached").exists()

        try:
            eventually(held, timeout_s, f"the driver at {place}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output}") from None

    def kill(self, *, java: bool = True) -> None:
        """SIGKILL for both, or for Python alone: the Java process then ends by itself, some time later."""
        found = self.java()
        os.kill(self.pid, signal.SIGKILL)
        for process in found if java else ():
            send(process, signal.SIGKILL)
        self.process.wait()
        if java:
            eventually(lambda: not any(map(is_alive, found)), what="the end of the driver's Java process")

    def __exit__(self, *caught: object) -> None:
        found: Sequence[ProcessId] = self.java() if self.process.poll() is None else self._java
        super().__exit__(None, None, None)
        for process in found:
            send(process, signal.SIGKILL)
