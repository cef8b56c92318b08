"""The judge: what the consumers noted against what docs/protocol/coordination.md promises. Pure.

    lost          at least once, each record is processed
    twice         at most once, none is processed twice; at least once, none twice under one generation
    repeats       at least once, what a successor repeats was handed out within one interval, but for what may be open
    keys          with handlers in several threads, first processings of a key come in its order
    order         at most once, nothing is handed out under a generation that was given up, when a later one has begun
    holders       a record is not processed under a generation when a later one has begun; nobody else believes to hold
    claimed       all partitions are held again 2 intervals and 2 s after a fault
    fair          shares differ by one at most, 3 intervals later

A process that is frozen between looking at its claim and noting the record notes it when it wakes: one for each freeze.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from tests.campaign.frame import Verdict

from .coverage import fair_from, gaps, held, overlaps
from .history import Episode, History, Holding, Member, Processed, Record

EXAMPLES = 5  # of each kind
T = TypeVar("T", bound=tuple[int, ...])


@dataclass(frozen=True, slots=True)
class Recovery:
    """After an episode: seconds until all was claimed, and from then until it was shared fairly; None: never."""

    what: str
    claimed_s: float | None
    fair_s: float | None


@dataclass(frozen=True, slots=True)
class Judgement(Verdict):
    """Figures and violations. `repeats` counts processings beyond a record's first; `never` records without any."""

    records: int
    processed: int
    never: int
    repeats: int
    generations: int
    widest_repeat_s: float
    recoveries: tuple[Recovery, ...]
    violations: tuple[str, ...]


def judge(history: History) -> Judgement:
    """Look at everything."""
    times: Counter[tuple[int, int]] = Counter()
    for member in history.members:
        times.update((each.partition, each.offset) for each in member.processed)
    done = {record for member in history.members for _, record in member.done}
    never = history.records - (done if history.keys else times.keys())
    violations = [f"accident: {text}" for text in history.accidents]
    violations += [
        f"lost: {_name(each)} was processed, and never written" for each in _few(times.keys() - history.records)
    ]
    if never and not history.at_most_once:
        violations.append(f"lost: {len(never)} records, {', '.join(map(_name, _few(never)))}")
    violations += _twice(history, times)
    repeats = [] if history.at_most_once else list(_repeats(history))
    violations += [text for width, text in repeats if text]
    violations += _late(history)
    violations += _out_of_order(history) if history.at_most_once else ()
    violations += _keys(history)
    holdings = held(history.members)
    violations += _two_holders(history, holdings)
    recoveries = tuple(_recovery(history, holdings, episode) for episode in history.episodes)
    violations += _slow(history, recoveries)
    return Judgement(
        records=len(history.records),
        processed=len(times),
        never=len(never),
        repeats=times.total() - len(times),
        generations=len({(each.partition, each.generation) for member in history.members for each in member.processed}),
        widest_repeat_s=max((width for width, _ in repeats), default=0.0),
        recoveries=recoveries,
        violations=tuple(violations),
    )


# -- what was processed


def _twice(history: History, times: Counter[tuple[int, int]]) -> Iterator[str]:
    if history.at_most_once:
        for record in _few(record for record, count in times.items() if count > 1):
            by = [f"{m.name} under {p.generation}" for m in history.members for p in m.processed if _of(p) == record]
            yield f"twice: {_name(record)} by {' and '.join(by)}"
        return
    once: Counter[tuple[int, int, int]] = Counter()
    for member in history.members:
        once.update((each.partition, each.offset, each.generation) for each in member.processed)
    for partition, offset, generation in _few(each for each, count in once.items() if count > 1):
        yield f"twice: {_name((partition, offset))} under generation {generation} alone"


def _repeats(history: History) -> Iterator[tuple[float, str]]:
    """Of each generation that was followed by another: how long it had what was repeated; and what is wrong with it."""
    newest: dict[tuple[int, int], int] = {}
    for _, each in _all(history):
        newest[_of(each)] = max(each.generation, newest.get(_of(each), each.generation))
    repeated: dict[tuple[int, int], list[tuple[Member, Processed]]] = defaultdict(list)
    for member, each in _all(history):
        if newest[_of(each)] > each.generation:
            repeated[each.partition, each.generation].append((member, each))
    bound_s = history.limits.interval_s + history.limits.slack_s
    for (partition, generation), found in repeated.items():
        at = sorted(each.at for _, each in found)
        began, ended = at[0], at[-1]
        waking = sum(frozen < ended and thawed > began for frozen, thawed in found[0][0].frozen)
        # What was handed out before the last interval was open when the last heartbeat was sent.
        widths = [(last, sum(each < last - bound_s for each in at)) for last in at[::-1][: waking + 1]]
        last, open_records = min(widths, key=lambda width: width[1])
        if open_records > history.limits.max_open_records:
            yield (
                ended - began,
                (
                    f"repeats: {len(found)} records of [{partition}] under generation {generation},"
                    f" by {found[0][0].name}, were handed out within {ended - began:.2f} s and repeated"
                ),
            )
        else:
            yield last - began, ""


