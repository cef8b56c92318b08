"""What a serialiser is: anything with a media type and one method."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeVar

T_contra = TypeVar("T_contra", contravariant=True)


class Serialized(NamedTuple):
    """A value as a record holds it, with headers that readers need to understand it."""

    value: str | bytes
    headers: tuple[tuple[str, str], ...] = ()


class Serializer(Protocol[T_contra]):
    """Turns values of one kind into what Kafka's readers expect.

    It is never asked about None, which is a tombstone whatever the format.
    """

    @property
    def content_type(self) -> str:
        """The media type of what it writes."""

    def serialize(self, topic: str, value: T_contra) -> Serialized:
        """Write one value; raises SerializationFailed. `topic` is where a registry of schemas files it."""
