"""A tiny model in a pipeline, and the same model on one process: a few steps' losses, gradients and weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.model.decoder import Decoder
from shoal.parallel.pipeline import Pipeline
from shoal.parallel.place import Place, lay_out
from shoal.parallel.shard import reshard, shard
from shoal.parallel.tied_embedding import NAME, Tied
from shoal.spec.mesh import Sizes
from shoal.spec.model import Model
from shoal.spec.shape import Shape, shape_of
from shoal.spec.stages import stage_count, stages_of, stretches

STEPS, SEQ, VOCAB, SEED = 2, 16, 64, 5  # the second shows what the first has left: weights, momentum, buffers
Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor]


def tiny(**fields: Any) -> Shape:
    sizes = {"vocab_size": VOCAB, "dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_dim": 48, "init_std": 0.2}
    return shape_of(Model(**{**sizes, **fields}))


@dataclass(frozen=True)
class Case:
    schedule: str
    sizes: Sizes
    shape: Shape = field(default_factory=tiny)
    micro_batches: int = 4
    rows: int = 1  # windows a micro-batch
    packed: bool = False
    bf16: bool = False
    prepare: Callable[[Decoder, Place], None] | None = None  # the decoders, before they are sharded


@dataclass
class Curve:
    losses: list[float] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)  # of each step, of the summed loss
    weights: dict[str, Tensor] = field(default_factory=dict)  # at the end


def batch(case: Case, step: int, reader: int = 0) -> Inputs:
    """What one data-parallel process reads of a step."""
    share = case.micro_batches * case.rows
    generator = torch.Generator().manual_seed(100 * step + reader)
    tokens = torch.randint(0, VOCAB, (share, SEQ + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = -100
    positions = torch.arange(SEQ).repeat(share, 1)
    if not case.packed:
        return tokens[:, :-1], positions, None, targets
    starts = torch.randint(1, SEQ, (share, 1), generator=generator)
    documents = (positions >= starts).long()
    return tokens[:, :-1], torch.where(positions >= starts, positions - starts, positions), documents, targets


def alone(case: Case) -> Curve:
    """The same steps on one process, every reader's share in turn."""
    curve = Curve()
    model = Decoder(case.shape)
    model.init_weights(SEED)
    optimizer = _optimizer([p for _, p in model.named_parameters()])
    for step in range(STEPS):
        shares = [batch(case, step, reader) for reader in range(case.sizes.dp)]
        with torch.no_grad():
            curve.evaluated.append(float(sum(model(*share) for share in shares)))
        total = sum(model(*share) for share in shares)
        assert isinstance(total, Tensor)
        total.backward()
        curve.losses.append(float(total.detach()))
        curve.gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        _update(optimizer, case)
    curve.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return curve


def piped(rank: int, world: int, case: Case, watch: Callable[[list[Decoder]], Any] | None = None) -> tuple[Curve, Any]:
    """What one process sees of the steps in a pipeline, gradients and weights of its stages made whole."""
    place = lay_out(rank, world, torch.device("cpu"), case.sizes, case.shape.experts is not None)
    pipeline, decoders = build(case, place)
    tied = Tied.of(decoders, place)
    seen = watch(decoders) if watch is not None else None
    updated = {
        name: p
        for decoder in decoders
        for name, p in decoder.named_parameters()
        if tied is None or p is not tied.local_copy
    }
    optimizer = _optimizer(list(updated.values()))
    curve = Curve()
    for step in range(STEPS):
        inputs = batch(case, step, place.at["dp"])
        curve.evaluated.append(_total(pipeline.loss(*inputs), place))
        for decoder in decoders:
            reshard(decoder)
        curve.losses.append(_total(pipeline.backward(*inputs), place))
        if tied is not None:
            tied.sum_gradients()
        curve.gradients.append({name: whole(p.grad) for name, p in updated.items() if p.grad is not None})
        _update(optimizer, case)
        if tied is not None:
            tied.spread()
    held = [(name, p) for decoder in decoders for name, p in decoder.named_parameters()]
    curve.weights = {name: whole(p) for name, p in held}
    for name, p in held:  # the second copy of a tied matrix is the first one still
        if name == NAME:
            torch.testing.assert_close(whole(p), curve.weights[name], rtol=0, atol=0)
    return curve, seen() if callable(seen) else None


def build(case: Case, place: Place) -> tuple[Pipeline, list[Decoder]]:
    cut = stretches(case.shape, case.sizes.pp, case.schedule, SEQ)
    numbers = stages_of(place.at["pp"], case.sizes.pp, case.schedule)
    decoders = []
    for number in numbers:
        with torch.device("meta"):
            decoder = Decoder(case.shape, cut[number])
        if case.prepare is not None:
            case.prepare(decoder, place)
        shard(decoder, place, case.bf16)
        decoder.to_empty(device="cpu")
        decoder.init_weights(SEED)
        decoders.append(decoder)
    stages = stage_count(case.sizes.pp, case.schedule)
    hidden = torch.bfloat16 if case.bf16 else torch.float32
    return Pipeline(decoders, numbers, stages, place, case.schedule, case.micro_batches, hidden), decoders


def calls_counted(module: Any, name: str) -> Callable[[], int]:
    """Counts the calls of `module.name` from now on. In a rank, which puts it back by itself (tests/kept_ranks.py)."""
    calls, original = 0, getattr(module, name)

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args)

    pytest.MonkeyPatch().setattr(module, name, counted)
    return lambda: calls


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def assert_same_curve(curves: list[Curve], expected: Curve, tolerance: float = 2e-5) -> None:
    """Every process saw the losses of one process; together they hold all its gradients and weights."""
    for curve in curves:
        torch.testing.assert_close(curve.losses, expected.losses, rtol=tolerance, atol=0)
        torch.testing.assert_close(curve.evaluated, expected.evaluated, rtol=tolerance, atol=0)
        for mine, theirs in zip(
            [*curve.gradients, curve.weights], [*expected.gradients, expected.weights], strict=True
        ):
            for name, value in mine.items():
                scale = float(theirs[name].abs().max())
                torch.testing.assert_close(value, theirs[name], rtol=0, atol=10 * tolerance * scale, msg=_named(name))
    for step, theirs in enumerate(expected.gradients):
        assert {name for curve in curves for name in curve.gradients[step]} == set(theirs)
    assert {name for curve in curves for name in curve.weights} == set(expected.weights)


def _named(name: str) -> Callable[[str], str]:
    return lambda message: f"{name}: {message}"


def _optimizer(parameters: list[Any]) -> torch.optim.Optimizer:
    # Adam would turn the last digit of a near-zero gradient into a whole step.
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _update(optimizer: torch.optim.Optimizer, case: Case) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad /= case.sizes.dp * case.micro_batches * case.rows * SEQ
    optimizer.step()
    optimizer.zero_grad()


def _total(loss: Tensor, place: Place) -> float:
    return place.sum(float(loss))[0] / place.sizes.tp
