"""Whatever a peer writes into a pipe: a frame of the right types, or WireError and nothing else."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.errors import WireError
from harvester.relay.core import frames
from harvester.relay.core import frames as f
from harvester.relay.core.frames import MAX_FRAME_BYTES, Frame, Splitter, checked, decode, encode

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
RARE = sorted(frames._RARE.items())
_EXAMPLES: dict[Any, Any] = {
    int: 1,
    float: 0.5,
    bool: True,
    str: "text",
    Sequence[int]: [1, 2],
    int | None: 1,
    str | None: "text",
}


def example(kind: type[Any]) -> dict[str, Any]:
    """The fields of a frame of this kind as they travel."""
    hints = get_type_hints(kind)
    return {field.name: _EXAMPLES[hints[field.name]] for field in fields(kind)}


def is_well_typed(frame: Frame) -> bool:
    if isinstance(frame, f.Settled):
        return all(type(record_id) is int for record_id in frame.ids)
    if isinstance(frame, f.Dispatch):
        return type(frame.epoch) is int and type(frame.rows) is bytes
    return checked(type(frame), asdict(frame)) is not None


def decode_or_refuse(body: bytes) -> Frame | None:
    try:
        frame = decode(body)
    except WireError:
        return None
    assert is_well_typed(frame), frame
    return frame


@pytest.mark.parametrize(("letter", "kind"), RARE)
def test_the_examples_are_frames(letter: bytes, kind: type[Any]) -> None:
    frame = decode_or_refuse(letter + json.dumps(example(kind)).encode())
    assert frame is not None
    assert encode(frame)[4:5] == letter


@given(st.sampled_from(RARE), st.data(), JSON)
def test_a_field_of_another_type(rare: tuple[bytes, type[Any]], data: st.DataObject, value: Any) -> None:
    letter, kind = rare
    name = data.draw(st.sampled_from([field.name for field in fields(kind)]))
    decode_or_refuse(letter + json.dumps(example(kind) | {name: value}).encode())


@given(st.sampled_from(RARE), st.data())
def test_a_field_too_many_or_too_few(rare: tuple[bytes, type[Any]], data: st.DataObject) -> None:
    letter, kind = rare
    name = data.draw(st.sampled_from([field.name for field in fields(kind)]))
    decode_or_refuse(letter + json.dumps({k: v for k, v in example(kind).items() if k != name}).encode())
    with pytest.raises(WireError):
        decode(letter + json.dumps(example(kind) | {f"{name}_": 1}).encode())


@given(st.sampled_from([letter for letter, _ in RARE] + [b"D", b"S", b"?"]), JSON | st.binary(max_size=50))
def test_anything_behind_a_letter(letter: bytes, body: Any) -> None:
    decode_or_refuse(letter + (body if isinstance(body, bytes) else json.dumps(body).encode()))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"S1234567",
        b"D\0\0\1",
        b"l" + b"[" * 100_000,
        b'l{"level":1e999,"text":"x"}',
        b'l{"level":' + b"9" * 5_000 + b',"text":"x"}',
        b'l{"level":30,"text":"\\ud800"}\xff',
        b'x{"within_s":NaN}',
        b'r{"pid":true}',
        b'k{"epoch":1,"ids":"12"}',
        b'k{"epoch":1,"ids":{"1":2}}',
        b'k{"epoch":1,"ids":[1,18446744073709551616]}',
        b's{"queued":1}',
        b"l\xef\xbb\xbf{}",
    ],
)
def test_bodies_made_to_hurt(body: bytes) -> None:
    with pytest.raises(WireError):
        decode(body)


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_a_stream_of_anything_in_any_pieces(pieces: list[bytes]) -> None:
    splitter = Splitter()
    try:
        for piece in pieces:
            for frame in splitter.feed(piece):
                assert is_well_typed(frame)
    except WireError:
        return


@given(st.binary(min_size=1, max_size=30), st.integers(0, 2**32 - 1))
def test_what_follows_a_good_frame(junk: bytes, length: int) -> None:
    """The good one is heard; an absurd length is refused at once, not waited for."""
    good = encode(f.ParkAcknowledged(1, 2))
    splitter, heard = Splitter(), []
    try:
        for frame in splitter.feed(good + struct.pack(">I", length) + junk):
            heard.append(frame)
    except WireError:
        pass
    else:
        assert 0 < length <= MAX_FRAME_BYTES
    assert heard[:1] == [f.ParkAcknowledged(1, 2)]
