"""Memory of the CPU that a GPU reads and writes by itself."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shoal.errors import SetupError

LARGE = 64 << 20  # bytes; what is smaller may lie in a page with something else, and is sent quickly either way


def lock(tensors: Iterable[Tensor]) -> None:
    """Keeps large ones where they are, for as long as the process lives: their copies go at the speed of the bus.
    (torch's own locked memory is rounded up to a power of two: 22 GB take 34.)"""
    for tensor in tensors:
        if tensor.nbytes < LARGE:
            continue
        if code := int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)):
            raise SetupError(
                f"{tensor.nbytes / 2**30:.0f} GiB of this machine's memory could not be locked for the GPU (CUDA error "
                f"{code}): allow it by `ulimit -l unlimited` (a container: --ulimit memlock=-1), or set engine.offload "
                "to none."
            )
