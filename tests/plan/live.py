"""Counts the bytes of all tensors that are alive, as operators make them and Python and autograd let go of them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """While entered, `bytes` is what is alive of the storages that appeared since."""

    def __init__(self, *known: Tensor) -> None:
        """`known`: tensors to leave out, parameters for one."""
        super().__init__()
        self._known = {plain(t).untyped_storage()._cdata for t in known}
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @property
    def bytes(self) -> int:
        """Sizes are asked for now: FSDP frees what it has gathered by making it empty."""
        return sum(storage.nbytes() for ref in self._seen.values() if (storage := ref()) is not None)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = plain(tensor).untyped_storage()
                if storage._cdata not in self._known:
                    self._seen[storage._cdata] = weakref.ref(storage)
        return result


def plain(tensor: Tensor) -> Tensor:
    """The memory behind a wrapper; a DTensor says how large the whole is, of which it has a part."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.elem
    return tensor
