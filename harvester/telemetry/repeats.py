"""Decides which of many like lines are worth saying. Pure.

A server that is away makes every part of a harvester report it again and again, and its clients' libraries too. What is
said is one line when that begins, one a minute with the number of reports, and one when it ends:

    quiet ──report──▶ begun: said ──report──▶ counted, said once a minute ──end, or a minute of silence──▶ ended: said

Reports have a *kind*, which begins and ends, and a *form*: what is reported, without its figures. A form that is new
while its kind goes on is said as well, up to a bound, since it may name another cause. What ends and begins again
within a few seconds has not ended.
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
    """`reports`: of this kind in all, over `lasted_s`."""

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
    ended_at: float | None = None  # None while it goes on
    end_is_said: bool = False
    comes_and_goes: bool = False  # its end was said, and it was not the end


class Repeats:
    """Not thread-safe: whoever keeps it has a lock. All times are readings of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}

    def report(self, kind: str, form: str, now: float, *, by_silence: bool = False) -> int | None:
        """How many reports that were not said this one stands for, if it is worth a line; else None.

        `by_silence`: nobody calls `end` for this kind. It ends with a minute in which nothing is reported.
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
        """Nothing of this kind is wrong any more. None where that is not worth a line, now or at all."""
        run = self._runs.get(kind)
        if run is None or run.ended_at is not None:
            return None
        run.ended_at = now
        if run.comes_and_goes:
            return None  # it comes and goes: `due` says when it has stayed away
        run.end_is_said = True
        return Ended(kind, run.reports, now - run.began_at)

    def forget(self, kind: str, now: float) -> None:
        """Whoever reported it is gone: it has ended, and nothing is said about that."""
        run = self._runs.get(kind)
        if run is not None and run.ended_at is None:
            run.ended_at, run.end_is_said = now, True

    def due(self, now: float) -> list[Ended]:
        """What has ended without a word: by a minute of silence, or a while ago. Ask about once a second."""
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
    """What of a text stays the same when it is said again: no figures, ids, or remarks in brackets."""
    return _VARYING.sub("", text)


def client_form(text: str) -> str | None:
    """The facility and the cause, if this is a line of the Kafka client; None otherwise."""
    found = _CLIENT_LINE.match(text)
    return None if found is None else f"{found[1]} {form_of(text).rpartition(': ')[2].strip()}"
