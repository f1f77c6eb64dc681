"""Own code for a run: block, loss, schedule, optimizer and hook. run.yaml names them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal


class SquaredReLU(nn.Module):
    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, width, bias=False), nn.Linear(width, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class Block(shoal.Block):
    def __init__(self, shape, layer: int) -> None:
        super().__init__(shape, layer)
        self.ffn = SquaredReLU(shape.dim, shape.ffn_dim)


class Loss(shoal.Objective):
    """Cross-entropy, and a price for confidence: the negative entropy of the prediction. Sums, never means."""

    per_token = True  # so that a sequence may be shared by several processes

    def __init__(self, run: shoal.Run) -> None:
        self.price = float(run.own.settings["price"])

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        logits, targets = logits[targets != -100], targets[targets != -100]
        log_p = F.log_softmax(logits, dim=-1)
        return F.nll_loss(log_p, targets, reduction="sum") + self.price * (log_p.exp() * log_p).sum()


def schedule(step: int, steps: int) -> float:
    """Up over the first tenth, then down by the square root."""
    warmup = max(1, steps // 10)
    return min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5)


class Lion(torch.optim.Optimizer):
    """arXiv:2302.06675. Its state lies in tensors that are made like the parameter, so checkpoints hold it."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["decay"]).sub_(group["lr"] * torch.sign(m.lerp(p.grad, 0.1)))
                m.lerp_(p.grad, 0.01)


def lion(named: list[tuple[str, nn.Parameter]], run: shoal.Run) -> torch.optim.Optimizer:
    return Lion([p for _, p in named], {"lr": run.train.optimizer.lr, "decay": run.train.optimizer.weight_decay})


class Norms(shoal.Hook):
    """Logs the gradient norm of each layer, and how large the largest ever was."""

    def __init__(self, run: shoal.Run) -> None:
        self.largest = 0.0

    def start(self, model, step: int) -> None:
        self.model = model

    def update(self, at: shoal.Moment, targets: float) -> None:
        norms = {n: norm / targets for n, norm in self.model.gradient_norms().items() if n.endswith("up.weight")}
        self.largest = max(self.largest, *norms.values())
        self.log(largest=self.largest, **norms)

    def state(self) -> float:
        return self.largest

    def load(self, state: float) -> None:
        self.largest = state
