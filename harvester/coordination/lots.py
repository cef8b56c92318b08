"""Which lot is handed out next: each place in turn, as its claim allows. Thin.

At least once all that was fetched of a place is a lot, as far as there is room for it (P43: `max_open_records`); it is
handed out until the claim has to be renewed. At most once
a lot is a batch that is ours for ever. A batch is proposed while the one before it is in hand, so that nobody waits for
the coordination topic, and not earlier: what dies with the process is the rest of one batch of a place, and the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from harvester.clock import clock_s
from harvester.coordination.consumer_settings import ConsumerSettings
from harvester.coordination.lot import NOTHING, Lot
from harvester.coordination.messages import Place
from harvester.coordination.session import Session
from harvester.coordination.signals import Fetched

_OPEN_S = 0.1  # how long a lot is handed out before all else is looked after


class Lots:
    """See the module's text. Belongs to the consumer's thread."""

    def __init__(self, settings: ConsumerSettings, session: Session, is_paused: Callable[[Place], bool]) -> None:
        self._settings, self._session, self._is_paused = settings, session, is_paused

    def after(self, before: Lot) -> Lot:
        """The next one; of the one before, what was not handed out comes again. An empty one if there is none."""
        now = clock_s()
        with self._session.lock:
            if self._settings.at_most_once:
                lot = self._owned(before)
                self._propose(now)
            else:
                lot = self._held(before, now)
            if lot is not NOTHING:
                lot.until = min(lot.until, now + _OPEN_S)
        return lot

    def _held(self, before: Lot, now: float) -> Lot:
        """At least once."""
        session = self._session
        hands = session.hands.get(before.place)
        if hands is not None:
            hands.close_lot()
        for place in sorted(session.hands, key=lambda place: (place <= before.place, place)):
            hands = session.hands[place]
            until = session.holding(place).hand_out_until(self._settings.pace)
            room = self._settings.max_open_records - hands.open_records
            if hands.fetched and room > 0 and now < until and not self._is_paused(place):
                lot = hands.open_lot(room)
                lot.until = until
                return lot
        return NOTHING

    def _owned(self, before: Lot) -> Lot:
        """At most once."""
        session = self._session
        hands = session.hands.get(before.place)
        if hands is not None and hands.lot is before:
            left = hands.lay_down()
            if hands.stopping_at is not None:
                left = None  # it is given back
        else:  # the claim is lost: what is ours stays ours, but for what was given back
            left = Lot(before.place, before.rest) if before.rest else None
        if left is not None:
            session.owned.appendleft(left)
        for lot in tuple(session.owned):
            if not self._is_paused(lot.place):
                session.owned.remove(lot)
                lot.until = math.inf
                hands = session.hands.get(lot.place)
                if hands is not None and lot in hands.owned:
                    hands.lot = lot
                return lot
        return NOTHING

    def _propose(self, now: float) -> None:
        """At most once: of each place a batch, if none waits already."""
        session = self._session
        waiting = {lot.place for lot in session.owned}
        for place, hands in tuple(session.hands.items()):
            if hands.proposed or place in waiting or self._is_paused(place):
                continue
            if not session.holding(place).may_fetch(now, self._settings.pace):
                continue
            last_offset = hands.propose(self._settings.batch_records)
            if last_offset is not None:
                session.tell(place, Fetched(last_offset))
                if session.holding(place).batch is None:  # nothing came of it
                    hands.proposed = 0
