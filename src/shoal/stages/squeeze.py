"""How hidden states and their gradients travel between stages: bf16, or 8, 4 or 2 bits with a scale for each group.

Sender and receiver know the shape and the setting, so a payload is scales and numbers and nothing else; one of another
length is refused before it is looked at. Rounding is to the nearest and so the same on both sides of a re-route: a
sibling that computes a lost micro-batch again sends what the lost peer sent. No error feedback here: what rounding
left out of one window belongs to no other window. (Gradients of weights have it, `shoal.codec`.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from shoal.codec.frame import BadPayload
from shoal.errors import SpecError

BITS = {"int8": 8, "int4": 4, "int2": 2}
GROUP = {"int8": 128, "int4": 32, "int2": 32}  # numbers that share a scale of 2 bytes
_EXPONENT = 0x7F80  # of a bf16: with all of it set it is infinite, or NaN
_NO_NUMBERS = "hidden states or gradients are not finite any more"


@dataclass(frozen=True)
class Squeeze:
    """The agreed form for tensors [..., width]."""

    name: str
    width: int

    def __post_init__(self) -> None:
        if self.name not in ("fp32", "bf16", *BITS):
            raise SpecError(f"activations cannot travel as {self.name!r}: take fp32, bf16, int8, int4 or int2.")

    @property
    def group(self) -> int:
        """The largest divisor of the width that is no larger than wished for."""
        wish = GROUP[self.name]
        return next(n for n in range(min(wish, self.width), 0, -1) if self.width % n == 0)

    def nbytes(self, rows: int) -> int:
        if self.name in ("fp32", "bf16"):
            return rows * self.width * (4 if self.name == "fp32" else 2)
        groups = rows * self.width // self.group
        return 2 * groups + -(-rows * self.width * BITS[self.name] // 8)

    def encode(self, values: Tensor) -> bytes:
        """FloatingPointError for what is infinite or NaN, or would be where it arrives."""
        if self.name in ("fp32", "bf16"):
            plain = values.detach().to(torch.float32 if self.name == "fp32" else torch.bfloat16)
            if not torch.isfinite(plain).all():
                raise FloatingPointError(_NO_NUMBERS)
            return _bytes(plain)
        grouped = values.detach().reshape(-1, self.group).float()
        most = _most(self.name)
        scales = (grouped.abs().amax(dim=1, keepdim=True) / most).bfloat16()
        steps = scales.float()
        if not torch.isfinite(steps * _furthest(self.name)).all():
            raise FloatingPointError(_NO_NUMBERS)
        whole = torch.where(steps > 0, grouped / steps, 0.0)
        if self.name == "int2":  # -1.5, -0.5, 0.5, 1.5: with two bits a zero is not worth a level
            whole = (whole - 0.5).round_() + 0.5
        else:
            whole = whole.round_()
        numbers = (whole.clamp_(-most, most) + most).to(torch.uint8).reshape(-1)
        return _bytes(scales.reshape(-1)) + _bytes(_packed(numbers, BITS[self.name]))

    def check(self, payload: bytes | memoryview, rows: int) -> None:
        """BadPayload unless `decode` gives finite numbers of it. Touches nothing: to be called where it arrives."""
        if len(payload) != self.nbytes(rows):
            raise BadPayload(f"{len(payload)} bytes where {self.name} has {self.nbytes(rows)} for {rows} rows")
        if self.name == "fp32":
            if not np.isfinite(np.frombuffer(payload, np.float32)).all():
                raise BadPayload("it holds what is not finite")
            return
        halves = payload if self.name == "bf16" else memoryview(payload)[: 2 * (rows * self.width // self.group)]
        found = np.frombuffer(halves, np.uint16)
        if self.name == "bf16":
            if ((found & _EXPONENT) == _EXPONENT).any():
                raise BadPayload("it holds what is not finite")
        elif (found > _most_scale(self.name)).any():  # also one below zero: its first bit is set
            raise BadPayload("a scale is not finite, below zero or too large")

    def decode(self, payload: bytes | memoryview, shape: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
        """Float32 of the given shape, whose last dimension is the width."""
        count = math.prod(shape)
        if shape[-1] != self.width:
            raise BadPayload(f"{shape[-1]} numbers in a row, where {self.width} travel")
        self.check(payload, count // self.width)
        raw = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)
        if self.name in ("fp32", "bf16"):
            return raw.view(torch.float32 if self.name == "fp32" else torch.bfloat16).float().reshape(shape)
        groups = count // self.group
        scales = raw[: 2 * groups].view(torch.bfloat16).float()
        numbers = _unpacked(raw[2 * groups :], BITS[self.name])[:count].float() - _most(self.name)
        return (numbers.reshape(groups, self.group) * scales[:, None]).reshape(shape)


def _most(name: str) -> float:
    """The largest level on either side of zero."""
    return {"int8": 127.0, "int4": 7.0, "int2": 1.5}[name]


def _furthest(name: str) -> float:
    """Of all that the bits can say, also what is never sent."""
    return max(_most(name), 2 ** BITS[name] - 1 - _most(name))


@cache
def _most_scale(name: str) -> int:
    """The largest whose numbers are finite in float32, as its bits."""
    bits = np.arange(_EXPONENT, dtype=np.uint32)  # those of all scales from 0 on that are finite
    with np.errstate(over="ignore"):
        finite = np.isfinite((bits << 16).view(np.float32) * np.float32(_furthest(name)))
    return int(bits[finite].max())


def _packed(numbers: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return numbers
    each = 8 // bits
    if len(numbers) % each:
        numbers = torch.cat([numbers, numbers.new_zeros(each - len(numbers) % each)])
    shifts = torch.arange(0, 8, bits, device=numbers.device, dtype=torch.uint8)
    return torch.bitwise_left_shift(numbers.view(-1, each), shifts).sum(dim=1, dtype=torch.uint8)


def _unpacked(raw: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return raw
    shifts = torch.arange(0, 8, bits, device=raw.device, dtype=torch.uint8)
    return torch.bitwise_and(torch.bitwise_right_shift(raw[:, None], shifts), (1 << bits) - 1).reshape(-1)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes()
