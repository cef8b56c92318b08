"""A Schema Registry, from which a job reads the schemas of framed values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harvester.pipeline.errors import PipelineError, RegistryUnavailable

_SERIALIZED = "serialized"
"""The format of a Protobuf schema as a descriptor of its file."""
_NOT_FOUND = (40401, 40402, 40403)
"""The registry's own codes. Any other 404 is of something that is no registry."""


@dataclass(frozen=True, slots=True)
class WrittenSchema:
    """A schema with which values were written. `kind`: AVRO, JSON or PROTOBUF. `refers`: it needs other schemas.

    `text` of PROTOBUF: the descriptor of its file, in base64. `imports`: those of the schemas to which it refers,
    directly or not, by the names under which they are imported; of other kinds none are asked for.
    """

    kind: str
    text: str
    refers: bool = False
    imports: Mapping[str, str] = field(default_factory=dict)


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
            # A client remembers a schema, but not in which format it asked for it.
            self._client, self._of_protobuf = (SchemaRegistryClient(dict(options)) for _ in range(2))
        except TypeError as error:
            raise ValueError(str(error)) from error
        self.url = re.sub(r"//[^/@]*@", "//", str(options["url"]))
        self.failure: RegistryUnavailable | None = None
        """The last one, which comes out of a stream as an error of Spark."""

    def schema(self, number: int) -> WrittenSchema | None:
        """The schema with this id, None if the registry has none. Raises RegistryUnavailable."""
        return self._asked(lambda client, format_: client.get_schema(number, fmt=format_))

    def latest(self, subject: str) -> WrittenSchema | None:
        """The latest schema of a subject. Otherwise as `schema`."""
        return self._asked(lambda client, format_: client.get_latest_version(subject, fmt=format_).schema)

    def _asked(self, ask: Callable[[Any, str | None], Any]) -> WrittenSchema | None:
        from confluent_kafka.schema_registry.error import SchemaRegistryError

        try:
            found, imports = ask(self._client, None), dict[str, str]()
            if found.schema_type == "PROTOBUF":
                found = ask(self._of_protobuf, _SERIALIZED)
                self._follow(found, imports)
        except Exception as error:  # HTTP, TLS, tokens and JSON have no common exception class
            if isinstance(error, SchemaRegistryError) and error.error_code in _NOT_FOUND:
                return None
            self.failure = RegistryUnavailable(
                f"the schema registry {self.url} gives no schemas: {error}",
                hint="nothing is lost: once it answers, start the job again; it continues where it stopped",
            )
            raise self.failure from error
        return WrittenSchema(found.schema_type or "AVRO", found.schema_str, bool(found.references), imports)

    def _follow(self, found: Any, imports: dict[str, str]) -> None:
        """Adds the schemas of Protobuf to which this one refers."""
        for one in found.references or ():
            if one.name not in imports:
                there = self._of_protobuf.get_version(one.subject, one.version, fmt=_SERIALIZED).schema
                imports[one.name] = str(there.schema_str)
                self._follow(there, imports)
