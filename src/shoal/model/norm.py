"""RMSNorm, computed in float32 whatever comes in."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from shoal.spec.shape import Shape


class RMSNorm(nn.RMSNorm):
    """torch's own, but for a bfloat16 input with a float32 weight (autocast): torch leaves its fused kernel there."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class CentredRMSNorm(nn.RMSNorm):
    """Its weight is what it has more than one (Gemma). Rounded only in the end: beside one, 16 bits have no digits for
    a small weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)


def norm_of(shape: Shape, width: int) -> nn.RMSNorm:
    """As the family's class norms."""
    return (CentredRMSNorm if shape.about.centred_norms else RMSNorm)(width, eps=shape.norm_eps)
