"""Columns and JSON text of Protobuf messages."""

from __future__ import annotations

import json
import sys
from base64 import b64decode, b64encode
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from math import isnan
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from hypothesis import given
from hypothesis import strategies as st

from harvester.pipeline import lake
from harvester.pipeline.errors import PipelineError
from harvester.pipeline.lake.messages import columns_of, file_set, reader
from harvester.pipeline.lake.typed import WrittenSchema, type_of
from tests.support.shop import Shop

SHOP = Shop()
FILES = file_set(SHOP.file, SHOP.imports)
ORDER, CANCELLED, LINE, DISTANT = b"\0", b"\2\2", b"\4\0\2", b"\2\x80\1"
COLUMNS = (
    "total:bigint,note:string,items:array<struct<sku:string>>,at:timestamp,took:decimal(21,9),state:string,"
    "big:decimal(20,0),raw:binary,by:map<string,int>,parent:string,maybe:int,more:string,share:double"
)


def framed(place: bytes, message: bytes, number: int = 7) -> bytes:
    return b"\0" + number.to_bytes(4, "big") + place + message


def read(value: bytes | None, *places: bytes) -> Any:
    text = reader({7: (FILES, frozenset(places or (ORDER, CANCELLED, LINE)))})(value)
    return None if text is None else json.loads(text)


@pytest.mark.parametrize(
    ("place", "columns"),
    [
        (ORDER, COLUMNS),
        (b"\2\0", COLUMNS),
        (CANCELLED, "why:string"),
        (LINE, "text:string"),
        (DISTANT, "Why:string"),
    ],
)
def test_each_type_of_message_has_columns_of_its_own(place: bytes, columns: str) -> None:
    assert columns_of(FILES, place).simpleString() == f"struct<{columns}>"


def test_a_field_that_is_not_there_is_null_only_if_the_message_tells_it_from_a_default() -> None:
    assert read(framed(ORDER, b"")) == {
        "total": 0, "items": [], "state": "NEW", "big": 0, "raw": "", "by": {}, "share": 0.0
    }  # fmt: skip
    told = SHOP.Order(note="")
    told.maybe.value = 0
    found = read(framed(ORDER, told.SerializeToString()))
    assert (found["note"], found["maybe"]) == ("", 0)


@given(
    total=st.integers(-(2**63), 2**63 - 1), note=st.none() | st.text(), skus=st.lists(st.text(), max_size=3),
    at=st.none() | st.datetimes(timezones=st.just(UTC)), nanos=st.none() | st.integers(-(10**18), 10**18),
    state=st.integers(0, 3), big=st.integers(0, 2**64 - 1), raw=st.binary(), share=st.floats(),
    by=st.dictionaries(st.booleans(), st.integers(-(2**31), 2**31 - 1)),
)  # fmt: skip
def test_every_value_is_read_back(
    total: int, note: str | None, skus: list[str], at: datetime | None, nanos: int | None, state: int, big: int,
    raw: bytes, share: float, by: dict[bool, int],
) -> None:  # fmt: skip
    order = SHOP.Order(total=total, state=state, big=big, raw=raw, share=share, by=by)
    order.items.extend(SHOP.Item(sku=sku) for sku in skus)
    order.parent.note = "above"
    if note is not None:
        order.note = note
    if at is not None:
        order.at.FromDatetime(at)
    if nanos is not None:
        order.took.FromNanoseconds(nanos)
    found = read(framed(ORDER, order.SerializeToString()))
    assert (found["total"], found.get("note"), found["big"]) == (total, note, big)
    assert [one["sku"] for one in found["items"]] == skus
    assert b64decode(found["raw"]) == raw
    assert float(found["share"]) == share or (isnan(float(found["share"])) and isnan(share))
    assert found["by"] == {str(key).lower(): value for key, value in by.items()}
    assert found["state"] == ("NEW", "PAID", "2", "3")[state]
    assert json.loads(found["parent"]) == {"note": "above"}
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    assert (None if at is None else datetime.fromisoformat(found["at"]) - epoch) == (at and at - epoch)
    if nanos is not None:
        assert Decimal(found["took"]) * 10**9 == nanos


