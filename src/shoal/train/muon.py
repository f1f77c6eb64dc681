"""Muon: momentum, then the nearest orthogonal matrix, for the matrices of the blocks (Jordan et al., 2024).

torch.optim.Muon orthogonalises in bfloat16 and, on sharded matrices, lets DTensor guess the communication. Here whole
matrices are orthogonalised: the update does not depend on the layout, and on a CPU it is float32, so two layouts give
the same curve. Those whose rows FSDP has cut are shared out over its processes (`muon_shares`); one that is cut in
another way (tensor parallelism) is gathered and orthogonalised on every process, and each keeps its own slice.
A stack of experts [experts, rows, columns] is as many matrices, and a process gathers and computes only its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from shoal.train.muon_shares import rows_over, shared_out

# Coefficients of the quintic iteration: chosen by Jordan for the steepest slope at zero, not for exact convergence.
A, B, C = 3.4445, -4.7750, 2.0315
ITERATIONS = 5


# Root mean square of an update of AdamW, which Muon's is scaled to: "Muon is Scalable for LLM Training" (Moonlight; Liu
# et al., 2025) measured 0.2 to 0.4. An orthogonal matrix has 1 / sqrt(its longer side).
ADAMW_RMS = 0.2


class Muon(torch.optim.Optimizer):
    """`matched`: updates as large as AdamW's, so that one rate (and one decay) is right for both."""

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float,
        momentum: float,
        weight_decay: float,
        matched: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.matched = matched

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are for line search
        for group in self.param_groups:
            for p, update in self._updates(group):
                scale = update_scale(p.shape[-2], p.shape[-1], self.matched)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * scale)

    def _updates(self, group: dict[str, Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each matrix with its orthogonal update."""

        def nesterov(p: torch.Tensor) -> torch.Tensor:
            buffer = self.state[p]["momentum"]
            buffer.lerp_(p.grad, 1 - group["momentum"])
            return p.grad.lerp(buffer, group["momentum"])  # type: ignore[union-attr]  # those without are left out

        moved = [p for p in group["params"] if p.grad is not None]
        yield from shared_out([p for p in moved if rows_over(p)], nesterov, orthogonalise)
        yield from ((p, _orthogonal_like(nesterov(p))) for p in moved if not rows_over(p))


def update_scale(rows: int, columns: int, matched: bool) -> float:
    """What an orthogonal update of a matrix is multiplied by, besides the rate."""
    if matched:
        return float(ADAMW_RMS * max(rows, columns) ** 0.5)
    # Tall matrices take larger steps, so that each output moves as far as in a square one.
    return float(max(1.0, rows / columns) ** 0.5)


def _orthogonal_like(matrix: torch.Tensor) -> torch.Tensor:
    if not isinstance(matrix, DTensor):
        return orthogonalise(matrix)
    if matrix.ndim == 2:
        whole = orthogonalise(matrix.full_tensor())
        return distribute_tensor(whole, matrix.device_mesh, matrix.placements, src_data_rank=None)
    # Whole matrices, but not more of them than are here already. Asked for `dim`, as a strided shard is no Shard.
    mesh = matrix.device_mesh
    placements = [p if getattr(p, "dim", None) == 0 else Replicate() for p in matrix.placements]
    here = orthogonalise(matrix.redistribute(placements=placements).to_local())
    parts = DTensor.from_local(here, mesh, placements, shape=matrix.shape, stride=matrix.stride(), run_check=False)
    return parts.redistribute(placements=matrix.placements)


def orthogonalise(matrix: torch.Tensor) -> torch.Tensor:
    """Pushes all singular values of a matrix [rows, columns], or of each in a stack, towards one by five Newton-Schulz
    iterations."""
    x = matrix.bfloat16() if matrix.is_cuda else matrix.float()
    wide = x.shape[-2] > x.shape[-1]
    if wide:
        x = x.mT  # the Gram matrix below is then the small one
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = A * x + (B * gram + C * gram @ gram) @ x
    return (x.mT if wide else x).to(matrix.dtype)
