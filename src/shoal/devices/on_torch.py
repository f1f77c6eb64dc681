"""What the GPU of a tensor can compute, as torch tells it. One place: a compute capability is NVIDIA's number, and the
HIP build of torch answers with AMD's own, which are as large and mean something else (MI250X is 9.0, as an H100)."""

from __future__ import annotations

import torch

from shoal.devices import amd
from shoal.errors import SetupError

EIGHT_BITS = (8, 9)  # the first of NVIDIA's that multiply 8 bits
HOPPER = (9, 0)  # the first of NVIDIA's whose kernels may begin before the one before has ended
TENSOR_CORES = (8, 0)  # the first of NVIDIA's with tf32, and torch's grouped product in bfloat16


def architecture(device: torch.device) -> str | None:
    """AMD's, such as gfx942; None of others."""
    if torch.version.hip is None or device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]


def eight_bits(device: torch.device) -> torch.dtype | None:
    """The 8-bit format with more digits that it multiplies; None where it has none."""
    if device.type != "cuda":
        return None
    if (arch := architecture(device)) is not None:
        kinds = {amd.E4M3FN: torch.float8_e4m3fn, amd.E4M3FNUZ: torch.float8_e4m3fnuz}
        return next((kind for names, kind in kinds.items() if arch.startswith(names)), None)
    return torch.float8_e4m3fn if torch.cuda.get_device_capability(device) >= EIGHT_BITS else None


def refuse_without_e4m3fn(device: torch.device) -> None:
    """SetupError where `train.precision: fp8` has no products; a processor computes them in float32."""
    if device.type != "cuda" or eight_bits(device) is torch.float8_e4m3fn:
        return
    name, arch = torch.cuda.get_device_name(device), architecture(device)
    why = None if arch is None else amd.without_e4m3fn(name, arch)
    raise SetupError(
        why
        or "train.precision fp8 needs a GPU with 8-bit products (L40S, RTX 4090, H100 and newer), which "
        f"{name} is not: take bf16."
    )


def has_tf32(device: torch.device) -> bool:
    return _nvidia_since(device, TENSOR_CORES)


def groups_products(device: torch.device) -> bool:
    """Whether torch multiplies all experts in one kernel there. Not tried on AMD: experts one after the other then."""
    return _nvidia_since(device, TENSOR_CORES)


def begins_early(device: torch.device) -> bool:
    """Whether a kernel may begin before the one before it has ended (programmatic dependent launch)."""
    return _nvidia_since(device, HOPPER)


def _nvidia_since(device: torch.device, generation: tuple[int, int]) -> bool:
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device) >= generation
