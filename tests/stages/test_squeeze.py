"""What travels between stages: sizes, errors, and payloads that are none."""

from __future__ import annotations

import pytest
import torch

from shoal.model.decoder import Decoder
from shoal.spec.model import Model
from shoal.spec.shape import shape_of
from shoal.stages.squeeze import BadPayload, Squeeze
from shoal.stages.subspace import Space, basis, confine, whole

# Of normal numbers: the error that so many bits must leave, with a little room.
LARGEST = {"fp32": 0.0, "bf16": 0.002, "int8": 0.008, "int4": 0.11, "int2": 0.5}


@pytest.mark.parametrize("name", LARGEST)
@pytest.mark.parametrize("width", [96, 128, 37])
def test_what_comes_out_is_what_went_in_but_for_the_bits(name: str, width: int) -> None:
    squeeze = Squeeze(name, width)
    values = torch.randn(3, 5, width, generator=torch.Generator().manual_seed(0)) * 1e-6
    values[1, 2] = 0
    payload = squeeze.encode(values)
    assert len(payload) == squeeze.nbytes(15)
    back = squeeze.decode(payload, (3, 5, width))
    assert (back - values).norm() <= LARGEST[name] * values.norm()
    assert squeeze.encode(values) == payload
    assert not back[1, 2].any()


def test_a_payload_of_another_length_or_without_numbers_is_refused() -> None:
    squeeze = Squeeze("int8", 64)
    payload = squeeze.encode(torch.ones(4, 64))
    for wrong in (payload[:-1], payload + b"x", b""):
        with pytest.raises(BadPayload):
            squeeze.decode(wrong, (4, 64))
    with pytest.raises(BadPayload, match="not finite"):
        squeeze.decode(b"\xff" * len(payload), (4, 64))
    with pytest.raises(FloatingPointError):
        squeeze.encode(torch.full((4, 64), float("nan")))


def test_a_confined_model_is_a_plain_one_whose_cuts_need_only_coordinates() -> None:
    shape = shape_of(Model(dim=32, layers=2, heads=2, vocab_size=64, tie_embeddings=False))
    space = Space(shape, 8, seed=1, device="cpu")
    torch.testing.assert_close(space.u.T @ space.u, torch.eye(8))
    assert torch.equal(space.u, basis(32, 8, 1))
    stages = [Decoder(shape, range(1)), Decoder(shape, range(1, 2))]
    for decoder in stages:
        confine(decoder, space)
        decoder.init_weights(3)
    tokens = torch.arange(10)[None] % 64
    hidden = stages[0](tokens)
    coordinates = space.narrow(hidden, tokens)  # [1, 10, 8]
    torch.testing.assert_close(space.widen(coordinates, tokens), hidden)
    plain = Decoder(shape)
    plain.load_state_dict({**whole(stages[0], space), **whole(stages[1], space)})
    torch.testing.assert_close(plain(tokens), stages[1](hidden), rtol=1e-4, atol=1e-5)
