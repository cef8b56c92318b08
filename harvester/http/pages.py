"""What is answered on which path: a function of the path and of the harvester's snapshots."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib.resources import files
from typing import Any, Protocol
from uuid import UUID

from harvester.status import State, Status
from harvester.telemetry.totals import Totals

# A member of the group that can lead or does: standing by is what most are there for.
READY = frozenset({State.STANDBY, State.LEADING, State.REMARKING, State.PAUSED, State.SUSPENDED})
_ENDED = frozenset({State.STOPPED, State.FAILED})


class Source(Protocol):
    """What is shown: `harvester.Harvester`. All methods answer at once."""

    def status(self) -> Status: ...

    def totals(self) -> Totals: ...

    def is_working(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """A response."""

    code: int
    content_type: str
    body: bytes

    @classmethod
    def text(cls, code: int, text: str) -> Answer:
        """A few words."""
        return cls(code, "text/plain; charset=utf-8", text.encode())

    @classmethod
    def json(cls, code: int, value: object) -> Answer:
        """Values as JSON."""
        return cls(code, "application/json", json.dumps(value, default=_plain).encode() + b"\n")


class Pages:
    """See the module's text."""

    def __init__(self, source: Source) -> None:
        self._source = source
        folder = files(__package__)
        self._files = {
            "/": Answer(200, "text/html; charset=utf-8", (folder / "status.html").read_bytes()),
            "/status.js": Answer(200, "text/javascript; charset=utf-8", (folder / "status.js").read_bytes()),
            "/status.css": Answer(200, "text/css; charset=utf-8", (folder / "status.css").read_bytes()),
        }
        self._answers: Mapping[str, Callable[[], Answer]] = {
            "/metrics": self._metrics,
            "/healthz": self._health,
            "/readyz": self._readiness,
            "/leader": self._leadership,
            "/status": lambda: Answer.json(200, status_as_json(self._source.status())),
        }

    def answer(self, path: str) -> Answer:
        """What a GET of this path gets."""
        if path in self._files:
            return self._files[path]
        answer = self._answers.get(path)
        if answer is not None:
            return answer()
        return Answer.text(404, "".join(f"{known}\n" for known in ("/", *self._answers)))

    def _metrics(self) -> Answer:
        from harvester.http.exposition import CONTENT_TYPE, expose

        return Answer(200, CONTENT_TYPE, expose(self._source.status(), self._source.totals()))

    def _health(self) -> Answer:
        """Whether a restart would help: its threads turn, or they do not."""
        if self._source.is_working():
            return Answer.text(200, "ok\n")
        state = self._source.status().state
        return Answer.text(503, f"{state.value}\n" if state in _ENDED else "a thread of the relay is stuck\n")

    def _readiness(self) -> Answer:
        """Whether it can lead: it is a member of the group, and its servers were reached."""
        status = self._source.status()
        text = f"{status.state.value}: {status.problem}\n" if status.problem else f"{status.state.value}\n"
        return Answer.text(200 if status.state in READY else 503, text)

    def _leadership(self) -> Answer:
        """Whether it leads, and is trusted to, now."""
        status = self._source.status()
        leads = status.leader_id is not None and status.term is not None
        return Answer.json(200 if leads else 503, {"leader": leads, "term": status.term, "leader_id": status.leader_id})


def status_as_json(status: Status) -> dict[str, Any]:
    """All of it, by the names of `harvester.Status`; times are ISO 8601 in UTC."""
    return asdict(status)


def _plain(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, UUID):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")
