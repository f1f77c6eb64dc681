"""What time is spent on, and which names mean it.

A name is that of a kernel (cuBLAS, cuDNN, Triton, ATen's own), of an operator, or of an autograd function. Patterns are
tried in order, and the first one wins: attention comes before products since FlashAttention is built with CUTLASS.
"""

from __future__ import annotations

import re
from functools import cache

MATMUL, ATTENTION, NORM, LOSS, OPTIMIZER = "matmul", "attention", "norm", "loss", "optimizer"
ELEMENTWISE, COMMUNICATION, COPY, DATA, IDLE = "elementwise", "communication", "copy", "data", "idle"
UNACCOUNTED = "unaccounted"

ABOUT = {
    MATMUL: "products of matrices, the head's among them",
    ATTENTION: "attention kernels",
    NORM: "RMSNorm",
    LOSS: "softmax and cross-entropy; the head's products are matmul",
    OPTIMIZER: "update, clipping, gradient norm",
    ELEMENTWISE: "activations, residuals, rotary, casts, embedding",
    COMMUNICATION: "exposed: nothing computes meanwhile",
    COPY: "between host and device, and inside it",
    DATA: "the step waits for its batch",
    IDLE: "gaps: nothing runs",
    UNACCOUNTED: "not recognised, or not in the trace",
}
KINDS = tuple(ABOUT)

_COMMUNICATION = re.compile(
    r"nccl|rccl|gloo|c10d::|_c10d_functional|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|nvshmem|symm_mem"
    r"|multimem|sendrecv|^broadcast_|memcpy ptop",
    re.IGNORECASE,
)
_ATTENTION = re.compile(
    r"flash|fmha|sdpa|attention|attn|flex_|\bmha|scaled_dot_?product|dot_do_o|convert_dq",
    re.IGNORECASE,
)
# Products as libraries and the compiler call them. `splitK` is the sum after a product that was cut.
_MATMUL = re.compile(
    r"nvjet|gemm|gemv|cutlass|cublas|xmma|wgmma|tensorop|magma|split_?k|tinygemm|mkldnn_matmul"
    r"|^triton_(tem|mm)\w*(mm|bmm|linear|matmul)|(^|_|::)(scaled_|grouped_|add|badd|sparse_)?b?mm(_|$|\.|\b)|matmul"
    r"|^aten::(linear|dot|mv|addmv|einsum|_?baddbmm)|\bKernel2\b",
    re.IGNORECASE,
)
_LOSS = re.compile(
    r"cross_?entropy|log_?softmax|nll_loss|logsumexp|linear_ce|_ce_|\bce_|(?<![a-z])loss(?![a-z])", re.IGNORECASE
)
# In a fused backward pass a norm is known by the square of its input alone.
_NORM = re.compile(r"rms_?norm|layer_?norm|group_?norm|rsqrt|fused\w*_pow(_|$)", re.IGNORECASE)
_OPTIMIZER = re.compile(r"adam|lamb|muon|sgd|newton_?schulz|lerp", re.IGNORECASE)
_COPY = re.compile(r"^memcpy|^memset", re.IGNORECASE)
# What ATen, cub and the compiler generate for everything that goes over elements once or twice.
_ELEMENTWISE = re.compile(
    r"elementwise|at::native|at_cuda_detail|^cub::|cub::Device|thrust|^triton_(poi|red|per|for|mix|split|unk)_?"
    r"|cpp_fused|reduce_kernel|softmax|catarray|fillfunctor|embedding|index|gather|scatter|sort|scan|rope|rotary|swi?glu|silu"
    r"|gelu|relu|sigmoid|quant|dequant|amax|abs_?max|cast|convert|transpose|permute|pad|copy|random|philox|dropout|multi_tensor"
    r"|CompiledFxGraph|CompiledFunction|^aten::|^prims::|^torchao|^quantized::|^_?foreach|^shoal::|mul_out",
    re.IGNORECASE,
)
_AROUND_COLLECTIVES = re.compile(r"^fsdp::")  # into and out of the buffers that travel
_BY_NAME = (
    (ELEMENTWISE, _AROUND_COLLECTIVES),
    (COMMUNICATION, _COMMUNICATION),
    (ATTENTION, _ATTENTION),
    (MATMUL, _MATMUL),
    (COPY, _COPY),
    (OPTIMIZER, _OPTIMIZER),
    (LOSS, _LOSS),
    (NORM, _NORM),
    (ELEMENTWISE, _ELEMENTWISE),
)
# A fused kernel is named after all operators that it came from, also the product or collective that its result goes to.
_FUSED = re.compile(r"^(triton_(poi|red|per|for|mix|split)|\w*cpp_fused)")
_OF_FUSED = (OPTIMIZER, LOSS, NORM, ELEMENTWISE)
# Python, autograd's engine and the compiler's entrance: what is around operators and computes nothing itself.
_AROUND = re.compile(
    r"^autograd::|Backward\d*$|^torch::autograd|^ProfilerStep|^Optimizer\.|^shoal:(?!:)|^DistributedDataParallel|^FSDP"
    r"|^Torch-Compiled|^TorchDynamo|^Pregraph|^AOTDispatcher|^## |^_?[A-Z]\w*$|^nn\.Module|^detach_?$"
    r"|^cuda[A-Z]|^cu[A-Z]"
)


@cache
def kind_of_name(name: str) -> str | None:
    """None where no pattern matches."""
    fused = _FUSED.search(name)
    for kind, pattern in _BY_NAME:
        if (not fused or kind in _OF_FUSED) and pattern.search(name):
            return kind
    return None


@cache
def is_around(name: str) -> bool:
    """Whether time in this event alone, and in none inside it, is the host's and not an operator's."""
    return bool(_AROUND.search(name))
