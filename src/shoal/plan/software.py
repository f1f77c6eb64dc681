"""What the program that trains can do, as far as speed depends on it: facts about frameworks, no fitted numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum


class Attention(IntEnum):
    """How attention is computed."""

    SCORES = 0  # the square of scores goes through memory
    FLASH = 1  # fused, by kernels that use what all GPUs have
    NATIVE = 2  # fused, by kernels made for the device


@dataclass(frozen=True)
class Software:
    year: float | None = None  # when it was released; None: unknown
    attention: Attention = Attention.NATIVE
    hides_tp: bool = False  # tensor parallelism's traffic goes on beside products
    hides_dp: bool = True  # and data parallelism's beside the backward pass
    fused: bool = True  # norms, activations and the loss are fused, by hand or by a compiler
    stream_bytes: float = 2.0  # of a number between layers
    passes: float = 1.0  # over it, against what is usual
    host: float = 1.0  # of what a step usually costs the host
    sends_once: bool = False  # a token goes once to a node, however many of its experts are there
    narrow_gradients: bool = False  # in 16 bits, where weights are computed with in 16 bits
    logit_moved: float | None = None  # bytes through memory for each logit; None: as is usual, which is fitted
    param_moved: float | None = None  # and for each parameter in the update
    cast_moved: float | None = None  # and for each number that is made narrow
    narrow_head: bool = False  # the output layer is computed in the run's own precision
    logit_bytes: float = 10.0  # held of each logit: 32 bits, their gradient in 32 and again in 16; less where fused
    balances: bool = False  # a pipeline's stages are cut by cost, not by the number of layers
    ring_gradient_bytes: float = 2.0  # of a number, as gradients of keys and values go around a ring
    merges: bool = False  # a ring's pieces are added up by kernels of their own; an exchange's are put in order
    gathers_once: bool = False  # FSDP: gradients stay whole over micro-batches, and a pipeline's weights over a step


# The first release of FlashAttention that frameworks took up; before it the scores went through memory.
FLASH_SINCE = 2022.9
# Transformer Engine's and cuDNN's kernels for the newest GPUs, and tensor parallelism's traffic beside products
# (userbuffers), are in NVIDIA's own stack from here on.
VENDOR_SINCE = 2023.3
# Its recipes reduce gradients in 16 bits from here on (logs: 4 bytes a parameter and 12 shared, Llama 3.1 8B, 44.3 GB).
NARROW_SINCE = 2024.0
# DeepEP and HybridEP, whose dispatch copies a token inside a node and not on the way there.
SENDS_ONCE_SINCE = 2025.3


def software(text: str, architecture_year: float) -> Software:
    """Of a framework's name and version as people write them, such as `NeMo 25.04.01`. Where no date can be told, it
    is taken to be two and a half years younger than the accelerator's architecture."""
    words = text.lower()
    year = _year(words)
    when = architecture_year + 2.5 if year is None else year
    if re.search(r"maxtext|paxml|jax|xla|axlearn|neuron", words):  # compiled whole: all of it is fused
        return Software(year, Attention.NATIVE, hides_tp=True, logit_bytes=6.0)
    if "megatron-deepspeed" in words or "gpt-neox" in words:  # forks of 2021, without the later kernels
        return Software(year, Attention.SCORES, hides_dp=False, fused=False)
    vendor = re.search(r"megatron|nemo|transformer.?engine|dgxc|primus|mlperf", words) is not None
    if when < FLASH_SINCE:
        return Software(year, Attention.SCORES, hides_dp=vendor, fused=False)
    if vendor and when >= VENDOR_SINCE:
        return Software(
            year,
            Attention.NATIVE,
            hides_tp=True,
            sends_once=when >= SENDS_ONCE_SINCE,
            narrow_gradients=when >= NARROW_SINCE,
            logit_bytes=6.0,
        )
    return Software(year, Attention.FLASH, fused=_compiles(words, when))


def _compiles(words: str, when: float) -> bool:
    """Whether plain PyTorch is compiled, or has hand-written fused kernels."""
    return re.search(r"torchtitan|compile|liger|shoal|unsloth", words) is not None


def _year(words: str) -> float | None:
    """2024-07, 2024, `NeMo 24.11`; the first that is there."""
    if "llm foundry" in words:  # names no version; its tables are of that summer
        return 2023.5
    if found := re.search(r"\b(20[12]\d)-(0[1-9]|1[0-2])", words):
        return int(found[1]) + int(found[2]) / 12
    if found := re.search(r"\b(?:nemo|paxml|container|release|summary)\s*v?(2\d)\.(0[1-9]|1[0-2])", words):
        return 2000 + int(found[1]) + int(found[2]) / 12
    if found := re.search(r"\b(20[12]\d)\b", words):
        return int(found[1]) + 0.5
    return None
