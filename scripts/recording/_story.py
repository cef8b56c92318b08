"""The session: an operator's commands and keys, and the expected screen after each.

No step waits for a fixed time: each continues once the screen shows its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from rich.text import Text

from ._place import NAME, Place
from ._tmux import Tmux, Unseen, Window

Keep = Callable[[str, str, Text], None]  # name, title, screen

_GIVES_UP_S = 30.0  # for a command to end, once something is wrong
_QUARANTINED = "^publishes; 1 record is in quarantine"
_ALL_RATES = r"^ *[1-9][\d,.k]*/s "


class Story:
    """`keep` receives each screen once it is as expected."""

    def __init__(self, tmux: Tmux, place: Place, keep: Keep) -> None:
        self._tmux, self._place, self._keep = tmux, place, keep

    def play(self) -> None:
        """Raises Unseen at the first screen that is not as expected."""
        self._ask("init", "harvester init", r'^created table "outbox"$')
        self._ask("init-again", "harvester init", "nothing to do: the schema is complete")
        with ExitStack() as later:
            with self._running("harvester start --shards 8", 0) as relay:
                relay.see(rf"^{NAME}  LEADING for", "8: 8 ready", "all is well")
                orders = self._place.orders
                writer = f"harvester pump --topic {orders} --records 1000000 --keys 500 --rate 250 --writers 2"
                with self._running(writer, 130):
                    self._under_load(relay)
                self._see("drained", relay, "^backlog empty", r"^in flight .* 0 / 1,000")
                watch = later.enter_context(self._running("harvester watch", 0, "q"))
                self._redrive(watch)
            self._see("start-ended", relay, rf"{NAME} stopped$", rf"Z {NAME} stopped .*delivered=")
            self._see("watch-ended", watch, "has ended|no harvester")
        self._ask("verdict", "harvester verify", "Nothing is lost or out of order")

    def _under_load(self, relay: Window) -> None:
        self._see("start", relay, _ALL_RATES, r"delivered [1-9]\d{0,2},\d{3}")
        with self._running("harvester watch", 0, "q") as watch:
            self._see("watch", watch, rf"^{NAME}  LEADING for", "8: 8 ready", "p pause", _ALL_RATES)
            watch.press("p")
            self._see("watch-paused", watch, "PAUSED for")
            self._see("start-paused", relay, "PAUSED for", "leading, but marks nothing until resumed")
            self._scale_by_key(watch, "+", 9)
            self._scale_by_key(watch, "-", 8)
            watch.press("p")
            self._see("watch-resumed", watch, "LEADING for", _ALL_RATES)
            self._ask("scale", "harvester scale 6 --within 60", f"{NAME}: 6 shards instead of 8")
            self._see("start-scaled", relay, "6: 6 ready", _ALL_RATES)
            watch.press("3")
            self._see("watch-shard", watch, "── shard 3 ──")
            self._place.insert_invoice()
            watch.press("d")
            self._see("watch-quarantine", watch, "── quarantine ──", _QUARANTINED, "process since it started: 1$")
        self._see("dashboard", relay, _QUARANTINED, "LEADING for", _ALL_RATES)

    def _scale_by_key(self, watch: Window, key: str, shards: int) -> None:
        """A busy machine may refuse a key, which is then pressed again."""
        words = f"changing to {shards} shards: "
        watch.press(key)
        while f"{words}done" not in (seen := watch.see(f"{words}(?!…)")).plain:
            watch.press("Escape")
            watch.see("p pause")
            watch.press(key)
        self._keep(f"watch-{shards}-shards", "harvester watch", seen)
        watch.see(f"{shards}: {shards} ready")

    def _redrive(self, watch: Window) -> None:
        watch.see(f"^{NAME}  LEADING for")  # before it has heard of the harvester, it has nothing to show for a key
        watch.press("d")
        self._see("watch-quarantine-before", watch, "in the quarantine table now: 1$")
        self._ask("dead-list", "harvester dead list", r"invoices-\w+ +customer-42 ", "MSG_SIZE_TOO_LARGE")
        self._place.permit_large_invoices()
        before = self._place.published_invoices()
        self._ask("dead-redrive", "harvester dead redrive --all --yes", "1 record put back")
        self._ask("dead-list-empty", "harvester dead list", "no record matches")
        self._see("watch-quarantine-after", watch, "in the quarantine table now: 0$", "^backlog empty")
        more = self._place.published_invoices() - before
        _require(more == 1, f"the topic has {more} records more than before the redrive", watch)

    # -- steps

    def _see(self, name: str, window: Window, *patterns: str) -> None:
        title = "harvester watch" if name.startswith("watch") else "harvester start --shards 8"
        self._keep(name, title, window.see(*patterns))

    def _ask(self, name: str, command: str, *patterns: str) -> None:
        """Runs a command that must end by itself with exit code 0."""
        window = self._tmux.window()
        code = window.wait_for_prompt(window.type(command))
        seen = window.see(*patterns)
        _require(code == 0, f"`{command}` ended with {code}", window)
        self._keep(name, command, seen)

    @contextmanager
    def _running(self, command: str, code: int, key: str = "C-c") -> Iterator[Window]:
        """Runs a command until this key ends it; checks its exit code, and that it restores the terminal."""
        window = self._tmux.window()
        before = window.type(command)
        try:
            yield window
        except BaseException:
            with suppress(Unseen):
                window.press(key)
                window.wait_for_prompt(before, _GIVES_UP_S)
            raise
        window.press(key)
        ended = window.wait_for_prompt(before)
        _require(ended == code, f"`{command}` ended with {ended} instead of {code}", window)
        _require(not window.is_alternate(), f"`{command}` left the terminal to nobody", window)


def _require(holds: bool, told: str, window: Window) -> None:
    if not holds:
        raise Unseen(f"{told}:\n{window.screen().plain}")
