"""Frames over a pipe that cuts wherever it likes, and bytes that are not a frames."""

from __future__ import annotations

import struct
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harvester.errors import WireError
from harvester.relay.core import frames as f
from harvester.relay.core.frames import MAX_FRAME_BYTES, Frame, Splitter, decode, encode, in_pieces
from tests.support.longs import some_of

NUMBERS = st.integers(0, 2**63 - 1)
EPOCHS = st.integers(0, 2**32 - 1)
IDS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20)
TEXTS = st.text(max_size=40)
FLOATS = st.floats(allow_nan=False)

FRAMES: st.SearchStrategy[Frame] = st.one_of(
    st.builds(f.Dispatch, EPOCHS, st.binary(max_size=200), st.none() | st.integers(1 - 2**63, 2**63 - 1)),
    st.builds(f.Remark, EPOCHS, st.none() | NUMBERS, *[st.none() | TEXTS] * 3, NUMBERS, NUMBERS),
    st.builds(f.ParkAcknowledged, EPOCHS, NUMBERS),
    st.builds(f.Login, TEXTS, TEXTS, TEXTS),
    st.builds(f.Stop, FLOATS),
    st.builds(f.Ready, NUMBERS),
    st.builds(f.Settled, IDS),
    st.builds(f.Remarked, EPOCHS, IDS),
    st.builds(f.Parked, EPOCHS, NUMBERS, IDS, TEXTS, FLOATS, NUMBERS, st.booleans()),
    st.builds(f.Refused, EPOCHS, IDS),
    st.builds(f.Dropped, IDS, st.booleans()),
    st.builds(f.InDoubt, st.integers(-(2**63), 2**63 - 1)),
    st.builds(f.FateUnknown, EPOCHS, IDS, TEXTS),
    st.builds(f.QueueTimedOut, EPOCHS, NUMBERS, FLOATS),
    st.builds(f.Quarantined, NUMBERS, TEXTS),
    st.builds(f.Poisoned, NUMBERS, TEXTS),
    st.builds(f.ShardSession, NUMBERS, TEXTS),
    st.builds(f.ShardServerChanged, TEXTS),
    st.builds(f.Stats, *[NUMBERS] * 7, st.binary(max_size=30).map(bytes.hex)),
    st.builds(f.Log, st.integers(0, 50), TEXTS),
    st.builds(f.Trouble, st.none() | TEXTS),
)


def try_to_decode(data: bytes) -> None:
    """Anything but a WireError fails the test."""
    with suppress(WireError):
        decode(data)


@given(FRAMES)
def test_a_frame_survives(frame: Frame) -> None:
    data = encode(frame)
    assert int.from_bytes(data[:4], "big") == len(data) - 4
    assert decode(data[4:]) == frame


def test_every_kind_is_among_them() -> None:
    kinds = {kind for kind in vars(f).values() if isinstance(kind, type) and hasattr(kind, "__slots__")}
    assert set(Frame.__args__) == {kind for kind in kinds if kind.__module__ == f.__name__ and kind is not Splitter}


@given(st.lists(FRAMES, max_size=8), st.lists(st.integers(0, 400), max_size=20))
def test_any_cuts_give_the_same_frames(frames: list[Frame], cuts: list[int]) -> None:
    stream = b"".join(map(encode, frames))
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    splitter = Splitter()
    found: list[Frame] = []
    for begin, end in pairwise(places):
        found += splitter.feed(stream[begin:end])
    assert found == frames


def test_byte_by_byte() -> None:
    frames: list[Frame] = [f.Dispatch(1, b"ab"), f.Dispatch(2, b""), f.Settled([5]), f.Trouble(None)]
    splitter = Splitter()
    found = [frame for byte in b"".join(map(encode, frames)) for frame in splitter.feed(bytes([byte]))]
    assert found == frames


@settings(max_examples=some_of(300))
@given(st.binary(max_size=200))
def test_junk_raises_nothing_but_wire_errors(data: bytes) -> None:
    try_to_decode(data)


@given(st.sampled_from(list("DSmcxrkpfdutqoevslw")), st.binary(max_size=60))
def test_junk_after_a_known_letter(letter: str, data: bytes) -> None:
    try_to_decode(letter.encode() + data)


@given(st.lists(st.binary(max_size=60), max_size=6))
def test_a_stream_of_junk(pieces: list[bytes]) -> None:
    splitter = Splitter()
    try:
        for piece in pieces:
            list(splitter.feed(piece))
    except WireError:
        return


@given(FRAMES, st.data())
def test_a_flipped_or_missing_byte(frame: Frame, data: st.DataObject) -> None:
    body = bytearray(encode(frame)[4:])
    at = data.draw(st.integers(0, len(body) - 1))
    if data.draw(st.booleans()):
        body[at] ^= data.draw(st.integers(1, 255))
    else:
        del body[at:]
    try_to_decode(bytes(body))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"?",
        b"m",
        b"m[1]",
        b'm{"epoch":1}',
        b'm{"epoch":1,"term":1,"holder":null,"more":1}',
        b"m" + b"[" * 100_000,
        b"S1234567",
        b"D\0\0",
        b"D",
        b"m\xff",
    ],
)
def test_what_is_no_frame(body: bytes) -> None:
    with pytest.raises(WireError, match="not a frame"):
        decode(body)


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_impossible_lengths_are_refused_before_they_are_waited_for(length: int) -> None:
    with pytest.raises(WireError, match="announced"):
        list(Splitter().feed(struct.pack(">I", length)))


def test_frames_before_a_bad_one_are_given() -> None:
    stream = Splitter().feed(encode(f.Ready(1)) + struct.pack(">I", 1) + b"?")
    assert next(stream) == f.Ready(1)
    with pytest.raises(WireError):
        next(stream)


@given(st.lists(st.binary(max_size=30), min_size=1))
def test_many_rows_go_in_pieces_in_their_order(rows: list[bytes]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f, "_MANY_BYTES", 20)
        pieces = list(in_pieces(rows))
    assert b"".join(pieces) == b"".join(rows)
    assert all(len(piece) <= 20 or piece in rows for piece in pieces)
    assert len(pieces) == 1 or all(len(one) + len(two) > 20 for one, two in pairwise(pieces))
