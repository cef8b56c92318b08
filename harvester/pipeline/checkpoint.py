"""Whose a checkpoint is: a file of ours beside Spark's, so that a job never goes on from another one's position."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass

from harvester.pipeline.errors import CheckpointMismatch

FILE = "harvester.json"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """`owner` is a name made up for the checkpoint, which its tables bear as well."""

    owner: str
    job: str
    topics: tuple[str, ...]
    header: str


def to_text(manifest: Manifest) -> str:
    """As it is stored."""
    return json.dumps(
        {
            "version": _VERSION,
            "owner": manifest.owner,
            "job": manifest.job,
            "topics": list(manifest.topics),
            "header": manifest.header,
        }
    )


def from_text(text: str, where: str) -> Manifest:
    """Read `to_text`; CheckpointMismatch for anything else."""
    try:
        stored = json.loads(text)
        if stored["version"] != _VERSION:
            raise CheckpointMismatch(f"the checkpoint {where} is of version {stored['version']}, this is {_VERSION}")
        return Manifest(str(stored["owner"]), str(stored["job"]), tuple(stored["topics"]), str(stored["header"]))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointMismatch(
            f"{where}/{FILE} cannot be read", hint="restore it; without it nobody knows what was read"
        ) from error


def decide(stored: Manifest | None, wanted: Manifest, where: str, *, used: bool) -> Manifest:
    """What to store from now on. `used`: Spark has written there. CheckpointMismatch unless `wanted` can go on there.

    More topics than before are fine: the new ones are read from their beginning.
    """
    if stored is None:
        if used:
            raise CheckpointMismatch(
                f"{where} is the checkpoint of something else", hint="give each job a directory of its own"
            )
        return wanted
    if stored.job != wanted.job:
        raise CheckpointMismatch(
            f"the checkpoint {where} belongs to the job {stored.job}", hint="give each job a directory of its own"
        )
    if stored.header != wanted.header:
        raise CheckpointMismatch(
            f"the checkpoint {where} was made with the header {stored.header!r}, not {wanted.header!r}",
            hint="records before and after would be recognised by different names",
        )
    if gone := _missing(stored.topics, wanted.topics):
        raise CheckpointMismatch(
            f"the checkpoint {where} is for topics {', '.join(stored.topics)}; without {', '.join(gone)} it cannot"
            " be gone on from",
            hint="name these topics as well, or another directory",
        )
    return Manifest(stored.owner, wanted.job, wanted.topics, wanted.header)


def _missing(before: Collection[str], now: Collection[str]) -> list[str]:
    return [topic for topic in before if topic not in set(now)]
