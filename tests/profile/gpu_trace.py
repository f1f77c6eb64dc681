"""A trace as a GPU would leave it, small enough to be worked out by hand: streams that overlap, gaps, NCCL.

Each step is 1,000 µs long on the host; the GPU follows 100 µs behind. `EXPECTED` is what it comes to, in µs a step.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

PHASES = {
    "data": (0, 50), "exchange": (50, 60), "forward": (60, 300), "backward": (300, 700), "clip": (700, 760),
    "optimizer": (760, 900), "record": (900, 1000),
}  # fmt: skip
BF16, VOCABULARY = "c10::BFloat16", 1000
ADAM = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor>"
# name, launched, begin, end, stream, operator, its inputs
KERNELS: tuple[tuple[str, float, float, float, int, str, list[list[int]]], ...] = (
    ("Memcpy HtoD (Pinned -> Device)", 70, 100, 110, 7, "aten::_to_copy", [[8, 512]]),
    ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", 80, 110, 210, 7, "aten::mm", [[4096, 2048], [2048, 2048]]),
    ("triton_red_fused__fused_rms_norm_add_mm_0", 90, 212, 252, 7, "triton_red_fused__fused_rms_norm_add_mm_0", []),
    ("void flash_fwd_kernel<cutlass::bf16>(Params)", 100, 252, 332, 7, "aten::_flash_attention_forward", []),
    ("triton_red_fused_7", 110, 332, 352, 7, "triton_red_fused_7", [[4096, VOCABULARY]]),  # over logits: loss
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_nt_n", 400, 405, 505, 7, "aten::mm", [[2048, 4096], [4096, 2048]]),
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 410, 450, 600, 20, "c10d::allreduce_", []),
    ("triton_poi_fused_mul_silu_silu_backward_3", 420, 520, 560, 7, "triton_poi_fused_mul_silu_silu_backward_3", []),
    ("triton_poi_fused_add_mm_4", 430, 600, 640, 7, "triton_poi_fused_add_mm_4", []),
    ("void cutlass::device_kernel<cutlass::gemm::Foo>(Bar)", 440, 620, 660, 8, "aten::_scaled_mm", []),
    ("void at::native::lpnorm_cleanup<float>(float*)", 705, 710, 730, 7, "aten::_foreach_norm", []),
    ("Memcpy DtoH (Device -> Pageable)", 733, 735, 740, 7, "aten::_local_scalar_dense", []),
    (ADAM, 770, 780, 880, 7, "aten::_fused_adamw_", []),
    ("mystery_kernel_v2", 910, 915, 925, 7, "", []),
)
EXPECTED = {
    "data": 10 + 50,  # the copy, and the time in which the GPU had nothing to do because the host waited for data
    "matmul": 100 + 100 + 10 + 20,  # at 620 to 640 two kernels share the GPU
    "norm": 40,
    "attention": 80,
    "loss": 20,
    "elementwise": 40 + 20 + 10,
    "communication": 15 + 40,  # 505 to 520 and 560 to 600
    "optimizer": 20 + 5 + 100,  # clipping, the copy of the gradient norm, the update
    "copy": 0,
    "unaccounted": 10,
    "idle": 310,
}
HIDDEN = 55 + 40  # of communication: 450 to 505 and 520 to 560
BETWEEN = 2 + 5 + 5 + 2 + 10 + 5 + 30
LATE = {"backward": 48 + 40, "clip": 5 + 3 + 20, "optimizer": 10 + 20, "record": 10 + 75, "exchange": 10, "forward": 10}


def write(file: Path, steps: int = 2, **about: Any) -> Path:
    """`steps` that count, and one that ends the last of them."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}]
    for i in range(steps + 1):
        at = 1000.0 * i
        events.append(_event("user_annotation", f"ProfilerStep#{i}", at, at + 1000, 1))
        events.append(_event("gpu_user_annotation", f"ProfilerStep#{i}", at + 100, at + 1100, 7))  # says nothing new
        events += [_event("user_annotation", f"shoal:{name}", at + b, at + e, 1) for name, (b, e) in PHASES.items()]
        events += [event for k, kernel in enumerate(KERNELS) for event in _launch(at, 100 * i + k + 1, *kernel)]
    told = {"format": 1, "run": "synthetic", "rank": 0, "world": 1, "steps": steps, "step_s": [1e-3] * steps,
            "vocab_size": VOCABULARY, "dim": 2048, "device": "NVIDIA H200", "untraced_step_s": 0.9e-3,
            "tokens_per_step": 4096, **about}  # fmt: skip
    content = {"shoal": told, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], "traceEvents": events}
    with gzip.open(file, "wt") as out:
        json.dump(content, out)
    return file


def _launch(
    at: float, number: int, name: str, launched: float, begin: float, end: float, stream: int, operator: str,
    dims: list[list[int]],
) -> list[dict[str, Any]]:  # fmt: skip
    """The operator on the host, its call of the runtime, and what that made the GPU do."""
    copy = name.startswith("Memcpy")
    found = [
        _event("cuda_runtime", "cudaMemcpyAsync" if copy else "cudaLaunchKernel", at + launched, at + launched + 2, 1,
               correlation=number, **{"External id": number}),
        _event("gpu_memcpy" if copy else "kernel", name, at + begin, at + end, stream, stream=stream, device=0,
               correlation=number, **({"External id": number} if operator else {})),
    ]  # fmt: skip
    if operator:
        inputs = {"Input Dims": dims, "Input type": [BF16] * len(dims)} if dims else {}
        found.append(
            _event("cpu_op", operator, at + launched - 1, at + launched + 3, 1, **inputs, **{"External id": number})
        )
    if operator == "aten::_local_scalar_dense":
        found.append(
            _event("cuda_runtime", "cudaStreamSynchronize", at + launched + 2, at + launched + 2.5, 1, correlation=0)
        )
    return found


def _event(cat: str, name: str, begin: float, end: float, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": begin, "dur": end - begin, "args": args}
