"""What a codec does, and the five that there are."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Protocol

import numpy as np

from shoal.codec import plain_dense, plain_topk
from shoal.codec.dense import Dense
from shoal.codec.frame import NAMES, BadPayload, Floats, header
from shoal.codec.topk import TopK


class Codec(Protocol):
    """Makes payloads of vectors and adds them up. A payload means the same bits on every machine."""

    @property
    def name(self) -> str: ...

    def encode(self, values: Floats, residual: Floats | None = None, decay: float = 1.0) -> bytes:
        """A payload of v = values + decay * residual. What is lost of v is left in `residual`, in place.

        Raises ValueError where v is infinite, NaN or beyond 2**100. Where the values are to blame the residual
        is then as it was; where it is to blame itself, it is good for nothing.
        """
        ...

    def add(self, payload: bytes | memoryview, into: Floats, weight: float) -> None:
        """into += weight * decoded, in float32. Raises `BadPayload`; `into` is then as it was."""
        ...

    def check(self, payload: bytes | memoryview, count: int) -> None:
        """`BadPayload` unless it is one of so many parameters that `add` would take."""
        ...

    def decode_norm(self, payload: bytes | memoryview) -> float:
        """The length of the decoded vector, without making it."""
        ...

    def dot(self, payload: bytes | memoryview, vector: Floats) -> float:
        """decoded · vector, summed in a fixed order."""
        ...

    def most_bytes(self, count: int) -> int:
        """No payload of so many parameters is longer."""
        ...


def codec(name: str, chunk: int = 4096, keep: int = 64, plain: bool = False) -> Codec:
    """By its name in the run file; `chunk` and `keep` are for topk alone.

    Compiled where numba is installed. `plain`, or without it: the same bits from numpy, ten to fifty times slower.
    """
    dense, topk = (plain_dense, plain_topk) if plain else _kernels()
    if name == "topk":
        return TopK(chunk, keep, topk)
    if name in NAMES:
        return Dense(name, dense)
    raise ValueError(f"there is no codec '{name}'; use one of {', '.join(NAMES)}.")


def warm(c: Codec) -> None:
    """Compiles what is not compiled yet (10 s, once a machine), so that the first round does not wait for it."""
    one = np.ones(1, np.float32)
    payload = c.encode(one, one.copy(), 1.0)
    c.add(payload, one, 1.0)
    c.decode_norm(payload)
    c.dot(payload, one)


@cache
def _kernels() -> tuple[ModuleType, ModuleType]:
    try:
        from shoal.codec import fast_dense, fast_topk
    except ImportError:  # numba is in the extra [swarm]
        return plain_dense, plain_topk
    return fast_dense, fast_topk


def codec_of(payload: bytes | memoryview) -> Codec:
    """The codec that a payload says it was made with. The rest of it is checked when it is used."""
    said = header(payload)
    if said.codec != "topk":
        return codec(said.codec)
    try:
        return codec(said.codec, said.chunk, said.keep)
    except ValueError as e:
        raise BadPayload(str(e)) from None
