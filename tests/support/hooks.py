"""Test signals and injected producer faults, in every process of a harvester (`harvester.failpoints`).

    HARVESTER_TEST_HOOKS=tests.support.hooks:make
    HARVESTER_TEST_PLAN=<directory>

The directory is the plan, so that a test can change it while the harvester runs and processes come and go:

- `<place>.block`: who comes to this place writes its process id into `<place>.reached` and waits until the file is
  gone; a mark without rows passes;
- `<place>.exit`: who comes to this place ends its process at once;
- `fault-<n>.json`: a `Fault`. How often it has struck is counted in files too, over all processes;
- `share-<n>.json`: a `Share`. Whom it has struck is written, one line each, into `share-<n>.struck`;
- `signed`: every record says in a header which process sent it.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from harvester.failpoints import VARIABLE

from .wait import eventually

PLAN = "HARVESTER_TEST_PLAN"
SENDER = "test-sender"  # header: process id of the shard
_TICK_NS = 50_000_000
_LOOK_S = 0.005
_EXIT_CODE = 9


@dataclass(frozen=True)
class Fault:
    """The first `times` matching records fail with the KafkaError of this name.

    `key` None matches every record. `when`: "produce" (the call raises), "delivery" (it is never sent, the report
    says so), "ack" (it is sent and acknowledged, the report says otherwise); of a transaction "commit" (it is not
    committed, and nobody can tell), "committed" (it is, and nobody can tell).
    """

    error: str
    key: str | None = None
    when: str = "delivery"
    times: int = 1
    fatal: bool = False


@dataclass(frozen=True)
class Share:
    """This share of all records fails as a `Fault` does, each once in each process that sends it.

    Chosen by a hash of the seed, the key and the value: the same records, whoever sends them and when.
    """

    error: str
    share: float
    when: str = "delivery"
    seed: int = 1

    def chooses(self, key: bytes | None, value: bytes | None) -> bool:
        """Whether this record is one of those that fail."""
        text = b"%d\0%s\0%s" % (self.seed, key or b"", value or b"")
        return zlib.crc32(text) < self.share * 2**32


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

    def add(self, fault: Fault | Share) -> None:
        """Make records fail."""
        self._faults += 1
        partial = self.directory / "fault.new"
        partial.write_text(json.dumps(asdict(fault)))
        kind = "fault" if isinstance(fault, Fault) else "share"
        partial.rename(self.directory / f"{kind}-{self._faults}.json")

    def struck(self) -> int:
        """How often any fault has struck; shares are not counted."""
        return len(list(self.directory.glob("fault-*.used-*")))

    def chosen(self, when: str | None = None) -> Counter[tuple[str, str]]:
        """How often a share has struck each (key, value); of those that strike at this moment, or of all."""
        found: Counter[tuple[str, str]] = Counter()
        for file in self.directory.glob("share-*.struck"):
            for line in file.read_text().splitlines():
                moment, key, value = json.loads(line)
                if when in (None, moment):
                    found[key, value] += 1
        return found

    def sign(self) -> None:
        """Let processes that start from now on sign what they send; see `sender`."""
        (self.directory / "signed").touch()

    def heal(self) -> None:
        """No fault strikes any more."""
        for file in [*self.directory.glob("fault-*.json"), *self.directory.glob("share-*.json")]:
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


def sender(headers: Sequence[tuple[str, bytes | None]]) -> int | None:
    """The process that sent a signed record, by the record's headers."""
    return next((int(value or b"0") for name, value in headers if name == SENDER), None)


def _wait_for(reached: Path) -> None:
    eventually(reached.exists, what=f"somebody at {reached.stem}")


def make() -> _Hooks:
    """The factory that `harvester.failpoints` calls."""
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
            mine = self._directory / f"{place}.{os.getpid()}"
            mine.write_text(str(os.getpid()))
            mine.rename(self._directory / f"{place}.reached")  # so that it is never seen without its text
            while block.exists():
                time.sleep(_LOOK_S)

    def producer(self, options: dict[str, Any]) -> Any:
        return _FaultyProducer(options, self._directory)


class _Files:
    """What the plan has now. It is asked for each record, and a directory of many strikes is long."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._seen_ns = directory, 0
        self._found: list[Path] = []

    def named(self, prefix: str) -> list[Path]:
        """The plan's own files that begin so, in the order of their names."""
        changed_ns = self._directory.stat().st_mtime_ns
        if changed_ns != self._seen_ns:
            self._found = sorted(file for file in self._directory.iterdir() if file.suffix == ".json")
            # Within a tick of the clock it may change again without looking younger.
            self._seen_ns = changed_ns if time.time_ns() - changed_ns > _TICK_NS else 0
        return [file for file in self._found if file.name.startswith(prefix)]


