"""The form of a pumped record."""

from __future__ import annotations

import pytest

from harvester.verify.load import Pumped, key_name, parse


def test_a_value_says_number_time_and_kind() -> None:
    assert parse(b"12:1700000000000000:c:....") == Pumped(12, 1_700_000_000_000_000, "c")


@pytest.mark.parametrize(
    "value", [None, b"", b"1:2:c", b"1:2:x:", b":2:c:", b"1::c:", b"-1:2:c:", b"1:2.5:c:", b"a:2:c:"]
)
def test_anything_else_is_not_ours(value: bytes | None) -> None:
    assert parse(value) is None


def test_keys_are_numbered_from_zero() -> None:
    assert [key_name(0), key_name(123), key_name(1_234_567)] == ["k-000000", "k-000123", "k-1234567"]
