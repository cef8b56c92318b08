"""The judge: a recorded history against the invariants of docs/reliability.md. Pure.

I1 and I2 are judged by `harvester.verify.verdict`, the same code as `harvester verify`; here is what needs times and
processes: one leader (I4), no purge before its record is in the log (I5), a stuck key that stops no other (I7), a
standby whose death costs the leader nothing (I4). Repeats (I6, I8) have a module of their own.

A row counts as delivered only by a record with its own stamp. A crash of the database may undo a commit that was not
flushed, and its number is then given to another row: the record of the first proves nothing about the second. No
record may be published whose commit a crash can undo.

One known limit of docs/reliability.md is recognised and counted: the client of a frozen leader had made a request and
not written it, and writes it when it thaws. So the repeat comes within a second of the thaw, under the frozen leader's
term, behind a successor that a later term appended; and of one thaw there are few, where a shard that did not ask for
trust would send its whole queue.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from harvester.verify.verdict import Finding
from harvester.verify.verdict import judge as judge_log
from tests.campaign.frame import Verdict

from .history import Delivered, History, Led
from .logs import FENCED
from .repeats import explain
from .schedule import REPLACED
from .setup import AT_LEAST_ONCE
from .violation import EXAMPLES, Violation, name

_THAW_S = 1.0  # the client writes within milliseconds of the thaw, on a machine that may be busy
_LATE_MOST = 2  # of one thaw: a shard has such a request for about a millisecond


@dataclass(frozen=True, slots=True)
class Judgement(Verdict):
    """Figures and violations. `repeats` counts deliveries beyond a record's first; `repeats_by` by their reason.

    `late_of_thawed` are those of the known limit; no other figure counts them.
    """

    committed: int
    delivered: int
    rolled_back: int
    quarantined: int
    lost: int
    order_violations: int
    repeats: int
    repeats_by: dict[str, int]
    leaderships: int
    late_of_thawed: int
    violations: tuple[Violation, ...]


def judge(history: History) -> Judgement:
    """Look at everything."""
    stamps = {(row.key, row.seq): row.stamp for row in history.committed}
    own = [each for each in history.delivered if stamps.get((each.key, each.seq)) == each.stamp]
    strangers = [each for each in history.delivered if stamps.get((each.key, each.seq)) != each.stamp]
    late = _late_of_thawed(history, own)
    history = replace(history, delivered=[each for each in own if each not in late])
    verdict = judge_log(
        _counts(history),
        _log_of_keys(history),
        _aside(history),
        pending=_waiting(history),
        foreign=len(history.foreign),
        scattered=_scattered(history),
    )
    violations = [Violation("accident", text) for text in history.accidents]
    if history.waiting:
        violations.append(Violation("I1", f"{len(history.waiting)} rows still stand in the outbox"))
    if not verdict.holds:
        kinds = {"lost": "I1", "never committed": "I1", "in more than one partition": "I2"}
        bad = [finding for finding in verdict.findings if finding.kind != "repeated"]
        violations += [Violation(kinds.get(each.kind, "I2"), f"{each}{_appends(history, each)}") for each in bad]
        violations += [Violation("I1", f"{text}: nobody wrote that") for text in history.foreign[:EXAMPLES]]
    violations += itertools.islice(_late_in_other_topics(history), EXAMPLES)
    violations += [*_strange_rows(history, strangers), *_foreign_marks(history), *_double_leaders(history)]
    violations += [*_early_purges(history), *_stopped_flow(history), *_unseated_leaders(history)]
    reasons, unexplained = explain(history)
    violations += unexplained
    return Judgement(
        committed=verdict.inserted,
        delivered=verdict.delivered,
        rolled_back=history.rolled_back,
        quarantined=len({(each.key, each.seq) for each in history.quarantined}),
        lost=verdict.lost,
        order_violations=verdict.order_violations,
        repeats=verdict.duplicates,
        repeats_by=dict(sorted(reasons.items())),
        leaderships=len(history.led),
        late_of_thawed=len(late),
        violations=tuple(violations),
    )


# -- I1, I2: the log against what was committed


def _appends(history: History, found: Finding) -> str:
    """When and under which term a record that is out of order and its successor were appended."""
    if found.seq is None or found.after is None:
        return ""
    said = [
        f"#{each.seq} at {each.at:.3f} under term {each.term}"
        for each in history.delivered
        if each.key == found.key and each.seq in (found.seq, found.after)
    ]
    return f": {', '.join(said)}"


def _late_of_thawed(history: History, delivered: Sequence[Delivered]) -> set[Delivered]:
    """Repeats of the known limit, unless one thaw has more of them than chance explains."""
    if history.delivery != AT_LEAST_ONCE:
        return set()
    thaws = {
        led.term: [thawed for frozen, thawed in led.frozen if thawed - frozen >= history.limits.heartbeat_timeout_s]
        for led in history.led
    }
    seen: set[tuple[str, int]] = set()
    highest: dict[str, tuple[int, int]] = {}  # of each key, the largest number so far and the term that appended it
    by_thaw: dict[float, set[Delivered]] = defaultdict(set)
    for each in sorted(delivered, key=lambda each: (each.topic, each.partition, each.offset)):
        term = each.term if each.term is not None else -1
        top, top_term = highest.get(each.key, (0, -1))
        if (each.key, each.seq) in seen and each.seq < top and term < top_term:
            thawed = next((at for at in thaws.get(term, ()) if abs(each.at - at) <= _THAW_S), None)
            if thawed is not None:
                by_thaw[thawed].add(each)
        seen.add((each.key, each.seq))
        if each.seq > top:
            highest[each.key] = each.seq, term
    return {each for found in by_thaw.values() if len(found) <= _LATE_MOST for each in found}


def _counts(history: History) -> dict[str, int]:
    return Counter(row.key for row in history.committed)


def _log_of_keys(history: History) -> Iterator[tuple[str, int]]:
    """The records of each key in the order of their appends, also where they went to several topics.

    Partitions have no common order but the broker's clock. Within a transaction it says nothing, so where a leader
    delivers exactly once the topics are merged by the keys' own numbers: each topic's order is judged here, and what
    is further apart than a transaction is long in `_late_in_other_topics`.
    """
    logs: dict[str, dict[str, list[Delivered]]] = defaultdict(lambda: defaultdict(list))
    for each in history.delivered:
        logs[each.key][each.topic].append(each)
    by_clock = history.delivery == AT_LEAST_ONCE
    for key, topics in logs.items():
        merged = heapq.merge(*topics.values(), key=lambda each: (each.at if by_clock else 0.0, each.seq))
        yield from ((key, each.seq) for each in merged)


def _late_in_other_topics(history: History) -> Iterator[Violation]:
    """Records of a key that were appended long after a later one of another topic: not in one transaction with it."""
    if history.delivery == AT_LEAST_ONCE:
        return
    first: dict[str, dict[int, Delivered]] = defaultdict(dict)
    for each in sorted(history.delivered, key=lambda each: each.at):
        first[each.key].setdefault(each.seq, each)
    for found in first.values():
        latest: Delivered | None = None
        for _, each in sorted(found.items()):
            if latest is not None and latest.topic != each.topic and latest.at > each.at + history.limits.unclear_s:
                apart_s = latest.at - each.at
                yield Violation("I2", f"{name(latest)} was appended {apart_s:.3f} s after #{each.seq} in {each.topic}")
            if latest is None or each.at > latest.at:
                latest = each


def _aside(history: History) -> dict[str, set[int]]:
    """Records that need not be in the log: they stand in quarantine, or their rows were truncated."""
    found: dict[str, set[int]] = defaultdict(set)
    for each in history.quarantined:
        found[each.key].add(each.seq)
    for key, seq in history.truncated:
        found[key].add(seq)
    return found


def _waiting(history: History) -> dict[str, set[int]]:
    found: dict[str, set[int]] = defaultdict(set)
    for key, seq in history.waiting:
        found[key].add(seq)
    return found


def _scattered(history: History) -> list[str]:
    places: dict[tuple[str, str], int] = {}
    return [
        each.key
        for each in history.delivered
        if places.setdefault((each.key, each.topic), each.partition) != each.partition
    ]


def _strange_rows(history: History, strangers: Sequence[Delivered]) -> Iterator[Violation]:
    """Numbers must be 1, 2, 3, … of each key, and what was delivered must be the row that was committed."""
    stamps = {(row.key, row.seq): row.stamp for row in history.committed}
    counts = _counts(history)
    holes = [f"{key} #{seq}" for key, seq in stamps if not 1 <= seq <= counts[key]]
    if holes or len(stamps) != len(history.committed):
        yield Violation("accident", f"the record of what was committed has holes: {holes[:EXAMPLES]}")
    for each in strangers[:EXAMPLES]:
        yield Violation("I1", f"{name(each)}: a row was published whose transaction failed, or was undone by a crash")


# -- I4: one leader


def _foreign_marks(history: History) -> Iterator[Violation]:
    """The statement that marks sees, under its own lock on the term row, who holds the term."""
    wrong = [mark for mark in history.marked if mark.by != mark.holder]
    for mark in wrong[:EXAMPLES]:
        yield Violation("I4", f"{mark.by} marked {mark.rows} rows under term {mark.term} of {mark.holder}")


def _double_leaders(history: History) -> Iterator[Violation]:
    limits = history.limits
    found = 0
    spans = ((*span, led) for led in history.led for span in _trusted(led, limits.heartbeat_timeout_s))
    trusted = sorted(spans, key=lambda each: each[:2])
    latest: tuple[float, Led] | None = None  # the span that ends last among those seen
    for began, ended, led in trusted:
        if latest is not None and latest[1].name != led.name and began < latest[0] - limits.overlap_s:
            found += 1
            if found <= EXAMPLES:
                yield Violation(
                    "I4",
                    f"{led.name} led under term {led.term} {latest[0] - began:.3f} s before "
                    f"{latest[1].name} ceased to under term {latest[1].term}",
                )
        if latest is None or ended > latest[0]:
            latest = (ended, led)
    terms = sorted(history.led, key=lambda led: led.began)
    for one, other in itertools.pairwise(terms):
        if other.term <= one.term:
            yield Violation("I4", f"{other.name} took term {other.term} after {one.name} had taken {one.term}")


def _trusted(led: Led, heartbeat_timeout_s: float) -> Iterator[tuple[float, float]]:
    """When it could act: a process that stands still does not, and has lost its trust after heartbeat_timeout."""
    began = led.began
    for frozen, thawed in sorted(led.frozen):
        yield began, max(began, frozen)
        if thawed - frozen >= heartbeat_timeout_s:
            return
        began = thawed
    yield began, max(began, led.ended)


def _unseated_leaders(history: History) -> Iterator[Violation]:
    """A standby died and was replaced, nothing else happened, and the leader was fenced."""
    limits = history.limits
    for fault in history.faults:
        if fault.kind != REPLACED:
            continue
        until = fault.ended + limits.recovery_s
        since = fault.began - limits.recovery_s
        if any(
            other is not fault and other.kind != FENCED and other.began <= until and other.ended >= since
            for other in history.faults
        ):
            continue
        fenced = [each for each in history.faults if each.kind == FENCED and fault.began <= each.began <= until]
        if fenced:
            yield Violation("I4", f"{fenced[0].target} was fenced when the standby {fault.target} was replaced")


# -- I5: first the log, then the purge


def _early_purges(history: History) -> Iterator[Violation]:
    first: dict[tuple[str, int], float] = {}
    for each in history.delivered:
        record = (each.key, each.seq)
        first[record] = min(each.at, first.get(record, each.at))
    aside = {(each.key, each.seq) for each in history.quarantined}
    found = 0
    for row in history.removed:
        record = (row.key, row.seq)
        if record in aside:
            continue
        at = first.get(record)
        if at is not None and at <= row.at + history.limits.clock_slack_s:
            continue
        found += 1
        if found <= EXAMPLES:
            how = "and never delivered" if at is None else f"{at - row.at:.3f} s before it was in the log"
            yield Violation("I5", f"{row.key} #{row.seq} was purged {how}")


# -- I7: a stuck key costs itself


def _stopped_flow(history: History) -> Iterator[Violation]:
    """While a key is stuck, and nothing else is wrong, other keys' records come out soon."""
    limits = history.limits
    first: dict[tuple[str, int], float] = {}
    for each in history.delivered:
        first.setdefault((each.key, each.seq), each.at)
    aside = {(each.key, each.seq) for each in history.quarantined} | set(history.truncated)
    stuck_keys = {stuck.key for stuck in history.stuck}
    for stuck in history.stuck:
        slow = [
            row
            for row in history.committed
            if stuck.began <= row.at <= stuck.ended - limits.flow_s
            and not row.late
            and row.key not in stuck_keys
            and (row.key, row.seq) not in aside
            and first.get((row.key, row.seq), float("inf")) > row.at + limits.flow_s
            and not any(
                fault.began <= row.at + limits.flow_s and row.at <= fault.ended + limits.recovery_s
                for fault in history.faults
            )
        ]
        if slow:
            row = slow[0]
            yield Violation(
                "I7", f"{len(slow)} records of other keys, {row.key} #{row.seq} first, waited for {stuck.key}"
            )
