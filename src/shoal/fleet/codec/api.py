"""What a codec does, and the five that there are."""

from __future__ import annotations

from typing import Protocol

from shoal.fleet.codec import plain_dense, plain_topk
from shoal.fleet.codec.dense import Dense
from shoal.fleet.codec.frame import NAMES, Floats, header
from shoal.fleet.codec.topk import TopK


class Codec(Protocol):
    """Makes payloads of vectors and adds them up. A payload means the same bits on every machine."""

    @property
    def name(self) -> str: ...

    def encode(self, values: Floats, residual: Floats | None = None, decay: float = 1.0) -> bytes:
        """A payload of v = values + decay * residual. What is lost of v is left in `residual`, in place.

        Raises ValueError where v is infinite, no number or beyond 2**100; the residual is then as it was.
        """
        ...

    def add(self, payload: bytes | memoryview, into: Floats, weight: float) -> None:
        """into += weight * decoded, in float32. Raises `BadPayload`; `into` is then as it was."""
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


def codec(name: str, chunk: int = 4096, keep: int = 64) -> Codec:
    """By its name in the run file; `chunk` and `keep` are for topk alone."""
    if name == "topk":
        return TopK(chunk, keep, plain_topk)
    if name in NAMES:
        return Dense(name, plain_dense)
    raise ValueError(f"there is no codec '{name}'; use one of {', '.join(NAMES)}.")


def codec_of(payload: bytes | memoryview) -> Codec:
    """The codec that a payload says it was made with. The rest of it is checked when it is used."""
    said = header(payload)
    return codec(said.codec, said.chunk, said.keep) if said.codec == "topk" else codec(said.codec)
