"""Serialisers, from an application's values to records, and the headers of CloudEvents (docs/writing.md).

    orders = Records(Json(), cloud_events=CloudEvents("/shop"))
    stasher.stash(connection, orders.make("orders", "42", {"total": 99}, type="shop.order.paid"))

This package needs nothing but Python. `harvester.serializers.msgspec` and `harvester.serializers.registry` need extras,
and are imported by their users.
"""

from __future__ import annotations

from harvester.serializers.plain import Bytes, Deserializer, Json, Serialized, Serializer, Text, Values
from harvester.serializers.records import CloudEvents, Records

__all__ = ["Bytes", "CloudEvents", "Deserializer", "Json", "Records", "Serialized", "Serializer", "Text", "Values"]
