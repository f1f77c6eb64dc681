"""Chooses GPUs or the processor, and refuses what the GPUs here cannot do, before anything starts. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from shoal import devices
from shoal.decide.decision import Choices
from shoal.devices import amd, torch_build
from shoal.devices.here import vendor
from shoal.errors import SetupError, SpecError
from shoal.spec.run import Run

MAKERS = {"nvidia": "NVIDIA", "amd": "AMD"}
NEEDS = {"nvidia": ("cuda", "CUDA"), "amd": ("rocm", "ROCm")}
TRITON_ON_A_CPU = (
    "train.kernels triton is for GPUs, and this run computes on the processor, where it would do nothing: "
    "take plain or auto."
)
TRITON_ON_AMD = (
    "train.kernels triton was written and measured for NVIDIA's GPUs, and those here are AMD's: take plain or auto."
)


EXACT_ON_A_GPU = "train.kernels exact is for processors so far: take another, or set resources.device to cpu."
EXACT_IN_16_BITS = "train.kernels exact computes in float32 on a processor: set train.precision to fp32."


@dataclass(frozen=True)
class Chosen:
    device: str  # cpu or cuda; torch calls AMD's GPUs so too
    gpus: int


def choose_device(run: Run, choices: Choices, started: bool) -> Chosen:
    """`started`: somebody else started the processes, and knows where their GPUs are."""
    count, asked = devices.visible_gpus(), run.resources.device
    whose = vendor() if count else None
    why, usable = f"GPUs visible: {count}", count
    if whose is not None and (built := torch_build.build()) is not None and built != NEEDS[whose][0]:
        why = (
            f"GPUs visible: {count} of {MAKERS[whose]}, and torch {torch_build.version()} was built without "
            f"{NEEDS[whose][1]}"
        )
        # An AMD processor often has a small GPU of its own, on which nobody means to train.
        if asked == "cuda" or (asked == "auto" and whose == "nvidia"):
            raise SetupError(f"{why}: install the one for {NEEDS[whose][1]}, or set resources.device to cpu.")
        usable = 0
    device = choices.choose("resources.device", asked, "cuda" if usable else "cpu", why)
    if device == "cuda" and not usable and not started:
        raise SetupError(
            "resources.device is cuda but no GPU is visible here: set it to cpu or auto, or check nvidia-smi (of AMD: "
            "rocm-smi, and that this user may open /dev/kfd)."
        )
    return Chosen(device, usable)


def kernels_for(device: str) -> tuple[str, str]:
    """The kernels that suit it, and why."""
    if device != "cuda":
        return "plain", "no GPU"
    return ("plain", "GPUs of AMD, on which ours were never tried") if vendor() == "amd" else ("triton", "a GPU")


def refuse_what_these_cannot(device: str, precision: str, kernels: str) -> None:
    """8 bits in a format that the GPUs here do not have, kernels that were not written for what is here."""
    if kernels == "exact":
        if device != "cpu":
            raise SetupError(EXACT_ON_A_GPU)
        if precision != "fp32":
            raise SpecError(EXACT_IN_16_BITS)
    if device == "cpu":
        if kernels == "triton":
            raise SetupError(TRITON_ON_A_CPU)
        return
    if vendor() != "amd":
        return
    if kernels == "triton":
        raise SetupError(TRITON_ON_AMD)
    if precision != "fp8":
        return
    for gpu in devices.gpus():
        if gpu.arch is not None and (why := amd.without_e4m3fn(gpu.name, gpu.arch)):
            raise SetupError(why)
