"""Many small decoders as one: weights [rows, count], every product a batched one. A GPU is busy with the whole of them
where one alone would wait for its launches.

The numbers of a row are those of `shoal.model.decoder.Decoder` and of Shoal's AdamW with clipping (a test compares
them); vectors of weights lie as `shoal.swarm.trainer.weights` lays them. Embedding and target are one-hot products:
their gradients are then sums in a fixed order.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.model.decoder import Decoder
from shoal.model.rope import Rope, rotate
from shoal.spec.run import Optimizer
from shoal.spec.shape import Shape
from shoal.train.muon import orthogonalise


class Stack:
    """Decoders of one shape, all of which begin with the weights of `seed`."""

    def __init__(self, shape: Shape, rows: int, seq: int, seed: int, device: torch.device) -> None:
        model = Decoder(shape)
        model.init_weights(seed)
        named = dict(model.named_parameters())
        self.shape, self.rows, self.device = shape, rows, device
        self.names, self.shapes = list(named), [p.shape for p in named.values()]
        self.sizes = [p.numel() for p in named.values()]
        self.ends = list(accumulate(self.sizes))
        self.first = torch.cat([p.detach().reshape(-1) for p in named.values()]).to(device)
        self.weights = self.first.repeat(rows, 1)
        # Norms have no scale to decay.
        self.decays = torch.cat([torch.full((p.numel(),), float(p.ndim >= 2)) for p in named.values()]).to(device)
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._turns = Rope(shape)(torch.arange(seq, device=device)[None])

    @property
    def count(self) -> int:
        return self.ends[-1]

    def losses(self, weights: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy of each row [rows], of tokens [rows, batch, seq] and targets that may be -100."""
        rows, batch, seq = tokens.shape
        shape, parts = self.shape, weights.to(self.dtype).split(self.sizes, dim=1)
        w = {name: p.view(rows, *s) for name, p, s in zip(self.names, parts, self.shapes, strict=True)}
        kinds = torch.arange(shape.vocab_size, device=tokens.device)
        x = torch.bmm((tokens.reshape(rows, -1, 1) == kinds).to(self.dtype), w["embed.weight"])
        for i in range(shape.layers):
            at = f"blocks.{i}."
            h = self._norm(x, w[at + "attention_norm.weight"])
            q, k, v = (
                torch.bmm(h, w[f"{at}attention.{n}.weight"].mT).view(rows * batch, seq, -1, shape.head_dim)
                for n in "qkv"
            )
            q, k = rotate(q, *self._turns), rotate(k, *self._turns)
            mixed = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
            mixed = mixed.transpose(1, 2).reshape(rows, batch * seq, -1)
            x = x + torch.bmm(mixed, w[at + "attention.out.weight"].mT)
            h = self._norm(x, w[at + "ffn_norm.weight"])
            gate, up = (torch.bmm(h, w[f"{at}ffn.{n}.weight"].mT) for n in ("gate", "up"))
            x = x + torch.bmm(F.silu(gate) * up, w[at + "ffn.down.weight"].mT)
        logits = torch.bmm(self._norm(x, w["norm.weight"]), w["head.weight"].mT).float()
        targets = targets.reshape(rows, -1)
        chosen = torch.where(targets[..., None] == kinds, logits, 0.0).sum(-1)
        each = torch.where(targets >= 0, logits.logsumexp(-1) - chosen, 0.0)
        return each.sum(-1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * (wide.square().mean(-1, keepdim=True) + self.shape.norm_eps).rsqrt()
        return (scaled * weight[:, None].float()).to(x.dtype)


class Steps:
    """An optimizer step of all rows: AdamW, or Muon for the blocks' matrices. The first `together` rows are as many
    groups of `peers`, whose gradients are averaged: data parallelism."""

    def __init__(self, stack: Stack, spec: Optimizer, clip: float, peers: int, together: int) -> None:
        self.stack, self.spec, self.clip, self.peers, self.together = stack, spec, clip, peers, together
        self.m, self.v = torch.zeros_like(stack.weights), torch.zeros_like(stack.weights)
        self.momentum = torch.zeros_like(self.m) if spec.name == "muon" else None
        self.losses = stack.losses

    def gradient(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's mean loss, and its gradient after averaging."""
        weights, k = self.stack.weights.detach().requires_grad_(), self.together * self.peers
        counts = (targets >= 0).sum((1, 2)).float()
        sums = self.losses(weights, tokens, targets)
        shares = counts[:k].view(-1, self.peers).mean(1, keepdim=True).expand(-1, self.peers).reshape(-1)
        (grad,) = torch.autograd.grad((sums / torch.cat([shares, counts[k:]])).sum(), weights)
        if k:
            mean = grad[:k].view(self.together, self.peers, -1).mean(1, keepdim=True)
            grad[:k].view(self.together, self.peers, -1).copy_(mean)
        return (sums / counts).detach(), grad

    @torch.no_grad()
    def update(self, grad: Tensor, rates: Tensor, ratio: Tensor, fixed: Tensor) -> None:
        """`rates` [rows, 1] are each row's peaks; `fixed` is one less beta to the power of the step, for both."""
        weights, spec = self.stack.weights, self.spec
        norm = grad.norm(dim=1, keepdim=True)
        grad = grad * (self.clip / (norm + 1e-6)).clamp(max=1.0)
        rate = rates * ratio
        b1, b2 = spec.betas
        self.m.lerp_(grad, 1 - b1)
        self.v.lerp_(grad.square(), 1 - b2)
        step = (self.m / fixed[0]) / ((self.v / fixed[1]).sqrt() + spec.eps)
        new = weights * (1 - rate * spec.weight_decay * self.stack.decays) - rate * step
        if self.momentum is not None:
            self._muon(new, grad, rates, ratio)
        weights.copy_(new)

    def _muon(self, new: Tensor, grad: Tensor, rates: Tensor, ratio: Tensor) -> None:
        """`rates` are then Muon's; AdamW's rate keeps its proportion to them."""
        assert self.momentum is not None
        assert self.spec.muon_lr != "auto"  # `swarm_sim` gives the number that was measured with
        mu, stack = self.spec.muon_momentum, self.stack
        self.momentum.lerp_(grad, 1 - mu)
        nesterov = grad.lerp(self.momentum, mu)
        rate = rates * ratio * (self.spec.muon_lr / self.spec.lr)
        for name, shape, size, end in zip(stack.names, stack.shapes, stack.sizes, stack.ends, strict=True):
            if name.startswith("blocks.") and len(shape) == 2:
                where = slice(end - size, end)
                turned = orthogonalise(nesterov[:, where].reshape(-1, *shape)).reshape(stack.rows, -1)
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                old = stack.weights[:, where]
                new[:, where] = old * (1 - rate * self.spec.weight_decay) - rate * scale * turned