def _keys(history: History) -> Iterator[str]:
    """Of each key, a record that was first processed before one that is earlier in its partition."""
    first: dict[Record, float] = {}
    for member in history.members:
        for at, record in member.done:
            first[record] = min(at, first.get(record, at))
    latest: dict[tuple[int, int], tuple[float, Record]] = {}
    for record in sorted(first.keys() & history.keys.keys()):
        lane = record[0], history.keys[record]
        at = first[record]
        before_at, before = latest.get(lane, (at, record))
        if at < before_at:
            yield f"keys: {_name(record)} was processed {before_at - at:.3f} s before {_name(before)} of its key"
            return
        latest[lane] = at, record


# -- who held what


def _late(history: History) -> Iterator[str]:
    """Records under a generation that was over."""
    by_partition: dict[int, list[tuple[Member, Processed]]] = defaultdict(list)
    for member, each in _all(history):
        by_partition[each.partition].append((member, each))
    for found in by_partition.values():
        # At most once, what is ours stays ours when the claim is lost: there the offsets tell, not the times.
        found.sort(key=lambda pair: pair[1].offset if history.at_most_once else pair[1].at)
        newest, excused = found[0][1].generation, Counter[tuple[str, float]]()
        for member, each in found:
            if each.generation >= newest:
                newest = each.generation
                continue
            woke = None if history.at_most_once else _woke(member, each.at, history.limits.wakes_within_s)
            if woke is not None and not excused[member.name, woke]:
                excused[member.name, woke] += 1
                continue
            yield (
                f"holders: {_name(_of(each))} was processed by {member.name} under generation {each.generation}"
                f" after generation {newest} had begun"
            )
            break


def _out_of_order(history: History) -> Iterator[str]:
    """Records that an old holder handed out when its successor had begun, though it had given the partition up.

    One may be noted late: it was in hand. What is handed out under a claim that was *lost* comes late by design.
    """
    began: dict[int, list[tuple[float, int]]] = defaultdict(list)  # by partition: the first record of each generation
    firsts: dict[tuple[int, int], float] = {}
    for _, each in _all(history):
        held = each.partition, each.generation
        firsts[held] = min(each.at, firsts.get(held, each.at))
    for (partition, generation), at in firsts.items():
        began[partition].append((at, generation))
    for member in history.members:
        late: dict[tuple[int, int], list[tuple[Processed, int]]] = defaultdict(list)
        for each in member.processed:
            later = [generation for at, generation in began[each.partition] if at < each.at]
            if max(later, default=each.generation) > each.generation:
                late[each.partition, each.generation].append((each, max(later)))
        for held, found in late.items():
            if held not in member.lost and len(found) > 1:
                each, newest = found[1]
                yield (
                    f"order: {_name(_of(each))} was handed out by {member.name} under generation {each.generation},"
                    f" which it had given up, after generation {newest} had begun ({len(found)} such)"
                )


def _woke(member: Member, at: float, within_s: float) -> float | None:
    return next((thawed for _, thawed in member.frozen if thawed <= at <= thawed + within_s), None)


def _two_holders(history: History, holdings: dict[int, list[Holding]]) -> Iterator[str]:
    for partition, found in holdings.items():
        for both_s, one, other in overlaps(found, history.limits.wakes_within_s):
            if both_s > history.limits.slack_s:
                yield f"holders: {one.by} and {other.by} both believed to hold [{partition}] for {both_s:.2f} s"


# -- how soon it was well again


def _recovery(history: History, holdings: dict[int, list[Holding]], episode: Episode) -> Recovery:
    """A gap of less than an interval is a hand-over, not something that was lost."""
    last = episode.since
    for partition in range(history.partitions):
        for began, ended in gaps(holdings.get(partition, ()), episode.began, episode.until):
            if ended - began <= history.limits.interval_s:
                continue
            if ended >= episode.until:
                return Recovery(episode.what, None, None)
            last = max(last, ended)
    start = max(last, episode.healed)
    fair = fair_from(history, holdings, start, episode.until)
    return Recovery(episode.what, last - episode.since, None if fair is None else fair - start)


def _slow(history: History, recoveries: tuple[Recovery, ...]) -> Iterator[str]:
    limits = history.limits
    for each in recoveries:
        if each.claimed_s is None or each.claimed_s > limits.claimed_s:
            after = "never" if each.claimed_s is None else f"{each.claimed_s:.2f} s"
            yield f"claimed: all partitions again after {after}, not {limits.claimed_s:g} s ({each.what})"
        elif each.fair_s is None or each.fair_s > limits.fair_s:
            after = "never" if each.fair_s is None else f"after {each.fair_s:.2f} s"
            yield f"fair: shares {after}, not {limits.fair_s:g} s ({each.what})"


# -- parts


def _all(history: History) -> Iterator[tuple[Member, Processed]]:
    for member in history.members:
        for each in member.processed:
            yield member, each


def _of(each: Processed) -> tuple[int, int]:
    return each.partition, each.offset


def _name(record: tuple[int, int]) -> str:
    return f"[{record[0]}]@{record[1]}"


def _few(records: Iterable[T]) -> list[T]:
    return sorted(records)[:EXAMPLES]
