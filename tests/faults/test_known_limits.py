"""What at-least-once mode cannot hold: bytes that the network keeps (P15). Pinned, so that nobody believes otherwise.

A leader has sent record x of a key. The network has its bytes and delivers them late. The leader loses its lead, dead
or standing still; the next one finds x in the outbox, publishes it, purges it, and sends its successor y. Then the
network delivers: the broker cannot know that the sender no longer leads, and takes x once more, behind y. No rule of
ours can reach these bytes: term, trust, and the end of the old leader's processes all lie behind them. The bound D on
a delivery (P12) ends the sender's patience, not the network's.

What closes it is exactly-once mode: the take-over raises the epoch of each lane's transactional id, and the broker
refuses everything of an older one. Until then consumers that must not go back tell a repeat by its id.
"""

from __future__ import annotations

import pytest

from tests.support.families import QUICK, family
from tests.support.findings import repeats_by_record
from tests.support.harvesting import Scene
from tests.support.hooks import sender
from tests.support.proxy import Proxy
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]

OTHERS = ("a", "b", "c", "d")


@pytest.mark.parametrize("fate", ["killed", "frozen"])
def test_bytes_of_a_deposed_leader_arrive_after_the_successor_has_gone_on(
    scene: Scene, kafka: Proxy, fate: str
) -> None:
    """A repeat after a successor, of this one record; nothing is lost, and no other key is touched."""
    scene.plan.sign()
    with family(scene, "old", hooks=True, producer_kafka_config={"bootstrap.servers": kafka.address}, **QUICK) as old:
        old.wait_leads()
        scene.add(("k", "first"), *((key, "1") for key in OTHERS))  # connections and producer ids are made by now
        scene.wait_left()
        senders = old.shards
        with family(scene, "new", hooks=True, **QUICK) as new:
            kafka.freeze()
            (x,) = scene.add(("k", "late-x"))
            eventually(lambda: kafka.holds(b"late-x"), what="x on the network")
            if fate == "killed":
                old.kill()
            else:
                old.freeze()
            scene.wait_left(x)
            new.wait_leads()
            scene.add(("k", "then-y"), *((key, "2") for key in OTHERS))
            scene.wait_left()
            assert scene.published()["k"] == ["first", "late-x", "then-y"], "what follows needs y before the bytes"
            kafka.thaw()
            eventually(lambda: len(scene.published()["k"]) == 4, what="the bytes in the log")
            scene.add(("k", "z"))
            scene.wait_left()
            log = scene.log()
            assert scene.published() == {
                "k": ["first", "late-x", "then-y", "late-x", "z"],
                **{key: ["1", "2"] for key in OTHERS},
            }
            assert repeats_by_record(log) == {("k", "late-x"): 1}
            first, again = (sender(record.headers) for record in log if record.value == b"late-x")
            assert first in new.shards
            assert again in senders
            assert scene.quarantined() == {}
            new.stop()
