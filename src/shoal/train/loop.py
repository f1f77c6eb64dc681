"""The training loop, top to bottom.

A step is a transaction: its samples are a pure function of the step's number, its gradient is the gradient of the
mean loss over all target tokens of the global batch, and it is committed by one journal record. Whatever happens in
between, a step without a record was never taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shoal.data.feed import Feed
from shoal.data.windows import Batch
from shoal.errors import NumericsError, Stopped
from shoal.parallel.place import Place
from shoal.parallel.shard import plain, precision, reduce_on
from shoal.spec.run import Run
from shoal.track.journal import Record
from shoal.train.clock import Clock
from shoal.train.optim import Optimizers
from shoal.train.schedule import lr_ratio

Tell = Callable[..., None]  # writes a journal record (rank 0; elsewhere it does nothing)


@dataclass(frozen=True)
class Training:
    """Everything the loop needs, made by `shoal.train.worker`."""

    run: Run
    place: Place
    model: nn.Module
    optimizers: Optimizers
    feed: Feed
    tell: Tell
    told_to_stop: Callable[[], bool]
    evaluate: Callable[[int], object]  # (committed steps)
    save: Callable[[int], None]  # (committed steps)


def train(t: Training, first_step: int) -> None:
    """Runs steps `first_step` … `train.steps` - 1. Saves and raises Stopped when told to stop."""
    run, total = t.run, t.run.train.steps
    t.model.train()
    for step in range(first_step, total):
        record = train_step(t, step)
        if record is None:
            t.save(step)
            raise Stopped(
                f"stopped after step {step} of {total}; the state is saved, `shoal resume {run.name}` goes on."
            )
        t.tell("step", **record)
        done = step + 1
        if _due(run.eval.every, done) and done < total:
            t.evaluate(done)
        if _due(run.checkpoint.every, done) and done < total:
            t.save(done)
    if first_step < total:  # a run that was already whole has nothing new to save
        t.evaluate(total)
        t.save(total)


def train_step(t: Training, step: int) -> Record | None:
    """One optimizer step; None when any process has been told to stop before it began."""
    clock = Clock()
    micro_batches = t.feed.step(step)
    clock.lap("data_s")

    # One exchange before the step: how many targets the whole batch has, and whether anybody was told to stop.
    # Loss normalised by this count is right for any split, any packing and any mask, by construction.
    tokens = sum(b.tokens.size for b in micro_batches)
    mine = sum(b.target_count for b in micro_batches)
    targets, all_tokens, stop = t.place.sum(mine, tokens, float(t.told_to_stop()))
    if stop:
        return None
    if not targets:
        raise NumericsError(
            f"step {step + 1} has no target token: the data's loss mask hides every token of its batch."
        )

    loss = torch.zeros((), device=t.place.device)
    for i, batch in enumerate(micro_batches):
        with reduce_on(t.model, last=i == len(micro_batches) - 1), precision(t.run, t.model, t.place):
            part = loss_sum(t.model, batch, t.place.device)
            # DDP and FSDP average over the processes; we want the sum, so their number is multiplied in here.
            (part * (t.place.world / targets)).backward()
        loss += part.detach()
    loss = t.place.sum_on_device(loss) / targets
    clock.lap("compute_s")

    grad_norm = clip(plain(t.model), t.run.train.clip)
    loss_now, norm_now = float(loss), float(grad_norm)
    if not (math.isfinite(loss_now) and math.isfinite(norm_now)):
        raise NumericsError(
            f"step {step + 1} has loss {loss_now} and gradient norm {norm_now}, so no update was made: lower "
            "train.optimizer.lr, lengthen train.schedule.warmup_steps or set train.clip, then resume the run."
        )
    lr = t.optimizers.step(lr_ratio(t.run.train.schedule, step, t.run.train.steps))
    clock.lap("optimizer_s")
    return {
        "step": step + 1,
        "begin": clock.begin,
        "position": step * t.run.train.batch,
        "samples": t.run.train.batch,
        "tokens": int(all_tokens),
        "targets": int(targets),
        "loss": loss_now,
        "grad_norm": norm_now,
        "lr": lr,
        "time": clock.laps,
    }


def loss_sum(model: nn.Module, batch: Batch, device: torch.device) -> torch.Tensor:
    """Cross-entropy summed over the targets of a micro-batch."""
    tokens, targets, positions = (
        torch.from_numpy(a).to(device, non_blocking=True) for a in (batch.tokens, batch.targets, batch.positions)
    )
    documents = torch.from_numpy(batch.documents).to(device, non_blocking=True) if batch.documents.any() else None
    return model(tokens, positions, documents, targets=targets)


def clip(model: nn.Module, limit: float | None) -> torch.Tensor:
    """Clips all gradients by their global norm, which is the same number on every process and layout."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if limit is not None:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), limit, norm)
    return norm


def _due(every: int, done: int) -> bool:
    return every > 0 and done % every == 0
