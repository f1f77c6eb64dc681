"""What a token sees is found also where a model begins with zeros, and the model is left as it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from shoal.model.own_model import OwnModel
from shoal.model.seen import Seen, seen


class Leaky(nn.Module):
    """Every token sees the mean of all, through a scale that stands at zero."""

    shape = SimpleNamespace(vocab_size=50)

    def __init__(self, root: bool) -> None:
        super().__init__()
        self.root = root
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.frozen = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)).eval()
        self.scale = nn.Parameter(torch.zeros(16))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor) -> Any:
        self.calls += 1
        x = self.frozen(self.embed(tokens))
        mean = x.mean(1, keepdim=True)
        return self.head((x + mean) * (self.scale + 0.01).sqrt() if self.root else x + self.scale * mean)


def test_a_scale_at_zero_hides_nothing_nor_makes_what_is_seen_no_number() -> None:
    for root in (False, True):
        torch.manual_seed(0)
        model = Leaky(root)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert seen(cast(OwnModel, model), 16) == Seen(before=True, after=True)
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        assert (model.training, model.frozen.training) == (True, False)
