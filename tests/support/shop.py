"""Messages of Protobuf, made without a compiler: orders with everything that a field can be, and what they import."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

from google.protobuf import duration_pb2, struct_pb2, text_format, timestamp_pb2, wrappers_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_ITEM = """
name: "shop/item.proto" package: "shop" syntax: "proto3"
message_type { name: "Item" field { name: "sku" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL } }
"""
_ORDER = """
name: "shop/order.proto" package: "shop" syntax: "proto3"
dependency: "google/protobuf/timestamp.proto" dependency: "google/protobuf/duration.proto"
dependency: "google/protobuf/wrappers.proto" dependency: "google/protobuf/struct.proto" dependency: "shop/item.proto"
message_type {
  name: "Order"
  field { name: "total" number: 1 type: TYPE_%s label: LABEL_OPTIONAL }
  field { name: "note" number: 2 type: TYPE_STRING label: LABEL_OPTIONAL oneof_index: 0 proto3_optional: true }
  field { name: "items" number: 3 type: TYPE_MESSAGE type_name: ".shop.Item" label: LABEL_REPEATED }
  field { name: "at" number: 4 type: TYPE_MESSAGE type_name: ".google.protobuf.Timestamp" label: LABEL_OPTIONAL }
  field { name: "took" number: 5 type: TYPE_MESSAGE type_name: ".google.protobuf.Duration" label: LABEL_OPTIONAL }
  field { name: "state" number: 6 type: TYPE_ENUM type_name: ".shop.State" label: LABEL_OPTIONAL }
  field { name: "big" number: 7 type: TYPE_UINT64 label: LABEL_OPTIONAL }
  field { name: "raw" number: 8 type: TYPE_BYTES label: LABEL_OPTIONAL }
  field { name: "by" number: 9 type: TYPE_MESSAGE type_name: ".shop.Order.ByEntry" label: LABEL_REPEATED }
  field { name: "parent" number: 10 type: TYPE_MESSAGE type_name: ".shop.Order" label: LABEL_OPTIONAL }
  field { name: "maybe" number: 11 type: TYPE_MESSAGE type_name: ".google.protobuf.Int32Value" label: LABEL_OPTIONAL }
  field { name: "more" number: 12 type: TYPE_MESSAGE type_name: ".google.protobuf.Struct" label: LABEL_OPTIONAL }
  field { name: "share" number: 13 type: TYPE_DOUBLE label: LABEL_OPTIONAL }
  nested_type {
    name: "ByEntry" options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_BOOL label: LABEL_OPTIONAL }
    field { name: "value" number: 2 type: TYPE_INT32 label: LABEL_OPTIONAL }
  }
  nested_type { name: "Line" field { name: "text" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL } }
  oneof_decl { name: "_note" }
}
message_type { name: "Cancelled" field { name: "why" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL } }
enum_type { name: "State" value { name: "NEW" number: 0 } value { name: "PAID" number: 1 } }
"""
FAR = 64
"""The index of the type `Far`, of which serialisers write two bytes."""
_ORDER += "".join(f'message_type {{ name: "Other{index}" }}\n' for index in range(2, FAR))
_ORDER += 'message_type { name: "Far" field { name: "Why" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL } }'


class Shop:
    """Classes of messages, and the files that they are described in. `total`: the type of an order's total."""

    def __init__(self, total: str = "INT64") -> None:
        files = [text_format.Parse(text, FileDescriptorProto()) for text in (_ITEM, _ORDER % total)]
        self._pool = DescriptorPool()
        for module in (timestamp_pb2, duration_pb2, wrappers_pb2, struct_pb2):
            self._pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
        for one in files:
            self._pool.Add(one)
        self.item, self.file = (b64encode(one.SerializeToString()).decode() for one in files)
        self.imports = {"shop/item.proto": self.item}

    def __getattr__(self, name: str) -> Any:
        """The class of this message type, which is one of the package."""
        return GetMessageClass(self._pool.FindMessageTypeByName(f"shop.{name.replace('_', '.')}"))
