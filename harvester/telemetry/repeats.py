"""Decides which of many similar lines are worth logging. Pure.

An unavailable server makes every part of a harvester report it repeatedly, and so do its client libraries. What is
logged is one line when that begins, one a minute with the number of reports, and one when it ends:

    quiet ──report──▶ begun: said ──report──▶ counted, said once a minute ──end, or a minute of silence──▶ ended: said

Reports have a *kind*, which begins and ends, and a *form*: the report without its numbers. A new form of a kind that
continues is logged as well, up to a limit, since it may have another cause. What ends and begins again within a few
seconds has not ended.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

EVERY_S = 60.0
_APART_S = 5.0
_MOST_FORMS = 6
_VARYING = re.compile(r"\[thrd:[^\]]*\]|\((?:[^()]|\([^()]*\))*\)|[0-9a-f]{8}-[0-9a-f-]{27}|\d+", re.I)
_CLIENT_LINE = re.compile(r"([A-Z_0-9]+) \[[^\]]*\]")


@dataclass(frozen=True, slots=True)
class Ended:
    """`reports`: the total of this kind, over `lasted_s`."""

    kind: str
    reports: int
    lasted_s: float


@dataclass(slots=True)
class _Run:
    began_at: float
    said_at: float
    last_at: float
    reports: int = 1
    unsaid: int = 0
    forms: set[str] = field(default_factory=set)
    by_silence: bool = False
    ended_at: float | None = None  # None while it continues
    end_is_said: bool = False
    comes_and_goes: bool = False  # its end was logged, but it came back


class Repeats:
    """Not thread-safe: its owner has a lock. All times are readings of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}

    def report(self, kind: str, form: str, now: float, *, by_silence: bool = False) -> int | None:
        """If this report is worth a line: how many unlogged reports it represents; otherwise None.

        `by_silence`: nobody calls `end` for this kind. It ends after a minute without reports.
        """
        run = self._runs.get(kind)
        if run is None or (run.ended_at is not None and now - run.ended_at >= _APART_S):
            self._runs[kind] = _Run(now, now, now, forms={form}, by_silence=by_silence)
            return 0
        run.comes_and_goes |= run.end_is_said
        run.ended_at, run.end_is_said = None, False
        run.last_at = now
        run.reports += 1
        if now - run.said_at >= EVERY_S:
            run.said_at, unsaid, run.unsaid = now, run.unsaid, 0
            run.forms.add(form)
            return unsaid
        if form not in run.forms and len(run.forms) < _MOST_FORMS:
            run.forms.add(form)
            return 0
        run.unsaid += 1
        return None

    def end(self, kind: str, now: float) -> Ended | None:
        """Nothing of this kind is wrong any more. None if that is not worth a line, now or at all."""
        run = self._runs.get(kind)
        if run is None or run.ended_at is not None:
            return None
        run.ended_at = now
        if run.comes_and_goes:
            return None  # it comes and goes: `due` reports when it has stayed away
        run.end_is_said = True
        return Ended(kind, run.reports, now - run.began_at)

    def forget(self, kind: str, now: float) -> None:
        """The source is gone: the kind has ended, which is not logged."""
        run = self._runs.get(kind)
        if run is not None and run.ended_at is None:
            run.ended_at, run.end_is_said = now, True

    def due(self, now: float) -> list[Ended]:
        """What has ended by itself: by a minute of silence, or a while ago. To be called about once a second."""
        ended = []
        for kind, run in list(self._runs.items()):
            if run.ended_at is None:
                if not run.by_silence or now - run.last_at < EVERY_S:
                    continue
                del self._runs[kind]
                if run.reports > 1:
                    ended.append(Ended(kind, run.reports, run.last_at - run.began_at))
            elif now - run.ended_at >= _APART_S:
                del self._runs[kind]
                if not run.end_is_said:
                    ended.append(Ended(kind, run.reports, run.ended_at - run.began_at))
        return ended


def form_of(text: str) -> str:
    """The part of a text that stays the same when it is repeated: without numbers, ids, or remarks in brackets."""
    return _VARYING.sub("", text)


def client_form(text: str) -> str | None:
    """The facility and the cause of a line of the Kafka client; None for other lines."""
    found = _CLIENT_LINE.match(text)
    return None if found is None else f"{found[1]} {form_of(text).rpartition(': ')[2].strip()}"
