"""Histories of `tests.support.relay_once` that chance hardly finds, told step by step."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.support.relay_actors import SimHarvester
from tests.support.relay_once import OnceHarvester, OnceShard, OnceWorld
from tests.support.relay_shard import Action, Note

_STEPS = 400
FIRST = ("lane 0", "lane 1")  # of the first shard; its first transaction is on the second


class Play:
    """A world with so many shards for each harvester, in which only those act that are told to."""

    def __init__(self, shards: int, others: int = 1, room: int = 10) -> None:
        # Four keys and none; room for so many records; marks of five rows, in the table; transactions of one
        # record, since there are no bytes left to choose by; progress names eight.
        few, more = min(2, room - 1), max(0, room - 3)
        self.world = OnceWorld(bytes([3, shards - 1, few, 4, 2, 5, 1, 3, 0, 5, 7, more, others - 1]))
        self._fair = random.Random(0)
        first, second = self.world.harvesters
        assert isinstance(first, OnceHarvester)
        self.first, self.second = first, second

    def row(self, record_id: int, key: bytes | None = None) -> int:
        """It is committed; returns what it is known by."""
        world = self.world
        world.table.last_value = record_id
        row = world._new_row(record_id, key)
        world.table.rows[record_id] = world.uids[row.uid] = row
        world.table.show(row)
        world._note_key(row)
        return row.uid

    def shard(self, harvester: SimHarvester, index: int) -> OnceShard:
        shard = harvester.shards[index]
        assert isinstance(shard, OnceShard)
        return shard

    def let(
        self, *who: str, until: Callable[[], object] = lambda: False, but: Callable[[Note], bool] = lambda _: False
    ) -> None:
        """These act ("A": the supervisor and its marker, "A0": a shard, "lane 1": Kafka), but for some actions."""
        for _ in range(_STEPS):
            actions = [(note, act) for note, act in self.world._ordinary() if note[0] in who and not but(note)]
            if until() or not actions:
                return
            note, act = self._fair.choice(actions)
            self._do(note, act)

    def one(self, *note: object) -> None:
        """This happens, if it can."""
        for found, act in self.world._ordinary():
            if found[: len(note)] == note:
                self._do(found, act)
                return

    def _do(self, note: Note, act: Action) -> None:
        self.world.now += 0.01
        self.world.trace.append((round(self.world.now, 2), *note))
        act()

    def lead(self, harvester: SimHarvester) -> None:
        """The group chooses this one."""
        self.one(harvester.name, "elected")

    def sends(self, shard: OnceShard, *who: str) -> None:
        """It asks for the commit of what it has, and nothing comes of that for the time being."""
        self.let(*who, shard.name, until=lambda: shard.at == "awaits the commit")
        assert shard.at == "awaits the commit"


def _is_purge(note: Note) -> bool:
    return note[1] == "purge of"


def a_shard_dies_before_anything_was_purged(play: Play) -> None:
    """P22: its successor has to learn of all transactions, of which two were on one lane."""
    rows = {play.row(number, b"k0") for number in (1, 2, 3)}
    play.lead(play.first)
    play.let("A", "A0", *FIRST, until=lambda: rows <= play.world.appended.keys(), but=_is_purge)
    play.shard(play.first, 0).kill()


def a_zombies_lane_belongs_to_no_shard_of_its_successor(play: Play) -> None:
    """P19: its transaction is still open when another one begins to mark."""
    uid = play.row(2)
    play.lead(play.first)
    play.sends(play.shard(play.first, 2), "A", "A0", "A1")
    play.first._be_zombie()
    play.lead(play.second)
    play.let("B", "B0", *FIRST, until=lambda: uid in play.world.appended)
    play.one("lane 5", "commits")


def a_lane_whose_shard_is_not_started_yet_has_a_transaction_open(play: Play) -> None:
    """P19: the record belongs to another shard of the successor."""
    uid = play.row(4)
    play.lead(play.first)
    play.sends(play.shard(play.first, 1), "A", "A0", "A2")
    play.first._be_zombie()
    play.lead(play.second)
    play.let("B", "B0", *FIRST, until=lambda: uid in play.world.appended)
    play.one("lane 3", "commits")


def a_zombie_opens_its_lane_again_behind_its_successor(play: Play) -> None:
    """P20: it has compared the term before that, and its queue holds what has been published and purged since."""
    first, second = play.row(1, b"k0"), play.row(2, b"k0")
    play.lead(play.first)
    zombie = play.shard(play.first, 0)
    play.sends(zombie, "A")
    play.let("A", "A0", until=lambda: zombie.batches.queued)
    zombie._doubt()
    play.let("A0", until=lambda: zombie.at == "fences lane 1")
    play.first._be_zombie()
    play.lead(play.second)
    everyone = {first, second, play.row(3, b"k1")}
    play.let("B", "B0", *FIRST, until=lambda: everyone <= play.world.appended.keys())
    play.let("B", "B0", until=lambda: not play.world.table.visible())
    play.let("A0", *FIRST)


def the_number_of_shards_changes_while_a_dead_ones_commit_is_on_its_way(play: Play) -> None:
    """P21: its record would go to another shard, behind whose lane nobody has looked."""
    uid = play.row(1)
    play.lead(play.first)
    shard = play.shard(play.first, 1)
    play.sends(shard, "A", "A0")
    shard.kill()
    machine, world = play.first.machine, play.world
    play.first._post("scale", lambda: machine.scale(1, 1e9, world.now))
    starting = ("A1", "ready")
    play.let("A", "A0", "A1", *FIRST, until=lambda: uid in world.appended, but=lambda note: note[:2] == starting)
    play.one("lane 3", "commits")


def a_commit_arrives_just_before_its_lane_is_fenced(play: Play) -> None:
    """P19: progress that was read before that does not name it."""
    play.row(1)
    play.lead(play.first)
    play.sends(play.shard(play.first, 0), "A")
    play.first._be_zombie()
    play.lead(play.second)
    successor = play.shard(play.second, 0)
    play.let("B", "B0", until=lambda: successor.at == "fences lane 1")
    play.one("lane 1", "commits")
    play.let("B", "B0", *FIRST, until=lambda: not play.world.table.visible())


def _refuses_the_first_of_two(play: Play) -> OnceShard:
    """Its quarantine is put off for as long as anything else can happen; then somebody raises the topic's limit."""
    refused, _following = play.row(1, b"k0"), play.row(2, b"k0")
    play.world.uids[refused].refused = True
    play.lead(play.first)
    shard = play.shard(play.first, 0)
    play.let("A", "A0", *FIRST, but=lambda note: note[1] == "quarantine of")
    assert shard.poison
    play.world.uids[refused].refused = False
    return shard


