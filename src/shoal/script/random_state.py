"""The random numbers that a process will draw: Python's, NumPy's, torch's, and those of its GPU; as tensors."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch


def now() -> dict[str, torch.Tensor]:
    _, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    assert kind == "MT19937"  # the only one that NumPy's own functions know
    found = {
        "python": torch.tensor([*numbers, gauss is not None], dtype=torch.int64),
        "numpy": torch.tensor([*map(int, keys), int(position), int(has_gauss)], dtype=torch.int64),
        "gauss": torch.tensor([gauss or 0.0, cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def go_on(state: Mapping[str, torch.Tensor]) -> None:
    """From where `now` was."""
    *numbers, has = state["python"].tolist()
    gauss, cached = state["gauss"].tolist()
    random.setstate((3, tuple(numbers), gauss if has else None))
    *keys, position, has_gauss = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
