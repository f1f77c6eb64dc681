"""Payloads that no codec of ours has made: refused with one kind of error, and nothing of them is used.

Mutations of real payloads reach further into the parser than random bytes do. `into` lies between guards, so that a
write beyond it is seen; memory is measured.
"""

from __future__ import annotations

import struct
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.codec import NAMES, BadPayload, Codec, codec, codec_of
from shoal.codec.frame import HEADER_BYTES
from tests.codec.test_codecs import vector

COUNT = 9_000
GUARD = 5_000
SETTINGS = [(name, plain) for name in NAMES for plain in (False, True)]


def survives(c: Codec, payload: bytes, count: int = COUNT) -> bool:
    """Whether it was taken. If so all of it is finite; if not, nothing has changed."""
    whole = np.ones(count + 2 * GUARD, np.float32)
    into = whole[GUARD:-GUARD]
    try:
        c.add(payload, into, 0.5)
    except BadPayload:
        assert (whole == 1).all()
        for use in (lambda: c.decode_norm(payload), lambda: c.dot(payload, into)):
            with suppress(BadPayload):
                assert np.isfinite(use())  # of another count, perhaps
        return False
    assert (whole[:GUARD] == 1).all()
    assert (whole[-GUARD:] == 1).all()
    assert np.isfinite(into).all()
    assert np.isfinite(c.decode_norm(payload))
    assert np.isfinite(c.dot(payload, into))
    return True


@pytest.mark.parametrize(("name", "plain"), SETTINGS)
def test_mutations_of_real_payloads(name: str, plain: bool) -> None:
    rng = np.random.default_rng(0)
    c = codec(name, 1000, 50, plain=plain)
    real = c.encode(vector(COUNT))
    taken = 0
    for turn in range(400):
        wrong = bytearray(real)
        for _ in range(rng.integers(1, 4)):
            at = int(rng.integers(len(wrong))) if turn % 2 else min(int(rng.exponential(60)), len(wrong) - 1)
            match rng.integers(6):
                case 0:
                    wrong[at] ^= 1 << rng.integers(8)
                case 1:
                    wrong[at] = rng.integers(256)
                case 2:
                    del wrong[at : at + int(rng.integers(1, 40))]
                case 3:
                    wrong[at:at] = rng.bytes(int(rng.integers(1, 40)))
                case 4:
                    wrong[at : at + 8] = b"\xff" * 8
                case _:
                    wrong[at:] = wrong[at:][::-1]
        taken += survives(c, bytes(wrong))
    assert taken < 400


@pytest.mark.parametrize(("name", "plain"), SETTINGS)
def test_every_shorter_and_longer_one(name: str, plain: bool) -> None:
    c = codec(name, 100, 7, plain=plain)
    real = c.encode(vector(330))
    for size in range(len(real)):
        assert not survives(c, real[:size], 330)
    for more in (b"\0", b"\1", b"\xff" * 9):
        assert not survives(c, real + more, 330)


@pytest.mark.parametrize("name", NAMES)
@given(body=st.binary(max_size=300), count=st.integers(0, 40))
@settings(max_examples=150, deadline=None)
def test_any_bytes_after_a_right_header(name: str, body: bytes, count: int) -> None:
    for plain in (False, True):
        c = codec(name, 16, 3, plain=plain)
        survives(c, c.encode(np.zeros(count, np.float32))[:HEADER_BYTES] + body, count)


@given(payload=st.binary(max_size=60))
@settings(max_examples=150, deadline=None)
def test_any_bytes(payload: bytes) -> None:
    with pytest.raises(BadPayload):
        codec_of(payload)
    assert not survives(codec("topk"), payload)


@pytest.mark.parametrize("name", NAMES)
def test_a_large_claim_takes_no_memory(name: str) -> None:
    """A header says how many parameters there are; nothing may be made by that alone."""
    c = codec(name)
    for count in (1 << 33, (1 << 63) + 5, (1 << 64) - 1):
        said = bytearray(c.encode(vector(5000)))
        said[16:24] = struct.pack("<Q", count)
        tracemalloc.start()
        with pytest.raises(BadPayload):
            c.decode_norm(bytes(said))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()


@pytest.mark.parametrize(("name", "plain"), SETTINGS)
def test_adding_takes_no_more_memory_than_there_is_already(name: str, plain: bool) -> None:
    count = 1 << 20
    c, into = codec(name, plain=plain), np.zeros(count, np.float32)
    payload = c.encode(vector(count))
    c.add(payload, into, 1.0)
    tracemalloc.start()
    c.add(payload, into, 1.0)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < into.nbytes


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (0, b"X", "no payload of a codec of ours"),
        (4, b"\2", "of version 2, and this is 1"),
        (5, b"\7", "no payload of a codec of ours"),
        (HEADER_BYTES, b"\x80\x7f", "scale 0 of the payload is no scale"),  # infinity
        (HEADER_BYTES, b"\xc0\x7f", "scale 0 of the payload is no scale"),  # no number
        (HEADER_BYTES, b"\x01\x00", "scale 0 of the payload is no scale"),  # subnormal
        (HEADER_BYTES, b"\x00\x00", "values and no scale"),
        (HEADER_BYTES + 9, b"\xff", "of a shape that there is not"),
        (HEADER_BYTES + 9, b"\x05", "more values than are kept"),
        (-1, b"\xff", "gaps are not those"),
    ],
)
def test_what_is_wrong_is_said(at: int, value: bytes, says: str) -> None:
    c = codec("topk", 1000, 50)
    wrong = bytearray(c.encode(np.random.default_rng(0).standard_normal(3000).astype(np.float32)))
    at %= len(wrong)
    wrong[at : at + len(value)] = value
    with pytest.raises(BadPayload, match=says):
        c.add(bytes(wrong), np.zeros(3000, np.float32), 1.0)