class _FaultyProducer:
    """A real producer, but for the faults of the plan."""

    def __init__(self, options: dict[str, Any], directory: Path) -> None:
        from confluent_kafka import Producer

        self._producer = Producer(options)
        self._directory = directory
        self._due: deque[Callable[[], None]] = deque()
        self._failed = False
        self._signature = [(SENDER, str(os.getpid()).encode())] if (directory / "signed").exists() else []
        self._files = _Files(directory)
        self._shares: dict[Path, Share] = {}
        self._used: Counter[Path] = Counter()
        self._struck: set[tuple[Path, bytes | None, bytes | None]] = set()

    def produce(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int,
        on_delivery: Callable[[Any, Any], None] | None = None,
        _alias: None = None,
        timestamp: int = 0,
        headers: Any = None,
    ) -> None:
        """By position, as a shard calls it; a lane's progress record, on a partition of its own, no fault befalls."""
        from confluent_kafka import KafkaException

        if on_delivery is None or topic.endswith(".progress"):
            self._producer.produce(topic, value, key, partition, on_delivery, None, timestamp, headers)
            return
        fault = self._strike(key) or self._share(key, value)
        if fault is not None:
            error = _kafka_error(fault)
            if fault["when"] == "produce":
                raise KafkaException(error)
            if fault["when"] == "delivery":
                self._due.append(partial(on_delivery, error, None))
                return
            report = on_delivery

            def turned(real: Any, message: Any) -> None:
                report(real or error, message)  # a record may be refused by itself, such as one for no partition

            on_delivery = turned

        if self._signature:
            headers = [*(headers or ()), *self._signature]
        self._producer.produce(topic, value, key, partition, on_delivery, None, timestamp, headers)

    def poll(self, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        while True:
            served = self._serve() + self._producer.poll(min(0.01, timeout_s))
            if served or time.monotonic() >= deadline:
                return served

    def flush(self, timeout_s: float) -> int:
        """As the client's: what is left has been reported after it."""
        self._serve()
        return self._producer.flush(timeout_s)

    def _serve(self) -> int:
        """Report what failed by the plan; a transaction that is open can only be aborted then."""
        served = 0
        while self._due:
            self._failed = True
            self._due.popleft()()
            served += 1
        return served

    def begin_transaction(self) -> None:
        self._failed = False
        self._producer.begin_transaction()

    def commit_transaction(self, timeout_s: float) -> None:
        """Refused when a record of it failed by the plan, as the client does; or as a fault "commit" says."""
        from confluent_kafka import KafkaError, KafkaException

        self._serve()
        if self._failed:
            raise KafkaException(KafkaError(KafkaError._INCONSISTENT, "injected by the test", txn_requires_abort=True))
        fault = self._strike(None, "commit") or self._strike(None, "committed")
        if fault is None or fault["when"] == "committed":
            self._producer.commit_transaction(timeout_s)
        if fault is not None:
            raise KafkaException(_kafka_error(fault))

    def __getattr__(self, name: str) -> Any:
        """What no fault befalls."""
        return getattr(self._producer, name)

    def _share(self, key: bytes | None, value: bytes | None) -> Mapping[str, Any] | None:
        for file in self._files.named("share-"):
            if file not in self._shares:
                try:
                    self._shares[file] = Share(**json.loads(file.read_text()))
                except FileNotFoundError:
                    continue
            share = self._shares[file]
            if (file, key, value) not in self._struck and share.chooses(key, value):
                self._struck.add((file, key, value))
                line = json.dumps([share.when, *((part or b"").decode(errors="replace") for part in (key, value))])
                with file.with_suffix(".struck").open("a") as log:  # one write at the end of the file: whole lines
                    log.write(line + "\n")
                return {**asdict(share), "fatal": False}
        return None

    def _strike(self, key: bytes | None, when: str = "") -> Mapping[str, Any] | None:
        for file in self._files.named("fault-"):
            try:
                fault: dict[str, Any] = json.loads(file.read_text())
            except FileNotFoundError:
                continue
            if (fault["when"] in ("commit", "committed")) != bool(when) or (when and fault["when"] != when):
                continue
            if fault["key"] is not None and (key or b"").decode(errors="replace") != fault["key"]:
                continue
            for number in range(self._used[file], fault["times"]):
                self._used[file] = number + 1
                try:
                    file.with_suffix(f".used-{number}").touch(exist_ok=False)
                except FileExistsError:
                    continue
                return fault
        return None


def _kafka_error(fault: Mapping[str, Any]) -> Any:
    from confluent_kafka import KafkaError

    return KafkaError(getattr(KafkaError, fault["error"]), "injected by the test", fault["fatal"])
