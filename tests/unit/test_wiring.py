"""What is said while a harvester is put together, before anything is connected."""

from __future__ import annotations

import logging
import os

import pytest

from harvester import Config, FakeGroup
from harvester.announcer import Announcer
from harvester.status_recorder import StatusRecorder
from harvester.wiring import assemble


class Nobody:
    """A host that is told nothing."""

    def emptied(self) -> None:
        raise AssertionError

    def fail(self, error: BaseException) -> None:
        raise error


@pytest.mark.parametrize(("shards", "warned"), [(8, False), (9, True)])
def test_more_than_four_shards_for_each_core_are_warned_of(
    shards: int, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    config = Config(leader_group_id="g", limits={"shards": shards})
    logger = logging.getLogger("test.assembly")
    announcer = Announcer(None, logger)
    with caplog.at_level(logging.WARNING, logger="test.assembly"):
        assemble(
            config,
            group=FakeGroup(),
            announcer=announcer,
            recorder=StatusRecorder(config, announcer, logger),
            host=Nobody(),
            log_of=lambda _shard: logger,
        )
    said = [record.getMessage() for record in caplog.records if "shards on 2 cores" in record.getMessage()]
    assert bool(said) is warned, caplog.text
