"""Every codec: what arrives, what is kept for the next round, which inputs it refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shoal.codec import NAMES, BadPayload, codec, codec_of

COUNTS = (1, 15, 16, 255, 256, 257, 4095, 4096, 4097, 70_001)


def vector(count: int, seed: int = 0) -> np.ndarray:
    """Heavy tails and scales from 1e-9 to 10, as updates of unlike layers have."""
    rng = np.random.default_rng(seed)
    scale = np.repeat(10.0 ** rng.uniform(-9, 1, count // 1000 + 1), 1000)[:count]
    return (rng.standard_t(3, count) * scale).astype(np.float32)


def decoded(name: str, payload: bytes, count: int) -> np.ndarray:
    out = np.zeros(count, np.float32)
    codec(name).add(payload, out, 1.0)
    return out


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", COUNTS)
def test_what_was_sent_and_what_was_kept_are_the_values(name: str, count: int) -> None:
    values, residual = vector(count), vector(count, 1)
    whole = values + np.float32(0.95) * residual
    payload = codec(name).encode(values, residual, 0.95)
    sent = decoded(name, payload, count)
    assert np.array_equal(residual, whole - sent)
    assert len(payload) <= codec(name).most_bytes(count)
    alone = codec(name).encode(whole)
    assert alone == payload


@pytest.mark.parametrize(
    ("name", "bits", "error"),
    [("bf16", 16.01, 0.003), ("int8", 8.1, 0.02), ("int4", 4.2, 0.25), ("2bit", 2.1, 0.4), ("topk", 0.16, 0.96)],
)
def test_bits_and_error_of_each_rung(name: str, bits: float, error: float) -> None:
    values = np.random.default_rng(0).standard_normal(1 << 18).astype(np.float32)
    payload = codec(name).encode(values)
    assert len(payload) * 8 / len(values) <= bits
    lost = values - decoded(name, payload, len(values))
    assert np.linalg.norm(lost) <= error * np.linalg.norm(values)


@pytest.mark.parametrize("name", NAMES)
def test_feedback_sends_everything_in_the_end(name: str) -> None:
    """What is asked for in each of many rounds arrives on the mean."""
    values = np.random.default_rng(0).uniform(0.5, 1.5, 4096).astype(np.float32)
    residual, total = np.zeros_like(values), np.zeros_like(values)
    c = codec(name, 4096, 512)
    for _ in range(200):
        c.add(c.encode(values, residual, 1.0), total, 1 / 200)
    assert np.abs(total - values).max() < 0.1


def test_topk_sends_the_largest_of_each_chunk_and_of_equal_ones_the_first() -> None:
    values = vector(3 * 4096 + 100)
    values[:4096] = 0
    values[4096:8192] = 1
    index, value = codec("topk").entries(codec("topk").encode(values))  # type: ignore[attr-defined]
    assert list(index[:64]) == list(range(4096, 4160))
    assert (value[:64] == 1).all()
    third = index[(index >= 8192) & (index < 12288)]
    assert sorted(third) == sorted(8192 + np.argsort(-np.abs(values[8192:12288]), kind="stable")[:64])
    assert len(index) == 64 + 64 + 2
    assert (np.sign(value) == np.sign(values[index])).all()


def test_topk_sends_no_zeros() -> None:
    values = np.zeros(4096, np.float32)
    values[[5, 4000]] = 2, -2
    c = codec("topk")
    payload = c.encode(values)
    assert [part.tolist() for part in c.entries(payload)] == [[5, 4000], [2, -2]]  # type: ignore[attr-defined]
    assert len(payload) < 40


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", COUNTS)
def test_norm_and_product_are_those_of_the_decoded(name: str, count: int) -> None:
    c, values, other = codec(name), vector(count), vector(count, 2)
    payload = c.encode(values)
    out = decoded(name, payload, count).astype(np.float64)
    assert c.decode_norm(payload) == pytest.approx(math.sqrt(out @ out))
    assert c.dot(payload, other) == pytest.approx(out @ other, rel=1e-9, abs=1e-12 * float(np.linalg.norm(out)))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_zeros_and_the_very_small(name: str) -> None:
    c = codec(name)
    assert c.decode_norm(c.encode(np.zeros(0, np.float32))) == 0
    c.add(c.encode(np.zeros(0, np.float32)), np.zeros(0, np.float32), 1.0)
    assert c.decode_norm(c.encode(np.zeros(5000, np.float32))) == 0
    tiny, residual = np.full(5000, 1e-42, np.float32), np.zeros(5000, np.float32)
    sent = decoded(name, c.encode(tiny, residual, 1.0), 5000)
    assert np.array_equal(sent + residual, tiny)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2e38])
@pytest.mark.parametrize("where", ["values", "residual"])
def test_what_is_no_number_is_refused_and_the_residual_stays(name: str, bad: float, where: str) -> None:
    values, residual = vector(9000), vector(9000, 1)
    (values if where == "values" else residual)[8000] = bad
    before = residual.copy()
    with pytest.raises(ValueError, match="training has diverged"):
        codec(name).encode(values, residual, 0.9)
    if where == "values":
        assert np.array_equal(residual, before)


def test_wrong_arguments_are_one_sentence() -> None:
    with pytest.raises(ValueError, match="no codec 'zip'; use one of bf16, int8"):
        codec("zip")
    with pytest.raises(ValueError, match="cannot keep 5000 of 4096"):
        codec("topk", 4096, 5000)
    with pytest.raises(ValueError, match="values has to be a float32 vector"):
        codec("int8").encode(np.zeros(3))  # type: ignore[arg-type]  # which is the point
    with pytest.raises(ValueError, match="residual has 2 values where 3 belong"):
        codec("int8").encode(np.zeros(3, np.float32), np.zeros(2, np.float32), 1.0)
    with pytest.raises(ValueError, match="contiguous"):
        codec("int8").encode(np.zeros(6, np.float32)[::2])


def test_a_payload_says_what_it_is_and_others_are_refused() -> None:
    values = vector(5000)
    payload = codec("topk", 1024, 8).encode(values)
    assert codec_of(payload) == codec("topk", 1024, 8)
    assert codec_of(codec("int4").encode(values)) == codec("int4")
    into = np.zeros(5000, np.float32)
    with pytest.raises(BadPayload, match=r"is topk \(8 of 1024\) of 5,000 parameters, and topk \(64 of 4096\)"):
        codec("topk").add(payload, into, 1.0)
    with pytest.raises(BadPayload, match="and int8 of 5,000 parameters was agreed on"):
        codec("int8").add(payload, into, 1.0)
    with pytest.raises(BadPayload, match="of 5,000 parameters, and"):
        codec("topk", 1024, 8).add(payload, into[1:], 1.0)
    codec("topk", 1024, 8).add(memoryview(b"x" + payload)[1:], into, 1.0)
    assert into.any()
