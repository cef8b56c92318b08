"""Hooks of shards that write garbage into their pipe; every shard that starts imports this, so it is light."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

DIRECTORY = "HARVESTER_TEST_GARBAGE"  # where those that have begun are counted
FAR = 10**15  # ids that nobody has ever seen


def _frame(letter: str, **fields: Any) -> bytes:
    body = letter.encode() + json.dumps(fields).encode()
    return len(body).to_bytes(4, "big") + body


_NO_FIGURES = dict.fromkeys(("queued", "in_flight", "parked", "delivered", "retries", "errors", "quarantined"), 0)
# Each of these is the end of the shard that writes it (tests/unit/relay/test_frames_fuzz.py has many more).
LETHAL: list[bytes] = [
    b"\x41" + os.urandom(4096),  # a length that no frame has
    b"\0\0\0\0",
    b"\0\0\0\3???",
    b"\0\0\0\nS123456789",
    b"\0\0\x80\0l" + b"[" * 0x7FFF,
    _frame("k", epoch="1", ids=3),
    _frame("l", level="high", text="x"),
    _frame("s", **_NO_FIGURES, latency="no hex"),
    _frame("m", epoch=1, term=None, holder=None),  # only a supervisor says this
]
# Well-formed nonsense, which is heard and changes nothing.
HARMLESS = [
    _frame("f", epoch=FAR, ids=[FAR]),
    _frame("d", ids=[FAR, -1]),
    _frame("k", epoch=FAR, ids=[FAR]),
    _frame("q", record_id=FAR, error="\ud800\x1b[31m\n{}%s"),
    _frame("l", level=30, text="%s %d {} \x00 \ud800"),
    _frame("w", text="\ud800%s"),
    _frame("w", text=None),
    _frame("r", pid=-1),
    b"\0\0\0\1S",
    b"\0\0\0\x09S" + FAR.to_bytes(8, "little"),
]


class Hostile:
    """Hooks of a shard: the n-th that starts writes the n-th garbage; those after the last behave."""

    def hit(self, place: str, **facts: Any) -> None:
        pass

    def producer(self, options: dict[str, Any]) -> Any:
        from confluent_kafka import Producer

        pipe = sys._getframe(2).f_locals["self"]._pipe  # the shard's, whose producers are made for it
        for number, garbage in enumerate(LETHAL):
            try:
                (Path(os.environ[DIRECTORY]) / str(number)).touch(exist_ok=False)
            except FileExistsError:
                continue
            data = memoryview(b"".join(HARMLESS) + garbage)
            while data:
                data = data[os.write(pipe._write_fd, data) :]
            break
        return Producer(options)
