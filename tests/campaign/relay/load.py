"""The campaign's writers: the library's own pump, chunk after chunk, through whatever happens to the database."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from harvester.errors import HarvesterError
from harvester.verify.load import Load
from harvester.verify.pump import pump

from .field import TABLE

_CHUNK_S = 20.0
_RETRY_S = 0.2


@dataclass(frozen=True, slots=True)
class Pace:
    """How much is written. Keys share the topics; `rows` a transaction of about as many keys."""

    rate_per_s: float = 600.0
    keys: int = 200
    rows: int = 3
    writers: int = 4
    late: float = 0.03
    rollbacks: float = 0.03


class Writers(threading.Thread):
    """Write until `stop`; what was committed stands in the database, whatever came of a connection."""

    def __init__(self, dsn: str, topics: tuple[str, ...], pace: Pace, seed: int) -> None:
        super().__init__(name="writers", daemon=True)
        self._dsn, self._topics, self._pace, self._seed = dsn, topics, pace, seed
        self._ending = threading.Event()
        self.rolled_back = 0
        self.interruptions = 0

    def stop(self, timeout_s: float = 60.0) -> None:
        """End, and wait for the end; the database must be reachable."""
        self._ending.set()
        self.join(timeout_s)
        assert not self.is_alive(), "a writer does not end: is its server frozen?"

    def run(self) -> None:
        pace = self._pace
        while not self._ending.is_set():
            self._seed += 1
            load = Load(
                records=int(pace.rate_per_s * _CHUNK_S),
                topics=self._topics,
                keys=pace.keys,
                rate_per_s=pace.rate_per_s,
                value_bytes=60,
                rows_per_transaction=pace.rows,
                writers=pace.writers,
                late=pace.late,
                rollbacks=pace.rollbacks,
                seed=self._seed,
            )
            try:
                report = pump(self._dsn, TABLE, load, append=True, stop=self._ending)
                self.rolled_back += report.rolled_back_records
            except HarvesterError:
                self.interruptions += 1
                time.sleep(_RETRY_S)
