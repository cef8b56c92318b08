"""What is logged and shown of troubles: that they are over is said only where something has recovered."""

from __future__ import annotations

import logging

import pytest

from harvester.announcer import Announcer
from harvester.config import Config
from harvester.status_recorder import StatusRecorder


@pytest.fixture
def recorder(caplog: pytest.LogCaptureFixture) -> StatusRecorder:
    caplog.set_level(logging.INFO)
    log = logging.getLogger("test")
    return StatusRecorder(Config(leader_group_id="any"), Announcer(None, log), log)


def test_a_trouble_that_ends_has_recovered(recorder: StatusRecorder, caplog: pytest.LogCaptureFixture) -> None:
    recorder.trouble("kafka", "no broker answers")
    assert recorder.problem() == "kafka: no broker answers"
    recorder.trouble("kafka", None)
    assert recorder.problem() is None
    assert caplog.messages == ["kafka: no broker answers", "kafka: recovered after 0 s"]


def test_what_is_gone_has_not_recovered(recorder: StatusRecorder, caplog: pytest.LogCaptureFixture) -> None:
    recorder.trouble("shard 3", "the database is away")
    recorder.forget("shard 3")
    recorder.look()
    assert recorder.problem() is None
    assert caplog.messages == ["shard 3: the database is away"]


def test_a_wait_that_is_over_has_not_recovered(recorder: StatusRecorder, caplog: pytest.LogCaptureFixture) -> None:
    recorder.trouble("term", "waits until the outbox is free")
    recorder.trouble("term", None)
    assert caplog.messages[-1] == "term: the wait is over after 0 s"


def test_one_outage_of_a_server_is_one_trouble(recorder: StatusRecorder) -> None:
    """Each shard says it in several ways, one after the other."""
    for text in ("terminating connection", "Connection refused", "the database system is starting up"):
        for shard in range(8):
            recorder.trouble(f"shard {shard}", text)
    for shard in range(8):
        recorder.trouble(f"shard {shard}", None)
    assert recorder.totals([]).troubles == {"shard": 1}
    recorder.trouble("shard 2", "Connection refused")
    assert recorder.totals([]).troubles == {"shard": 2}
