"""Codecs that send every parameter: bf16, int8, int4, 2bit.

After the header: the blocks' scales (none for bf16), for 2bit the low magnitudes, then the numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from shoal.codec.frame import (
    HEADER_BYTES,
    LARGEST_BITS,
    BadPayload,
    Bytes,
    Floats,
    Halves,
    Header,
    check_finite,
    check_scales,
    check_vector,
    expect,
    header,
    sections,
)
from shoal.codec.fresh import fresh

_BITS = {"bf16": 16, "int8": 8, "int4": 4, "2bit": 2}
BLOCKS = {"bf16": 256, "int8": 256, "int4": 128, "2bit": 256}  # multiples of the lanes in which sums are done


@dataclass(frozen=True)
class Dense:
    name: str
    kernels: ModuleType

    @property
    def bits(self) -> int:
        return _BITS[self.name]

    @property
    def block(self) -> int:
        return BLOCKS[self.name]

    def most_bytes(self, count: int) -> int:
        return HEADER_BYTES + sum(self._sizes(count))

    def encode(self, values: Floats, residual: Floats | None = None, decay: float = 1.0) -> bytes:
        check_vector("values", values)
        if residual is not None:
            check_vector("residual", residual, len(values))
        check_finite(self.kernels.largest(values))
        count = len(values)
        payload, writable = fresh(HEADER_BYTES + sum(self._sizes(count)))
        writable[:HEADER_BYTES] = np.frombuffer(self._header(count).pack(), np.uint8)
        parts = self._cut(writable[HEADER_BYTES:], count)
        if count:
            check_finite(self.kernels.encode(self.bits, self.block, values, residual, decay, *parts))
        return payload

    def add(self, payload: bytes | memoryview, into: Floats, weight: float) -> None:
        check_vector("into", into)
        parts = self._read(payload, len(into))
        if len(into):
            self.kernels.add(self.bits, self.block, *parts, into, weight)

    def check(self, payload: bytes | memoryview, count: int) -> None:
        self._read(payload, count)

    def decode_norm(self, payload: bytes | memoryview) -> float:
        count = header(payload).count
        parts = self._read(payload, count)
        return math.sqrt(self.kernels.squares(self.bits, self.block, *parts, count)) if count else 0.0

    def dot(self, payload: bytes | memoryview, vector: Floats) -> float:
        check_vector("vector", vector)
        parts = self._read(payload, len(vector))
        return float(self.kernels.dot(self.bits, self.block, *parts, vector)) if len(vector) else 0.0

    def _read(self, payload: bytes | memoryview, count: int) -> tuple[Halves, Bytes, Bytes]:
        high, ratio, data = self._cut(expect(payload, self._header(count)), count)
        check_scales(high)
        if self.bits == 16 and count and self.kernels.largest_half(data.view(np.uint16)) > LARGEST_BITS:
            raise BadPayload("the payload holds values that are infinite, NaN or too large; leave the part out.")
        unused = -count * self.bits % 8
        if unused and data[-1] >> (8 - unused):
            raise BadPayload("the payload's last bits should be unused and are not; leave the part out.")
        return high, ratio, data

    def _cut(self, body: Bytes, count: int) -> tuple[Halves, Bytes, Bytes]:
        high, ratio, data = sections(body, *self._sizes(count))
        return high.view(np.uint16), ratio, data

    def _sizes(self, count: int) -> tuple[int, int, int]:
        blocks = 0 if self.bits == 16 else -(-count // self.block)
        return 2 * blocks, blocks if self.bits == 2 else 0, -(-count * self.bits // 8)

    def _header(self, count: int) -> Header:
        return Header(self.name, self.block, 0, count)
