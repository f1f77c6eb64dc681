"""What each way to send activations and gradients costs in loss: one process that holds all four stages, and sends
what would travel between them through the codec. The arithmetic is that of the peers; only the network is missing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.data.feed import Feed
from shoal.data.order import Order
from shoal.data.sources import open_sources
from shoal.data.windows import Windows
from shoal.model.decoder import Decoder
from shoal.spec.model import Model
from shoal.spec.run import Data, Optimizer, Schedule
from shoal.spec.shape import Shape, shape_of
from shoal.spec.stages import stretches
from shoal.stages.squeeze import Squeeze
from shoal.stages.subspace import Space, confine
from shoal.train.optim import Optimizers
from shoal.train.schedule import lr_ratio

# (activations, gradients, rank of the subspace or 0)
RUNGS = [
    ("fp32", "fp32", 0),
    ("bf16", "bf16", 0),
    ("int8", "int8", 0),
    ("int4", "int8", 0),
    ("int4", "int4", 0),
    ("int2", "int2", 0),
    ("fp32", "fp32", 4),
    ("int8", "int8", 4),
    ("fp32", "fp32", 8),
    ("int8", "int8", 8),
    ("int4", "int4", 8),
    ("int8", "int8", 16),
]  # the rank is given as dim / rank


class _Cut(torch.autograd.Function):
    """What a message does to hidden states on their way forwards, and to gradients on their way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Squeeze, back: Squeeze) -> Tensor:
        ctx.back = back
        return there.decode(there.encode(x), tuple(x.shape), x.device)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        back: Squeeze = ctx.back
        return back.decode(back.encode(g), tuple(g.shape), g.device), None, None


def train(
    shape: Shape, data: Path, rung: tuple[str, str, int], steps: int, batch: int, seq_len: int, seed: int, lr: float
) -> tuple[float, float, float]:
    """(loss of the last tenth of the steps, loss on held-out text, bytes a token and hop there)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    there, back, rank = rung
    width = shape.dim // rank if rank else shape.dim
    decoders = [Decoder(shape, layers) for layers in stretches(shape, 4, "1f1b", seq_len)]
    space = Space(shape, width, seed, device) if rank else None
    for decoder in decoders:
        if space is not None:
            confine(decoder, space)
    for decoder in decoders:
        decoder.init_weights(seed)
        decoder.to(device)
    optimizer = Optimizer(lr=lr)
    optimizers = Optimizers(optimizer, [pair for d in decoders for pair in d.named_parameters()])
    schedule = Schedule(warmup_steps=steps // 20)
    settings = Data(train=str(data / "train"), eval=str(data / "eval"), seq_len=seq_len)
    windows = Windows(open_sources(settings.train, settings, Path(".")), seq_len, False)
    held = Windows(open_sources(settings.eval, settings, Path(".")), seq_len, False)
    there_, back_ = Squeeze(there, width), Squeeze(back, width)

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        x: Tensor = tokens
        for i, decoder in enumerate(decoders):
            y = decoder(x, None, None, targets) if decoder.last else decoder(x)
            if i < len(decoders) - 1 and (there, back) != ("fp32", "fp32"):
                if space is None:
                    y = _Cut.apply(y, there_, back_)
                else:
                    y = space.widen(_Cut.apply(space.narrow(y, tokens), there_, back_), tokens)
            x = y
        return x

    tail = []
    with Feed(windows, Order(windows.sizes, [1.0], seed), batch) as feed:
        for step in range(steps):
            (b,) = feed.step(step)
            total = loss_of(torch.from_numpy(b.tokens).to(device), torch.from_numpy(b.targets).to(device))
            total.backward()
            norm = torch.stack([p.grad.norm() for d in decoders for p in d.parameters() if p.grad is not None]).norm()
            factor = (1.0 / norm.clamp(min=b.target_count)).to(torch.float32)  # mean loss, clipped at 1
            optimizers.step(lr_ratio(schedule, step, steps), factor)
            if step >= steps * 9 // 10:
                tail.append(total.detach() / b.target_count)
    some, count = 0.0, 0
    with torch.no_grad():
        for at in range(0, held.sizes[0], 16):
            rows = list(range(at, min(at + 16, held.sizes[0])))
            b = held.batch([0] * len(rows), rows)
            some += float(loss_of(torch.from_numpy(b.tokens).to(device), torch.from_numpy(b.targets).to(device)))
            count += b.target_count
    return float(torch.stack(tail).mean()), some / count, there_.nbytes(1)


def ladder(data: Path, steps: int, batch: int = 32, seq_len: int = 256, seeds: int = 1, lr: float = 1e-3) -> None:
    shape = shape_of(Model(dim=512, layers=8, heads=8, kv_heads=4, vocab_size=2048, tie_embeddings=False))
    print(f"dim {shape.dim}, {shape.layers} layers over 4 stages, {steps} steps of {batch} x {seq_len} tokens")
    print("activations  gradients  rank   bytes/token  less than bf16  train loss   gap    held-out   gap    time")
    first: list[tuple[float, float]] = []
    for rung in RUNGS:
        began = time.perf_counter()
        runs = [train(shape, data, rung, steps, batch, seq_len, seed, lr) for seed in range(seeds)]
        first = first or [(a, b) for a, b, _ in runs]
        gap = sum(a / c - 1 for (a, _, _), (c, _) in zip(runs, first, strict=True)) / seeds
        held_gap = sum(b / d - 1 for (_, b, _), (_, d) in zip(runs, first, strict=True)) / seeds
        train_loss, held = (sum(r[i] for r in runs) / seeds for i in (0, 1))
        size = runs[0][2]
        print(
            f"{rung[0]:>11}  {rung[1]:>9}  {f'1/{rung[2]}' if rung[2] else '-':>4}  {size:>11.0f}  "
            f"{2 * shape.dim / size:>13.1f}x  {train_loss:>10.4f}  {gap:>+6.2%}  {held:>8.4f}  {held_gap:>+6.2%}"
            f"  {time.perf_counter() - began:>4.0f} s",
            flush=True,
        )
