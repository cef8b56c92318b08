"""What a replay is asked for, and how far it has come: as values, and as the text of its file. Pure."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from enum import StrEnum

from harvester.pipeline.errors import CheckpointMismatch, PipelineError

Positions = Mapping[tuple[str, int], int]
"""(topic, partition) → offset: everything up to there, itself included."""

_VERSION = 1


class By(StrEnum):
    """Whose time a range is of: Kafka's timestamp of the record, or the creation of its row."""

    PUBLISHED = "published"
    CREATED = "created"


@dataclass(frozen=True, slots=True)
class Selection:
    """`since` belongs to the range, `until` does not; both are aware. Nothing named means: all."""

    since: datetime | None = None
    until: datetime | None = None
    by: By = By.PUBLISHED
    topics: tuple[str, ...] = ()
    keys: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Destination:
    """One of: a topic for all, a suffix to each one's own name, or where they came from."""

    topic: str | None = None
    suffix: str | None = None
    original: bool = False

    def targets(self, topics: Iterable[str]) -> dict[str, str]:
        """Topic of the lake → topic to write to; PipelineError where that is one that records came from."""
        if self.original:
            return {topic: topic for topic in topics}
        found = {topic: self.topic if self.topic is not None else f"{topic}{self.suffix}" for topic in topics}
        if own := sorted(set(found.values()) & found.keys()):
            raise PipelineError(
                f"{', '.join(own)}: records of this topic are to be replayed, and none are written back to where they"
                " came from",
                hint="name another topic; --into-original says that it is meant",
            )
        return found


@dataclass(frozen=True, slots=True)
class Request:
    """`as_new`: without the harvester's header, so that nobody recognises the records as repeats."""

    selection: Selection
    destination: Destination
    as_new: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """A replay: what it is asked for, of which version of the table, and what it has written so far."""

    id: str
    request: Request
    silver_version: int
    records: int = 0
    done: Positions = field(default_factory=dict)
    finished: bool = False


def to_text(progress: Progress) -> str:
    """As it is stored."""
    selection, destination = progress.request.selection, progress.request.destination
    return json.dumps(
        {
            "version": _VERSION,
            "id": progress.id,
            "from": None if selection.since is None else selection.since.isoformat(),
            "until": None if selection.until is None else selection.until.isoformat(),
            "by": selection.by,
            "topics": list(selection.topics),
            "keys": [base64.b64encode(key).decode() for key in selection.keys],
            "destination": asdict(destination),
            "as_new": progress.request.as_new,
            "silver_version": progress.silver_version,
            "records": progress.records,
            "done": [[topic, partition, offset] for (topic, partition), offset in sorted(progress.done.items())],
            "finished": progress.finished,
        },
        indent=1,
    )


def from_text(text: str, where: str) -> Progress:
    """Read `to_text`; CheckpointMismatch for anything else."""
    try:
        stored = json.loads(text)
        if stored["version"] != _VERSION:
            raise CheckpointMismatch(f"{where} is of version {stored['version']}, this is {_VERSION}")
        selection = Selection(
            since=_time(stored["from"]),
            until=_time(stored["until"]),
            by=By(stored["by"]),
            topics=tuple(stored["topics"]),
            keys=tuple(base64.b64decode(key, validate=True) for key in stored["keys"]),
        )
        request = Request(selection, Destination(**stored["destination"]), bool(stored["as_new"]))
        done = {(str(topic), int(partition)): int(offset) for topic, partition, offset in stored["done"]}
        return Progress(
            str(stored["id"]),
            request,
            int(stored["silver_version"]),
            int(stored["records"]),
            done,
            bool(stored["finished"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointMismatch(f"{where} cannot be read", hint="begin the replay anew, from where it was") from error


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
