"""What every payload begins with, and what no payload and no input may be.

A payload comes from a peer that may be broken or hostile. So its header is read first and compared with what the
receiver expects; everything after it is checked before a single number of it is used.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.values import BadValue

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Halves = NDArray[np.uint16]

MAGIC = b"SHLP"
VERSION = 1
NAMES = ("bf16", "int8", "int4", "2bit", "topk")  # a codec's number in the header is its place here
_HEADER = struct.Struct("<4sBBHIIQ")  # magic, version, codec, 0, chunk, keep, count
HEADER_BYTES = _HEADER.size

# Beyond these a float32 sum of a few parts could overflow, or the inverse of a scale. No pseudo-gradient is there.
LARGEST = 2.0**100
LARGEST_BITS = 0x7180  # as the upper half of a float32
LEAST_BITS = 0x0080  # 2**-126, the least that is no subnormal


class BadPayload(BadValue):
    """Bytes that no codec of ours has made, or one of another kind, size or setting than was agreed on."""


@dataclass(frozen=True)
class Header:
    codec: str
    chunk: int  # parameters with scales of their own
    keep: int  # of each chunk that travel; all where it is 0
    count: int  # parameters

    def pack(self) -> bytes:
        return _HEADER.pack(MAGIC, VERSION, NAMES.index(self.codec), 0, self.chunk, self.keep, self.count)


def header(payload: bytes | memoryview) -> Header:
    """Of any payload of ours. Says nothing of what comes after it."""
    if len(payload) < HEADER_BYTES:
        raise BadPayload(f"a payload of {len(payload)} bytes is shorter than its header; fetch it again.")
    magic, version, number, zero, chunk, keep, count = _HEADER.unpack_from(payload)
    if magic != MAGIC or zero != 0 or number >= len(NAMES):
        raise BadPayload("this is no payload of a codec of ours: its first bytes are others.")
    if version != VERSION:
        raise BadPayload(f"the payload is of version {version}, and this is {VERSION}; use the same release of Shoal.")
    return Header(NAMES[number], chunk, keep, count)


def expect(payload: bytes | memoryview, wanted: Header) -> Bytes:
    """What comes after the header, where the header is the wanted one."""
    found = header(payload)
    if found != wanted:
        raise BadPayload(f"the payload is {_said(found)}, and {_said(wanted)} was agreed on.")
    body = np.frombuffer(payload, dtype=np.uint8, offset=HEADER_BYTES)
    if body.ctypes.data % 8:  # a slice of something larger; what follows reads whole numbers
        body = body.copy()
    body.flags.writeable = False
    return body


def sections(body: Bytes, *sizes: int) -> list[Bytes]:
    """The body cut where its parts end; the last one may be as long as it likes when its size is -1."""
    fixed = sum(size for size in sizes if size >= 0)
    if len(body) < fixed or (len(body) != fixed and sizes[-1] >= 0):
        raise BadPayload(
            f"the payload has {len(body):,} bytes after its header where {fixed:,} belong; fetch it again."
        )
    cut, at = [], 0
    for size in sizes:
        end = len(body) if size < 0 else at + size
        cut.append(body[at:end])
        at = end
    return cut


def check_scales(scales: Halves) -> None:
    """Each is 0 or a normal number that is not too large; no sign, no infinity, no NaN."""
    wrong = (scales > LARGEST_BITS) | ((scales < LEAST_BITS) & (scales != 0))
    if wrong.any():
        raise BadPayload(f"scale {int(np.argmax(wrong))} of the payload is no scale; leave the part out.")


def check_vector(name: str, vector: Any, count: int | None = None) -> Floats:
    """Ours, not a peer's: a wrong one is a mistake of the caller."""
    if not isinstance(vector, np.ndarray) or vector.dtype != np.float32 or vector.ndim != 1:
        raise ValueError(f"{name} has to be a float32 vector.")
    if not vector.flags.c_contiguous:
        raise ValueError(f"{name} has to be contiguous in memory.")
    if count is not None and len(vector) != count:
        raise ValueError(f"{name} has {len(vector):,} values where {count:,} belong.")
    return vector


def check_finite(most: float) -> None:
    """`most`: the largest magnitude."""
    if not most <= LARGEST:
        raise ValueError(
            "the values to send (with what was kept for them) are infinite, NaN or beyond 2**100; leave this "
            "round's part out: training has diverged."
        )


def _said(h: Header) -> str:
    setting = f" ({h.keep} of {h.chunk})" if h.keep else ""
    return f"{h.codec}{setting} of {h.count:,} parameters"
