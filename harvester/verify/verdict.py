"""Compares what was committed with what the log holds, key by key (invariants I1 and I2).

Records of a key are numbered 1, 2, 3, … in the order of their commits, so the number alone is sufficient. Going through
the log of a key, with `top` the highest number so far, a record is

    number > top      a first delivery in order; the numbers it skipped are *open*
    number = top      a repeat before any successor: a duplicate that harms no order
    number < top      open:      a first delivery after a successor: an order violation
                      otherwise: a repeat after a successor: a duplicate and an order violation

What is still open at the end, or above `top`, was not delivered: it is quarantined, pending (in the outbox) or lost.
Numbers that were never committed are unexpected: a row was published that was rolled back.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from enum import StrEnum

MAX_FINDINGS = 10

Delivery = tuple[str, int]


class Kind(StrEnum):
    """What a finding is about."""

    LOST = "lost"
    LATE = "delivered after a successor"
    LATE_REPEAT = "repeated after a successor"
    REPEAT = "repeated"
    UNEXPECTED = "never committed"
    SCATTERED = "in more than one partition"


@dataclass(frozen=True, slots=True)
class Finding:
    """One example. `seq` is None if it concerns the whole key; `after` is the successor that came before it."""

    kind: Kind
    key: str
    seq: int | None = None
    after: int | None = None

    def __str__(self) -> str:
        record = self.key if self.seq is None else f"{self.key} #{self.seq}"
        return f"{record}: {self.kind}" + (f" (#{self.after})" if self.after is not None else "")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Counts of records. inserted = delivered + lost, except for records that are quarantined or pending instead.

    `duplicates` counts deliveries beyond a record's first. `quarantined` counts the records in quarantine, including
    any that reached the log nevertheless. `findings` has up to MAX_FINDINGS examples of each kind.
    """

    inserted: int
    delivered: int
    lost: int
    duplicates: int
    order_violations: int
    quarantined: int
    unexpected: int
    pending: int
    scattered: int
    findings: tuple[Finding, ...] = ()

    @property
    def holds(self) -> bool:
        """Nothing lost, reordered, spread over partitions or invented. Duplicates and pending records do not count
        here.
        """
        return not (self.lost or self.order_violations or self.unexpected or self.scattered)

    @property
    def final(self) -> bool:
        """Nothing waits in the outbox, so nothing can be lost later."""
        return not self.pending


class _Findings:
    def __init__(self) -> None:
        self._kept: dict[Kind, list[Finding]] = {kind: [] for kind in Kind}

    def add(self, kind: Kind, key: str, seq: int | None = None, after: int | None = None) -> None:
        kept = self._kept[kind]
        if len(kept) < MAX_FINDINGS:
            kept.append(Finding(kind, key, seq, after))

    def all(self) -> tuple[Finding, ...]:
        return tuple(finding for kept in self._kept.values() for finding in kept)


class _Key:
    """What the log has shown of one key so far."""

    __slots__ = ("open", "top")

    def __init__(self) -> None:
        self.top = 0
        self.open: set[int] = set()

    def missing(self, count: int) -> set[int]:
        """The numbers of 1 … count that were not delivered."""
        missing = {seq for seq in self.open if seq <= count}
        missing.update(range(self.top + 1, count + 1))
        return missing


class _Log:
    """All keys, and the order violations of their records."""

    def __init__(self, known: Mapping[str, int], findings: _Findings) -> None:
        self.duplicates = self.order_violations = self.unexpected = 0
        self._known = known
        self._findings = findings
        self._keys: dict[str, _Key] = {}

    def key(self, key: str) -> _Key:
        state = self._keys.get(key)
        if state is None:
            state = self._keys[key] = _Key()
        return state

    def add(self, key: str, seq: int) -> None:
        if not 1 <= seq <= self._known.get(key, 0):
            self.unexpected += 1
            self._findings.add(Kind.UNEXPECTED, key, seq)
            return
        state = self.key(key)
        top = state.top
        if seq > top:
            if seq > top + 1:
                state.open.update(range(top + 1, seq))
            state.top = seq
        elif seq == top:
            self.duplicates += 1
            self._findings.add(Kind.REPEAT, key, seq)
        elif seq in state.open:
            self.order_violations += 1
            state.open.remove(seq)
            self._findings.add(Kind.LATE, key, seq, top)
        else:
            self.order_violations += 1
            self.duplicates += 1
            self._findings.add(Kind.LATE_REPEAT, key, seq, top)


_NOTHING: Set[int] = frozenset()


def judge(
    committed: Mapping[str, int],
    deliveries: Iterable[Delivery],
    quarantined: Mapping[str, Set[int]] | None = None,
    *,
    pending: Mapping[str, Set[int]] | None = None,
    known: Mapping[str, int] | None = None,
    foreign: int = 0,
    scattered: Iterable[str] = (),
) -> Verdict:
    """Judge one history.

    `committed`: key -> how many of its records must be accounted for. `deliveries`: (key, number) in log order; only
    the order within a key matters. `quarantined`, `pending`: key -> numbers found there. `known`: like `committed`, but
    read after the log, for a load that is still running: numbers up to it are legitimate, and need not have arrived yet
    (default: `committed`). `foreign`: records that carry no number at all, or belong to a transaction that was
    intentionally rolled back; added to `unexpected`. `scattered`: keys found in more than one partition, where no order
    between them is defined.
    """
    quarantined = quarantined or {}
    pending = pending or {}
    known = committed if known is None else known
    findings = _Findings()
    log = _Log(known, findings)
    for key, seq in deliveries:
        log.add(key, seq)

    delivered = lost = waiting = 0
    for key, count in committed.items():
        missing = log.key(key).missing(count)
        delivered += count - len(missing)
        missing -= quarantined.get(key, _NOTHING)
        still = missing & pending.get(key, _NOTHING)
        waiting += len(still)
        missing -= still
        lost += len(missing)
        for seq in heapq.nsmallest(MAX_FINDINGS, missing):
            findings.add(Kind.LOST, key, seq)

    apart = sorted(set(scattered))
    for key in apart:
        findings.add(Kind.SCATTERED, key)
    aside, strange = _set_aside(quarantined, known, findings)
    return Verdict(
        inserted=sum(committed.values()),
        delivered=delivered,
        lost=lost,
        duplicates=log.duplicates,
        order_violations=log.order_violations,
        quarantined=aside,
        unexpected=log.unexpected + strange + foreign,
        pending=waiting,
        scattered=len(apart),
        findings=findings.all(),
    )


def _set_aside(quarantined: Mapping[str, Set[int]], known: Mapping[str, int], findings: _Findings) -> tuple[int, int]:
    """How many quarantined records are known, and how many were never committed."""
    aside = strange = 0
    for key, seqs in quarantined.items():
        for seq in seqs:
            if 1 <= seq <= known.get(key, 0):
                aside += 1
            else:
                strange += 1
                findings.add(Kind.UNEXPECTED, key, seq)
    return aside, strange
