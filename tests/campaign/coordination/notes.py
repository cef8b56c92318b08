"""What a consumer notes while it runs, one line for each thing, and what can be read from that.

A line is appended by one call before anything follows from it, so a process that is killed has noted all it did:

    B 12.5              it consumes from now on
    C 13.1 0:55 3:77    it holds these partitions under these generations
    R 13.2 3 1041 77    it has this record in hand: partition, offset, generation
    D 13.3 3 1041       its handler has processed it, or has given it up
    L 14.0 3 77         it was told that it has lost this partition, held under this generation
    E 20.0              it has ended in good order
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .history import Holds, Member, Processed, Record, Span


class Notebook:
    """The consumer's side."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def begins(self) -> None:
        """It consumes."""
        self._write("B")

    def holds(self, claims: Mapping[int, int]) -> None:
        """These claims, and no others."""
        self._write("C", *(f"{partition}:{generation}" for partition, generation in sorted(claims.items())))

    def has(self, partition: int, offset: int, generation: int) -> None:
        """A record in hand."""
        self._write("R", str(partition), str(offset), str(generation))

    def done(self, partition: int, offset: int) -> None:
        """Its handler is done with it."""
        self._write("D", str(partition), str(offset))

    def loses(self, partition: int, generation: int) -> None:
        """It is another's, or may be."""
        self._write("L", str(partition), str(generation))

    def ends(self) -> None:
        """It has ended."""
        self._write("E")

    def _write(self, kind: str, *words: str) -> None:
        os.write(self._file, " ".join((kind, f"{time.monotonic():.6f}", *words)).encode() + b"\n")


class Reader:
    """The campaign's side: reads what has come since it read last."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._rest = path, 0, ""
        self.born = self.ended = math.inf
        self.processed: list[Processed] = []
        self.holds: list[Holds] = []
        self.lost: set[tuple[int, int]] = set()
        self.done: list[tuple[float, Record]] = []

    def read(self) -> None:
        """What is new."""
        if not self._path.exists():
            return
        with self._path.open() as file:
            file.seek(self._offset)
            text = file.read()
            self._offset = file.tell()
        *lines, self._rest = (self._rest + text).split("\n")
        self._take(lines)

    @property
    def text(self) -> str:
        """All of it."""
        return self._path.read_text() if self._path.exists() else ""

    @property
    def claims(self) -> Mapping[int, int]:
        """What it holds, as noted last."""
        return self.holds[-1].claims if self.holds else {}

    def member(self, name: str, killed: float = math.inf, frozen: Sequence[Span] = ()) -> Member:
        """All that was noted, as the judge wants it."""
        ended, lost = min(self.ended, killed), frozenset(self.lost)
        return Member(name, self.born, ended, tuple(self.processed), tuple(self.holds), tuple(frozen), lost, self.done)

    def _take(self, lines: Iterable[str]) -> None:
        for line in lines:
            kind, at, *words = line.split()
            match kind:
                case "B":
                    self.born = float(at)
                case "C":
                    pairs = (word.split(":") for word in words)
                    self.holds.append(Holds(float(at), {int(partition): int(of) for partition, of in pairs}))
                case "R":
                    partition, offset, generation = map(int, words)
                    self.processed.append(Processed(float(at), partition, offset, generation))
                case "D":
                    partition, offset = map(int, words)
                    self.done.append((float(at), (partition, offset)))
                case "L":
                    partition, generation = map(int, words)
                    self.lost.add((partition, generation))
                case "E":
                    self.ended = float(at)
