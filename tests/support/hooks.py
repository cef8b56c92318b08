"""Test signals and injected producer faults, in every process of a harvester (`harvester.relay.hooks`).

    HARVESTER_TEST_HOOKS=tests.support.hooks:make
    HARVESTER_TEST_PLAN=<directory>

The directory is the plan, so that a test can change it while the harvester runs and processes come and go:

- `<place>.block`: who comes to this place makes `<place>.reached` and waits until the file is gone; a mark without
  rows passes;
- `<place>.exit`: who comes to this place ends its process at once;
- `fault-<n>.json`: a `Fault`. How often it has struck is counted in files too, over all processes.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from harvester.relay.hooks import VARIABLE

from .wait import eventually

PLAN = "HARVESTER_TEST_PLAN"
_LOOK_S = 0.005
_EXIT_CODE = 9


@dataclass(frozen=True)
class Fault:
    """The first `times` matching records fail with the KafkaError of this name.

    `key` None matches every record. `when`: "produce" (the call raises), "delivery" (it is never sent, the report
    says so), "ack" (it is sent and acknowledged, the report says otherwise).
    """

    error: str
    key: str | None = None
    when: str = "delivery"
    times: int = 1
    fatal: bool = False


class Plan:
    """The test's side."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._faults = 0

    @property
    def env(self) -> dict[str, str]:
        """The environment of a harvester that follows this plan."""
        root = str(Path(__file__).parents[2])
        path = os.environ.get("PYTHONPATH")
        return {
            VARIABLE: f"{__name__}:make",
            PLAN: str(self.directory),
            "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root,
        }

    def add(self, fault: Fault) -> None:
        """Make records fail."""
        self._faults += 1
        partial = self.directory / "fault.new"
        partial.write_text(json.dumps(asdict(fault)))
        partial.rename(self.directory / f"fault-{self._faults}.json")

    def struck(self) -> int:
        """How often any fault has struck."""
        return len(list(self.directory.glob("fault-*.used-*")))

    def heal(self) -> None:
        """No fault strikes any more."""
        for file in self.directory.glob("fault-*.json"):
            file.unlink()

    @contextmanager
    def blocked(self, place: str) -> Iterator[Callable[[], None]]:
        """Hold whoever comes to a place; yields a function that waits until somebody has come."""
        block, reached = self.directory / f"{place}.block", self.directory / f"{place}.reached"
        block.touch()
        try:
            yield partial(_wait_for, reached)
        finally:
            block.unlink()
            reached.unlink(missing_ok=True)

    def exit_at(self, place: str) -> None:
        """Whoever comes to a place ends."""
        (self.directory / f"{place}.exit").touch()


def _wait_for(reached: Path) -> None:
    eventually(reached.exists, what=f"somebody at {reached.stem}")


def make() -> _Hooks:
    """The factory that `harvester.relay.hooks` calls."""
    return _Hooks(Path(os.environ[PLAN]))


class _Hooks:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def hit(self, place: str, **facts: Any) -> None:
        if facts.get("rows") == []:  # an empty mark: nobody waits for those
            return
        if (self._directory / f"{place}.exit").exists():
            os._exit(_EXIT_CODE)
        block = self._directory / f"{place}.block"
        if block.exists():
            (self._directory / f"{place}.reached").touch()
            while block.exists():
                time.sleep(_LOOK_S)

    def producer(self, options: dict[str, Any]) -> Any:
        return _FaultyProducer(options, self._directory)


class _FaultyProducer:
    """A real producer, but for the faults of the plan."""

    def __init__(self, options: dict[str, Any], directory: Path) -> None:
        from confluent_kafka import Producer

        self._producer = Producer(options)
        self._directory = directory
        self._due: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()

    def produce(
        self,
        topic: str,
        *,
        value: bytes | None,
        key: bytes | None,
        partition: int,
        headers: Any,
        on_delivery: Callable[[Any, Any], None],
    ) -> None:
        from confluent_kafka import KafkaException

        fault = self._strike(key)
        if fault is not None:
            error = _kafka_error(fault)
            if fault["when"] == "produce":
                raise KafkaException(error)
            if fault["when"] == "delivery":
                self._due.append(lambda: on_delivery(error, None))
                return
            report = on_delivery

            def on_delivery(real: Any, message: Any) -> None:
                assert real is None, real
                report(error, message)

        self._producer.produce(
            topic, value=value, key=key, partition=partition, headers=headers, on_delivery=on_delivery
        )

    def poll(self, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        while True:
            served = 0
            while self._due:
                self._due.popleft()()
                served += 1
            served += self._producer.poll(min(0.01, timeout_s))
            if served or time.monotonic() >= deadline:
                return served

    def _strike(self, key: bytes | None) -> Mapping[str, Any] | None:
        for file in sorted(self._directory.glob("fault-*.json")):
            try:
                fault: dict[str, Any] = json.loads(file.read_text())
            except FileNotFoundError:
                continue
            if fault["key"] is not None and (key or b"").decode(errors="replace") != fault["key"]:
                continue
            for number in range(fault["times"]):
                try:
                    file.with_suffix(f".used-{number}").touch(exist_ok=False)
                except FileExistsError:
                    continue
                return fault
        return None


def _kafka_error(fault: Mapping[str, Any]) -> Any:
    from confluent_kafka import KafkaError

    return KafkaError(getattr(KafkaError, fault["error"]), "injected by the test", fault["fatal"])
