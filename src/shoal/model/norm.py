"""RMSNorm, computed in float32 whatever comes in."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """torch's own, but for a bfloat16 input with a float32 weight (autocast): torch leaves its fused kernel there."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
