"""Only the largest values of each chunk travel: a sign and one of two magnitudes each, and where they stand.

After the header, for n chunks:

    high     n x 16 bits    the higher magnitude, the upper half of a float32 (range matters more than its last bits)
    ratio    n x 8 bits     the lower one in 256ths of it, less one
    shape    n x 8 bits     0 to 15: low bits of a gap; 16: as many entries as a chunk may have
    counts   32 bits        the number of entries, for each chunk that has fewer
    codes    2 bits         of each entry: 1 for negative, 2 for the higher magnitude
    lows                    of each entry: the low bits of the gap to the one before it
    unary                   of each entry: the rest of the gap, as so many zeros and a one

That is Rice's code, its two halves apart, so that numpy can read it too. Where the entries lie at random it needs 7.5
bits for a gap of 64 on the mean, a tenth of a bit more than there is to say (12 bits for a plain index).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.codec.frame import (
    HEADER_BYTES,
    BadPayload,
    Bytes,
    Floats,
    Header,
    check_finite,
    check_scales,
    check_vector,
    expect,
    header,
    sections,
)

_FULL = 16
CHUNKS = (16, 1 << 16)  # the least and the most


@dataclass(frozen=True)
class TopK:
    chunk: int
    keep: int
    kernels: ModuleType
    name: str = "topk"

    def __post_init__(self) -> None:
        if not CHUNKS[0] <= self.chunk <= CHUNKS[1] or not 1 <= self.keep <= self.chunk:
            raise ValueError(
                f"topk cannot keep {self.keep} of {self.chunk}: chunks have {CHUNKS[0]} to {CHUNKS[1]:,} parameters, "
                "and at least one and at most all of them are kept."
            )

    @property
    def rice_most(self) -> int:
        return min(15, (self.chunk - 1).bit_length())

    def most_bytes(self, count: int) -> int:
        chunks = -(-count // self.chunk)
        return HEADER_BYTES + 8 * chunks + -(-chunks * self.keep * (2 + self.rice_most + 2) // 8) + 3

    def encode(self, values: Floats, residual: Floats | None = None, decay: float = 1.0) -> bytes:
        check_vector("values", values)
        if residual is not None:
            check_vector("residual", residual, len(values))
        check_finite(self.kernels.largest(values))
        head = self._header(len(values)).pack()
        if not len(values):
            return head
        most, *parts = self.kernels.encode(self.chunk, self.keep, values, residual, decay, self.rice_most)
        check_finite(most)
        return b"".join([head, *(part.tobytes() for part in parts)])

    def add(self, payload: bytes | memoryview, into: Floats, weight: float) -> None:
        check_vector("into", into)
        self.kernels.add(self.chunk, *self._read(payload, len(into)), into, weight)

    def check(self, payload: bytes | memoryview, count: int) -> None:
        self._read(payload, count)

    def decode_norm(self, payload: bytes | memoryview) -> float:
        return math.sqrt(self.kernels.squares(self.chunk, *self._read(payload, header(payload).count)))

    def dot(self, payload: bytes | memoryview, vector: Floats) -> float:
        check_vector("vector", vector)
        return float(self.kernels.dot(self.chunk, *self._read(payload, len(vector)), vector))

    def entries(self, payload: bytes | memoryview) -> tuple[NDArray[np.int64], Floats]:
        """Where the values that travelled stand, rising, and what they are."""
        index, value = self.kernels.entries(self.chunk, *self._read(payload, header(payload).count))
        return index, value

    def _read(self, payload: bytes | memoryview, count: int) -> tuple[Any, ...]:
        body = expect(payload, self._header(count))
        if len(payload) > self.most_bytes(count):
            raise BadPayload(f"a payload of {len(payload):,} bytes is too long for {count:,} parameters.")
        n = -(-count // self.chunk)
        high, ratio, shape, rest = sections(body, 2 * n, n, n, -1)
        scales = high.view(np.uint16)
        check_scales(scales)
        rice, entries, rest = self._shapes(shape, rest, count)
        if ((entries == 0) != (scales == 0)).any():
            raise BadPayload("the payload has a chunk with a scale and no values, or values and no scale.")
        total, low_bits = int(entries.sum()), int((entries * rice).sum())
        codes, lows, unary = sections(rest, -(-2 * total // 8), -(-low_bits // 8), -1)
        _check_unused(codes, 2 * total)
        _check_unused(lows, low_bits)
        if int(np.bitwise_count(unary).sum()) != total or (len(unary) and not unary[-1]):
            raise BadPayload(f"the payload's gaps are not those of its {total:,} values; leave the part out.")
        if place := self.kernels.beyond(self.chunk, count, rice, entries, lows, unary):
            raise BadPayload(f"value {place:,} of the payload lies outside of its chunk; leave the part out.")
        return scales, ratio, rice, entries, codes, lows, unary

    def _shapes(self, shape: Bytes, rest: Bytes, count: int) -> tuple[Bytes, NDArray[np.int64], Bytes]:
        """Low bits and number of entries of each chunk, and what comes after them."""
        rice = shape & np.uint8(15)
        if (shape > 31).any() or (rice > self.rice_most).any():
            raise BadPayload("the payload has a chunk of a shape that there is not; leave the part out.")
        entries = np.full(len(shape), self.keep, np.int64)
        if count % self.chunk:
            entries[-1] = -(-self.keep * (count % self.chunk) // self.chunk)
        fewer = shape < _FULL
        found, rest = sections(rest, 4 * int(fewer.sum()), -1)
        if (found.view(np.uint32) >= entries[fewer]).any():
            raise BadPayload("the payload has a chunk with more values than are kept; leave the part out.")
        entries[fewer] = found.view(np.uint32)
        return rice, entries, rest

    def _header(self, count: int) -> Header:
        return Header(self.name, self.chunk, self.keep, count)


def _check_unused(section: Bytes, bits: int) -> None:
    if bits % 8 and section[-1] >> (bits % 8):
        raise BadPayload("the payload has bits where none belong; leave the part out.")
