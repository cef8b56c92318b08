"""Lanes of a leader group on the real broker: `pytest_plugins = ["tests.support.lane_scene"]`."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import Producer

from harvester.delivery.lane import Lanes, LaneSettings
from tests.conftest import MakeTopic

from .servers import Servers


@pytest.fixture
def options(servers: Servers) -> dict[str, Any]:
    """Of any client."""
    return {"bootstrap.servers": servers.bootstrap, "broker.address.family": "v4"}


@pytest.fixture
def lane_settings(options: dict[str, Any], make_topic: MakeTopic, group: str) -> LaneSettings:
    """A group with a progress topic of four lanes."""
    producer = {**options, "message.timeout.ms": 2_000, "transaction.timeout.ms": 10_000, "log_level": "0"}
    return LaneSettings(group, make_topic(4), options, producer)


@pytest.fixture
def lanes(lane_settings: LaneSettings) -> Lanes:
    return Lanes(lane_settings, Producer)
