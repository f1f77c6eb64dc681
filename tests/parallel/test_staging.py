"""A batch reaches the device as it was made, by one copy."""

from __future__ import annotations

import numpy as np
import torch

from shoal.parallel.staging import in_one_copy, on_device

CPU = torch.device("cpu")


def test_packed_in_32_bits_a_batch_arrives_as_it_was() -> None:
    chance = np.random.default_rng(0)
    tokens = chance.integers(0, 2**31 - 1, (3, 8))
    targets = np.where(tokens % 2, tokens, -100)
    documents = chance.integers(0, 5, (3, 16)).astype(np.int32)  # of whole rows, where several processes share them
    cut = tokens[:, ::2]  # not contiguous
    arrays = [tokens, targets, cut, documents]
    for made in (in_one_copy(arrays, CPU, pin=False), on_device(arrays, CPU)):
        for array, tensor in zip(arrays, made, strict=True):
            assert torch.from_numpy(array[:0]).dtype == tensor.dtype
            assert np.array_equal(array, tensor.numpy())


def test_it_is_one_copy_of_half_the_bytes() -> None:
    """To a device that holds nothing, which is how a GPU looks from here."""
    copies: list[int] = []
    to = torch.Tensor.to

    def counted(self: torch.Tensor, *args: object, **more: object) -> torch.Tensor:
        if args and isinstance(args[0], torch.device):
            copies.append(self.numel() * self.element_size())
        return to(self, *args, **more)  # type: ignore[call-overload]

    torch.Tensor.to = counted  # type: ignore[method-assign, assignment]
    try:
        made = on_device([np.zeros((2, 8), np.int64)] * 3, torch.device("meta"))
    finally:
        torch.Tensor.to = to  # type: ignore[method-assign]
    assert copies == [3 * 2 * 8 * 4]
    assert [t.dtype for t in made] == [torch.int64] * 3
