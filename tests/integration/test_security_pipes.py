"""A shard that writes garbage into its pipe costs itself, never the supervisor."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from harvester import State
from harvester.relay.failpoints import VARIABLE
from tests.support.harvesting import Scene
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]

_DIRECTORY = "HARVESTER_TEST_GARBAGE"
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
                (Path(os.environ[_DIRECTORY]) / str(number)).touch(exist_ok=False)
            except FileExistsError:
                continue
            data = memoryview(b"".join(HARMLESS) + garbage)
            while data:
                data = data[os.write(pipe._write_fd, data) :]
            break
        return Producer(options)


def test_the_supervisor_outlives_what_its_shards_write(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written = tmp_path / "garbage"
    written.mkdir()
    monkeypatch.setenv(_DIRECTORY, str(written))
    monkeypatch.setenv(VARIABLE, f"{__name__}:Hostile")
    # A pause grows with the deaths of a window; here each is to be replaced at once.
    given: dict[str, Any] = {"restart_budget": 1000, "restart_window": "1ms"}
    values = [str(number) for number in range(100)]
    scene.add(*[(f"k{int(value) % 7}", value) for value in values])
    with scene.embedded(**given) as running:
        eventually(lambda: len(list(written.iterdir())) == len(LETHAL), 120, "all garbage written")
        scene.wait_left()
        running.wait_ready()
        status = running.harvester.status()
        assert status.state is State.LEADING
        assert sum(shard.restarts for shard in status.shards) == len(LETHAL)
        scene.add(("k0", "afterwards"))
        scene.wait_left()
    ended = [record for record in caplog.records if "ended unexpectedly" in record.message]
    assert len(ended) == len(LETHAL)
    expected: dict[str | None, list[str | None]] = {}
    for value in [*values, "afterwards"]:
        expected.setdefault("k0" if value == "afterwards" else f"k{int(value) % 7}", []).append(value)
    assert scene.published() == expected