def test_a_time_that_no_calendar_has_becomes_none_that_fits() -> None:
    order = SHOP.Order()
    order.at.seconds = 2**62
    assert read(framed(ORDER, order.SerializeToString()))["at"] == f"{2**62} seconds"
    order.at.seconds = round((datetime(2026, 3, 1, tzinfo=UTC) - timedelta(days=2000 * 365)).timestamp())
    assert read(framed(ORDER, order.SerializeToString()))["at"].startswith("0027-")


@pytest.mark.parametrize(
    "value",
    [
        None, b"", b"\0\0\0\0\7", framed(b"", b""), framed(b"\2", b""), framed(b"\2\4", b""), framed(ORDER, b"\xff"),
        framed(ORDER, SHOP.Order(note="x").SerializeToString()[:-1]), framed(ORDER, b"\x12\1\xff"),
        framed(ORDER, b"", number=8), framed(b"\xff\xff", b""),
    ],
)  # fmt: skip
def test_what_is_not_of_its_schema_is_nothing(value: bytes | None) -> None:
    assert read(value) is None


def test_types_that_nobody_asked_for_are_nothing() -> None:
    value = framed(CANCELLED, SHOP.Cancelled(why="late").SerializeToString())
    assert read(value) == {"why": "late"}
    assert read(value, ORDER) is None
    assert read(framed(DISTANT, SHOP.Far(Why="late").SerializeToString()), ORDER, DISTANT) == {"Why": "late"}


def test_what_json_cannot_express_is_nothing() -> None:
    nan, within, never = (SHOP.Order() for _ in range(3))
    nan.more["n"] = within.parent.more["n"] = float("nan")
    never.parent.at.seconds = 2**40
    for order in (nan, within, never):
        assert read(framed(ORDER, order.SerializeToString())) is None


@pytest.mark.parametrize(
    ("file", "imports", "said"),
    [
        ('syntax = "proto3";', {}, "as text only"),
        (SHOP.file, {}, "imports shop/item.proto, to which"),
        (
            b64encode(FileDescriptorProto(dependency=["confluent/none.proto"]).SerializeToString()).decode(),
            {},
            "imports confluent/none.proto, to which",
        ),
        (SHOP.file, {"shop/item.proto": b64encode(b"").decode()}, "is inconsistent"),
    ],
)
def test_a_schema_that_cannot_be_read_says_why(file: str, imports: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        columns_of(file_set(file, imports))


@pytest.mark.parametrize("name", ["meta", "type/decimal", "types/decimal"])
def test_files_of_confluent_need_no_reference(name: str) -> None:
    file = FileDescriptorProto.FromString(b64decode(SHOP.file))
    file.dependency.append(f"confluent/{name}.proto")
    files = file_set(b64encode(file.SerializeToString()).decode(), SHOP.imports)
    assert columns_of(files).simpleString() == f"struct<{COLUMNS}>"


def test_without_the_library_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(lake, "messages")
    monkeypatch.setitem(sys.modules, "harvester.pipeline.lake.messages", None)
    with pytest.raises(PipelineError, match="Protobuf is not installed") as caught:
        type_of(None, WrittenSchema("PROTOBUF", SHOP.file, imports=SHOP.imports))  # type: ignore[arg-type]
    assert "protobuf]" in (caught.value.hint or "")


@pytest.mark.parametrize("place", [b"\2\x82\1", b"\4\2\0", b"\2\1", b"\2\x81\1"])
def test_a_place_without_a_type_says_so(place: bytes) -> None:
    with pytest.raises(ValueError, match=f"no message type at {place.hex()}"):
        columns_of(FILES, place)
