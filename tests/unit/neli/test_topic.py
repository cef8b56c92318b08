"""What becomes of a leader topic that no controller creates."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from harvester import bounds
from harvester.neli import topic as leader_topic


class SilentController:
    """An admin client whose brokers answer for metadata, and never for topics."""

    def __init__(self, _options: Any) -> None: ...

    def list_topics(self, timeout: float) -> Any:
        return SimpleNamespace(topics={})

    def create_topics(self, topics: list[Any], operation_timeout: float) -> dict[str, Future[None]]:
        return {topics[0].topic: Future()}

    def poll(self, timeout: float) -> None: ...


def test_where_no_thread_starts_any_more_the_caller_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 starts none once the main thread has ended."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(leader_topic, "ensure_leader_topic", lambda *_: "missing")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert leader_topic.ensuring_leader_topic("g.neli", {}, print, bool).result(0) == "missing"


def test_a_controller_that_does_not_answer_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "AdminClient", SilentController)
    monkeypatch.setattr(leader_topic, "_TIMEOUT_S", 0.05)
    found = leader_topic.ensuring_leader_topic("g.neli", {"bootstrap.servers": "one:9092"}, print, bool)
    assert found.result(5) == "Kafka at one:9092 does not answer: no answer within 0.1 s"
