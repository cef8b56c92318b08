"""The judge of repeats: each needs a reason, and must have been sent by a leader of whom repeats are allowed. Pure.

What a leader in exactly-once mode has committed never comes again, whatever befalls whom (I6). What one in
at-least-once mode has sent may, because of a fault that can cause it (I8): one that struck the process which sent the
record, while that one led, before the repeat and at most `unclear_s` before the first delivery, and no more often than
may be in flight, of each key one. Where both lead in turn, the time of the first delivery tells who sent it: a leader
sends nothing before it says that it leads, and what one in at-least-once mode left on the wire has expired before one
in the other mode leads (P24).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable

from .history import Delivered, Fault, History
from .setup import BOTH, EXACTLY_ONCE
from .violation import EXAMPLES, Violation, name

_ONCE = "sent exactly once"


def explain(history: History) -> tuple[Counter[str], list[Violation]]:
    """How many repeats there are for each reason, and what is not allowed of them."""
    limits = history.limits
    guilty = sorted((fault for fault in history.faults if fault.repeats), key=lambda fault: fault.began)
    losses = [led.ended for led in history.led]
    was_once = _sent_once(history)
    last: dict[tuple[str, int], Delivered] = {}
    reasons: Counter[str] = Counter()
    by_fault: Counter[Fault] = Counter()
    violations = []
    for each in history.delivered:
        before = last.get((each.key, each.seq))
        last[each.key, each.seq] = each
        if before is None:
            continue
        fault = _reason(history, guilty, before.at, each.at)
        reason = _ONCE if was_once(before.at) else fault.kind if fault else "none"
        reasons[reason] += 1
        after = f"{name(each)} came again after {each.at - before.at:.3f} s"
        if reason == _ONCE:
            if reasons[reason] <= EXAMPLES:
                violations.append(Violation("I6", f"{after}, although it was {_ONCE}"))
        elif fault is not None:
            by_fault[fault] += 1
        elif reasons[reason] <= EXAMPLES:
            violations.append(Violation("I8", f"{after}, and no fault explains it"))
    most = min(limits.cap, len({each.key for each in history.delivered}))  # of a key, one record is on its way
    for fault, count in by_fault.items():
        lost = sum(fault.began <= at <= fault.ended + limits.recovery_s for at in losses)
        if count > most * (lost + 1):
            violations.append(Violation("I8", f"{count} repeats because of {fault.kind} of {fault.target}"))
    return reasons, violations


def _sent_once(history: History) -> Callable[[float], bool]:
    """Whether what was appended at a time was sent by a leader in exactly-once mode."""
    if history.delivery != BOTH:
        always = history.delivery == EXACTLY_ONCE
        return lambda _at: always
    led = sorted(history.led, key=lambda each: each.began)
    began = [each.began for each in led]

    def sent_once(at: float) -> bool:
        place = bisect_right(began, at + history.limits.clock_slack_s)
        return place > 0 and led[place - 1].delivery == EXACTLY_ONCE

    return sent_once


def _reason(history: History, guilty: list[Fault], first_at: float, again_at: float) -> Fault | None:
    """The latest fault that can be the reason why what was delivered first came again."""
    unclear_s = history.limits.unclear_s
    senders = {led.name for led in history.led if led.began <= first_at <= led.ended + unclear_s}
    fitting = (
        fault
        for fault in guilty
        if fault.began <= again_at
        and first_at <= fault.ended + unclear_s
        and (not fault.names or not senders.isdisjoint(fault.names))
    )
    return max(fitting, key=lambda fault: fault.began, default=None)
