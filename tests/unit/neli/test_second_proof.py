"""What an accepted commit tells of rebalances, on a connection of any delays: never more than is true.

The world is Kafka's client and coordinator as far as it matters: one connection with requests and answers in order,
group heartbeats of which one is under way at a time, a late JoinGroup after a heartbeat with a bad answer, commits.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harvester.neli.election import ElectionTiming
from harvester.neli.second_proof import Stability
from tests.support.longs import some_of

G, DELAY = 0.5, 2.0  # group heartbeats; the client's delay before it joins again
TIMING = ElectionTiming(
    heartbeat_interval_s=0.3,
    heartbeat_timeout_s=3.0,
    session_limit_s=3.0,
    rebalance_limit_s=8.0,
    revoke_limit_s=10.0,
    missed_heartbeats_s=2 * (G + 1.0),
    rejoin_delay_s=DELAY,
)


class Broken(AssertionError):
    """A commit that was accepted during a rebalance claims that it began later."""


class Connection:
    """The world; each byte lets something happen."""

    def __init__(self) -> None:
        self.now = 100.0
        self.stability = Stability(TIMING, self.now)
        self.requests: deque[tuple[str, float, float]] = deque()  # kind, sent at, what the commit claims
        self.answers: deque[tuple[str, float, float, bool]] = deque()
        self.under_way: set[str] = set()
        self.heartbeat_at = self.now
        self.rebalance_began: float | None = None
        self.rejoins_at: float | None = None
        self.joined = False
        self.accepted_during = 0
        self.best_claim = 0.0

    def run(self, data: bytes) -> Connection:
        for byte in data:
            self._act(byte % 8, byte // 8)
            if self.joined:
                break
        return self

    def _act(self, what: int, how: int) -> None:
        match what:
            case 0 | 1:
                self._pass(0.05 * (1 + how % 16))
            case 2 if "commit" not in self.under_way:
                self._send("commit", self.stability.at(self.now))
            case 3 | 4 if self.requests:
                self._arrive()
            case 5 | 6 if self.answers:
                self._answer()
            case 7 if self.rebalance_began is None and how == 0:
                self.rebalance_began = self.now

    def _pass(self, seconds: float) -> None:
        end = self.now + seconds
        while self.heartbeat_at <= end and "heartbeat" not in self.under_way and self.rejoins_at is None:
            self.now = max(self.now, self.heartbeat_at)
            self._send("heartbeat", 0.0)
            self.heartbeat_at = self.now + G
        if self.rejoins_at is not None and self.rejoins_at <= end:
            self.joined = True  # what is sent from now on waits behind the JoinGroup
        self.now = end

    def _send(self, kind: str, claim: float) -> None:
        self.under_way.add(kind)
        self.requests.append((kind, self.now, claim))

    def _arrive(self) -> None:
        kind, sent_at, claim = self.requests.popleft()
        rebalances = self.rebalance_began is not None
        if kind == "commit" and self.rebalance_began is not None:
            self.accepted_during += 1
            if claim > self.rebalance_began:
                raise Broken(f"{claim} > {self.rebalance_began}")
        self.answers.append((kind, sent_at, claim, rebalances))

    def _answer(self) -> None:
        kind, sent_at, claim, rebalances = self.answers.popleft()
        self.under_way.discard(kind)
        if kind == "commit":
            self.best_claim = max(self.best_claim, claim)
            self.stability.accepted(sent_at, self.now)
        elif rebalances:
            self.rejoins_at = self.now + DELAY


@settings(max_examples=some_of(200), deadline=None)
@given(st.binary(max_size=800))
def test_no_commit_claims_too_much(data: bytes) -> None:
    Connection().run(data)


def histories(count: int) -> int:
    return sum(Connection().run(random.Random(seed).randbytes(1500)).accepted_during for seed in range(count))


def test_long_histories_with_commits_during_rebalances() -> None:
    assert histories(300) > 100


def test_on_a_quick_connection_the_claim_is_hardly_older_than_it_has_to_be() -> None:
    stability = Stability(TIMING, 100.0)
    now = 100.0
    for _ in range(100):
        claim = stability.at(now)
        stability.accepted(now, now + 0.01)
        now += 0.15
    assert now - claim < TIMING.missed_heartbeats_s + TIMING.rejoin_delay_s + 2 * TIMING.heartbeat_interval_s


# -- a test that cannot fail is a defect


def _at_once(patch: pytest.MonkeyPatch) -> None:
    """As if the client joined again as soon as it hears of a rebalance."""
    inner = Stability.__init__

    def hasty(self: Stability, timing: ElectionTiming, now: float) -> None:
        inner(self, timing, now)
        self._delay_s = -DELAY

    patch.setattr(Stability, "__init__", hasty)


def _own_sending(patch: pytest.MonkeyPatch) -> None:
    """As if each commit spoke for the moment of its own sending."""
    patch.setattr(Stability, "at", lambda self, now: now)


@pytest.mark.parametrize("mutation", [_at_once, _own_sending])
def test_the_world_notices(mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    with pytest.raises(Broken):
        histories(2000)
