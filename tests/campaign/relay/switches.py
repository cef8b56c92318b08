"""Faults of configuration: another harvester takes a place, which delivers otherwise or has other shards."""

from __future__ import annotations

import random

from .field import Field


def switch(field: Field, kind: str, rng: random.Random) -> str | None:
    """Stop one in good order, or kill it, and start its successor, which is set up otherwise."""
    process = field.pick(rng)
    if process is None:
        return None
    setup = process.setup
    if kind.endswith("mode"):
        setup = setup.other_mode()
    if kind.endswith("shards") or rng.random() < 0.5:
        setup = setup.other_shards(field.shards, rng)
    field.setups[process.slot] = setup
    if kind.startswith("kill"):
        field.kill(process)
    else:
        field.stop(process)
    field.start(process.slot)
    return f"{process.name} ({process.setup}) gives way to {setup}"
