"""Topics for tests."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from .servers import Servers
from .wait import eventually


class Topics:
    """Makes topics, and on somebody else's broker removes them again."""

    def __init__(self, servers: Servers) -> None:
        self._admin = AdminClient(
            {"bootstrap.servers": servers.bootstrap, "broker.address.family": "v4", "log_level": 3}
        )
        self._remove = servers.given

    def make(self, partitions: int = 4, config: Mapping[str, str] | None = None) -> str:
        """A new topic's name, once every client can see it. `config` are topic settings of the broker."""
        name = f"test-{uuid.uuid4().hex[:12]}"
        kept = {"retention.ms": "-1"}  # else the broker removes, every five minutes, records whose timestamp is old
        created = self._admin.create_topics(
            [NewTopic(name, num_partitions=partitions, config=kept | dict(config or {}))]
        )
        created[name].result(timeout=30)
        eventually(lambda: self._visible(name) == partitions, what=f"topic {name} visible")
        return name

    def configure(self, name: str, setting: str, value: str) -> None:
        """Change a setting of the topic."""
        change = ConfigEntry(setting, value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=[change])
        for done in self._admin.incremental_alter_configs([resource]).values():
            done.result(timeout=30)

    def remove(self, names: list[str]) -> None:
        """Delete them; a broker that goes away with the run is spared the work."""
        if self._remove and names:
            for done in self._admin.delete_topics(names).values():
                done.result(timeout=30)

    def _visible(self, name: str) -> int:
        return len(self._admin.list_topics(name, timeout=10).topics[name].partitions)
