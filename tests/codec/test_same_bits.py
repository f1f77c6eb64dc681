"""The compiled kernels and the plain ones make the same payloads, residuals and sums, bit for bit."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from shoal.codec import NAMES, codec
from tests.codec.test_codecs import vector

pytest.importorskip("numba")
SETTINGS = [(name, 4096, 64) for name in NAMES] + [
    ("topk", chunk, keep) for chunk, keep in ((16, 1), (16, 16), (100, 7), (1024, 1024), (65536, 3), (4096, 1000))
]


def inputs(kind: str, count: int) -> np.ndarray:
    values = vector(count)
    values[::17] = -0.0
    if kind == "ties":
        values = np.round(values)
    elif kind == "equal":
        values[:] = -2
    elif kind == "zeros":
        values[:] = 0
    elif kind == "tiny":
        values[:] = 1e-42
    elif kind == "clustered":
        values *= (np.arange(count) // 50 % 20 == 0).astype(np.float32)
    elif kind == "one large":
        values[count // 2] = 1e30
    return values


def bits(x: np.ndarray) -> list[int]:
    return list(x.view(np.uint32))


@pytest.mark.parametrize(("name", "chunk", "keep"), SETTINGS)
@pytest.mark.parametrize("count", [1, 3, 255, 4097, 70_001])
def test_compiled_and_plain_agree(name: str, chunk: int, keep: int, count: int) -> None:
    fast, plain = codec(name, chunk, keep), codec(name, chunk, keep, plain=True)
    assert fast.kernels is not plain.kernels  # type: ignore[attr-defined]
    for kind in ("any", "ties", "equal", "zeros", "tiny", "clustered", "one large"):
        values, residual = inputs(kind, count), vector(count, 1) * np.float32(kind == "any")
        ours, theirs = residual.copy(), residual.copy()
        payload = fast.encode(values, ours, 0.95)
        assert payload == plain.encode(values, theirs, 0.95)
        assert bits(ours) == bits(theirs)
        assert fast.encode(values) == plain.encode(values)
        ours, theirs = vector(count, 2), vector(count, 2)
        fast.add(payload, ours, 0.3)
        plain.add(payload, theirs, 0.3)
        assert bits(ours) == bits(theirs)
        assert fast.decode_norm(payload) == plain.decode_norm(payload)
        assert fast.dot(payload, values) == plain.dot(payload, values)
        if name == "topk":
            for a, b in zip(fast.entries(payload), plain.entries(payload), strict=True):  # type: ignore[attr-defined]
                assert np.array_equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_the_bits_are_those_of_the_format(name: str) -> None:
    """Version 1 of the format, on whatever machine this runs: whoever changes a digest changes the version."""
    values = ((np.arange(10_000) * 7919 % 8191 - 4096) / 3000).astype(np.float32)
    residual = values[::-1].copy()
    c = codec(name)
    payload = c.encode(values, residual, 0.95)
    out = values.copy()
    c.add(payload, out, 0.3)
    digest = hashlib.sha256(payload + residual.tobytes() + out.tobytes()).hexdigest()[:16]
    assert digest == DIGESTS[name]


DIGESTS = {
    "bf16": "a039caec304ea5e6",
    "int8": "e115401c30a38b41",
    "int4": "6af770fb5282ec16",
    "2bit": "dba2924ab0a9ae1f",
    "topk": "6012658ad24f9513",
}
