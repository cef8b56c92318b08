"""A Schema Registry, from which a job reads the schemas of framed values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harvester.pipeline.errors import PipelineError, RegistryUnavailable

_NOT_FOUND = (40401, 40402, 40403)
"""The registry's own codes. Any other 404 is of something that is no registry."""


@dataclass(frozen=True, slots=True)
class WrittenSchema:
    """A schema with which values were written. `kind`: AVRO, JSON or PROTOBUF. `refers`: it needs other schemas."""

    kind: str
    text: str
    refers: bool = False


class SchemaRegistry:
    """Asks the registry each time. `options` are those of confluent_kafka's SchemaRegistryClient.

    Raises ValueError for wrong options, PipelineError if the client is not installed.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        try:
            from confluent_kafka.schema_registry import SchemaRegistryClient
        except ImportError as error:
            raise PipelineError(
                f"the client of the schema registry is not installed: {error}",
                hint="pip install 'outbox-harvester[spark,avro]'",
            ) from error
        try:
            self._client = SchemaRegistryClient(dict(options))
        except TypeError as error:
            raise ValueError(str(error)) from error
        self.url = re.sub(r"//[^/@]*@", "//", str(options["url"]))
        self.failure: RegistryUnavailable | None = None
        """The last one, which comes out of a stream as an error of Spark."""

    def schema(self, number: int) -> WrittenSchema | None:
        """The schema with this id, None if the registry has none. Raises RegistryUnavailable."""
        return self._asked(lambda: self._client.get_schema(number))

    def latest(self, subject: str) -> WrittenSchema | None:
        """The latest schema of a subject. Otherwise as `schema`."""
        return self._asked(lambda: self._client.get_latest_version(subject).schema)

    def _asked(self, ask: Any) -> WrittenSchema | None:
        from confluent_kafka.schema_registry.error import SchemaRegistryError

        try:
            found = ask()
        except Exception as error:  # HTTP, TLS, tokens and JSON have no common exception class
            if isinstance(error, SchemaRegistryError) and error.error_code in _NOT_FOUND:
                return None
            self.failure = RegistryUnavailable(
                f"the schema registry {self.url} gives no schemas: {error}",
                hint="nothing is lost: once it answers, start the job again; it continues where it stopped",
            )
            raise self.failure from error
        return WrittenSchema(found.schema_type or "AVRO", found.schema_str, bool(found.references))