def a_record_is_taken_after_all_that_was_to_be_quarantined(play: Play) -> None:
    """P1, I2: the shard dies before the quarantine commits."""
    _refuses_the_first_of_two(play).kill()


def a_zombies_quarantine_comes_to_nothing(play: Play) -> None:
    """P5, I2: the term is another's, whose shards have not fenced the zombie's lane yet."""
    _refuses_the_first_of_two(play)
    play.first._be_zombie()
    play.lead(play.second)
    play.let("B", until=lambda: play.world.table.term == 2)
    play.let("A0", *FIRST)


def the_purge_of_a_keys_first_record_is_lost_with_the_server(play: Play) -> None:
    """P49: the survivor has both of its records, and progress, on either lane, names the second one alone."""
    first, between, second = play.row(1, b"k0"), play.row(2, b"k1"), play.row(3, b"k0")
    world, rows = play.world, play.world.uids
    play.lead(play.first)
    play.let("A", "A0", *FIRST, until=lambda: first in world.appended, but=_is_purge)
    play.let("A0", until=lambda: rows[first].gone, but=lambda note: note[1] not in ("hears of its commit", "purge of"))
    play.one("A0", "purge of", [1], "returns")
    before = len(world.table.events)
    play.let("A", "A0", *FIRST, until=lambda: {between, second} <= world.appended.keys(), but=_is_purge)
    assert len(world.table.events) == before
    world.replace_server(1)


def a_key_is_on_both_lanes_when_the_server_changes(play: Play) -> None:
    """P49: the survivor lacks nothing, and the lane that is opened first has the younger one of its records."""
    rows = {play.row(1, b"k0"), play.row(2, b"k0")}
    play.lead(play.first)
    play.let("A", "A0", *FIRST, until=lambda: rows <= play.world.appended.keys(), but=_is_purge)
    play.world.replace_server(0)


def the_term_is_taken_while_commits_are_unclear(play: Play) -> None:
    """The shard cannot open its lane any more, and the supervisor has no room for a mark that would show it why."""
    play.row(1, b"k0")
    play.row(2, b"k0")
    play.lead(play.first)
    shard = play.shard(play.first, 0)
    play.sends(shard, "A")
    play.let("A")
    play.world._usurp()
    shard._doubt()


# What happens, and how many shards the first harvester and the second one have.
SCENES: list[tuple[Callable[[Play], None], int, int]] = [
    (a_shard_dies_before_anything_was_purged, 1, 1),
    (a_zombies_lane_belongs_to_no_shard_of_its_successor, 3, 1),
    (a_lane_whose_shard_is_not_started_yet_has_a_transaction_open, 3, 2),
    (a_zombie_opens_its_lane_again_behind_its_successor, 1, 1),
    (the_number_of_shards_changes_while_a_dead_ones_commit_is_on_its_way, 2, 1),
    (a_commit_arrives_just_before_its_lane_is_fenced, 1, 1),
    (a_record_is_taken_after_all_that_was_to_be_quarantined, 1, 1),
    (a_zombies_quarantine_comes_to_nothing, 1, 1),
    (a_key_is_on_both_lanes_when_the_server_changes, 1, 1),
    (the_term_is_taken_while_commits_are_unclear, 1, 1),
]


# Those after which records are repeated.
LOSSY: list[tuple[Callable[[Play], None], int, int]] = [
    (the_purge_of_a_keys_first_record_is_lost_with_the_server, 1, 1),
]

ROOM: dict[Callable[[Play], None], int] = {the_term_is_taken_while_commits_are_unclear: 1}


def perform(scene: Callable[[Play], None]) -> OnceWorld:
    """The scene, then calm; raises where something does not hold."""
    shards, others = next((own, other) for which, own, other in (*SCENES, *LOSSY) if which is scene)
    play = Play(shards, others, ROOM.get(scene, 10))
    scene(play)
    play.world.calm()
    return play.world
