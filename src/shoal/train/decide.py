"""Closes every `auto` of a run before anything is started, and says why. No torch: the supervisor calls this."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import SetupError, SpecError
from shoal.spec.run import Run
from shoal.spec.shape import Shape, shape_of

# Float32 weights, gradients and AdamW's two moments.
STATE_BYTES = 16
# Past this size sharding is worth its communication.
SHARD_ABOVE_PARAMS = 1_000_000_000
# Tokens one process computes at once: enough to keep matmuls busy, small enough for the activations.
MICRO_TOKENS = {"cpu": 4096, "cuda": 16384}
# More processes than this on one CPU lose to threads inside the matmul.
MOST_CPU_PROCESSES = 8


@dataclass(frozen=True)
class Decision:
    key: str
    value: Any
    why: str


@dataclass(frozen=True)
class Decided:
    run: Run
    world: int
    decisions: tuple[Decision, ...]


def decide(run: Run, workspace: Path, world: int | None = None) -> Decided:
    """The run with nothing left open. `world` is set when somebody else (torchrun) has started the processes."""
    made: list[Decision] = []

    def choose(key: str, given: Any, value: Any, why: str) -> Any:
        if given != "auto":
            return given
        made.append(Decision(key, value, why))
        return value

    gpus = visible_gpus()
    device = choose("resources.device", run.resources.device, "cuda" if gpus else "cpu", f"GPUs visible: {gpus}")
    if device == "cuda" and not gpus and world is None:
        raise SetupError(
            "resources.device is cuda but no GPU is visible here: set it to cpu or auto, or check nvidia-smi."
        )
    tokenizer_vocab = _look_at_data(run, workspace)
    shape = shape_of(run.model, tokenizer_vocab)
    if shape.vocab_size < tokenizer_vocab:
        raise SpecError(
            f"model.vocab_size is {shape.vocab_size:,}, but the data's tokenizer has {tokenizer_vocab:,} tokens: "
            "use auto, or prepare the data with the model's tokenizer."
        )
    vocab = choose("model.vocab_size", run.model.vocab_size, shape.vocab_size, "the tokenizer's, rounded up to 64")

    one = "the planner may choose more; until then one"
    inner = {name: choose(f"mesh.{name}", getattr(run.mesh, name), 1, one) for name in ("pp", "cp", "tp", "ep")}
    per_sample = inner["pp"] * inner["cp"] * inner["tp"]  # processes that compute the same sample
    world = world or _world(run, device, gpus, per_sample, choose)
    readers = world // per_sample
    replicate, shard = _data_parallel(run, readers, shape, choose)
    _refuse_what_cannot_fit(shape, world, shard * per_sample, device)
    per_process = run.train.batch // readers
    if run.train.batch % readers:
        low, high = per_process * readers, (per_process + 1) * readers
        near = f"{low} or {high}" if low else str(high)
        raise SpecError(
            f"train.batch is {run.train.batch}, which {readers} processes cannot share equally: use {near}."
        )
    schedule = choose("mesh.schedule", run.mesh.schedule, "1f1b", "the least memory of the schedules")
    method = choose("mesh.cp_method", run.mesh.cp_method, "all_to_all", "the fewest messages")
    recompute = choose("mesh.recompute", run.mesh.recompute, "none", "it is assumed to fit")
    most = max(1, MICRO_TOKENS[device] // run.data.seq_len)
    micro = choose(
        "mesh.micro_batch",
        run.mesh.micro_batch,
        max(d for d in range(1, per_process + 1) if per_process % d == 0 and d <= most),
        f"the most windows of a process's {per_process} that stay within {MICRO_TOKENS[device]} tokens",
    )
    if per_process % micro:
        raise SpecError(
            f"mesh.micro_batch is {micro}, but each of {world} processes has {per_process} windows a step, "
            f"which it does not divide: use {max(d for d in range(1, micro + 1) if per_process % d == 0)}."
        )
    cores = len(os.sched_getaffinity(0))
    threads = choose(
        "resources.threads", run.resources.threads, max(1, cores // world), f"{cores} cores for {world} processes"
    )
    precision = choose(
        "train.precision", run.train.precision, "bf16" if device == "cuda" else "fp32", f"the usual on {device}"
    )
    closed = run.model_copy(
        update={
            "model": run.model.model_copy(update={"vocab_size": vocab}),
            "train": run.train.model_copy(update={"precision": precision}),
            "mesh": run.mesh.model_copy(
                update={
                    "dp_replicate": replicate,
                    "dp_shard": shard,
                    "micro_batch": micro,
                    "schedule": schedule,
                    "cp_method": method,
                    "recompute": recompute,
                    **inner,
                }
            ),
            "resources": run.resources.model_copy(update={"device": device, "processes": world, "threads": threads}),
        }
    )
    return Decided(closed, world, tuple(made))


def visible_gpus() -> int:
    """GPUs this process may use, without importing torch or starting CUDA."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = sum(1 for p in Path("/dev").glob("nvidia[0-9]*"))
    if listed is None:
        return present
    return min(present, len([d for d in listed.split(",") if d.strip() not in ("", "-1")]))


def _world(run: Run, device: str, gpus: int, per_sample: int, choose: Any) -> int:
    replicate, shard = run.mesh.dp_replicate, run.mesh.dp_shard
    if isinstance(replicate, int) and isinstance(shard, int):
        why = f"mesh asks for {per_sample * replicate * shard}"
        return int(choose("resources.processes", run.resources.processes, per_sample * replicate * shard, why))
    most = gpus if device == "cuda" else min(len(os.sched_getaffinity(0)), MOST_CPU_PROCESSES)
    step = per_sample * next((n for n in (replicate, shard) if isinstance(n, int)), 1)
    fits = [n for n in range(step, most + 1, step) if run.train.batch % (n // per_sample) == 0]
    what = "GPUs" if device == "cuda" else "cores"
    return int(
        choose(
            "resources.processes",
            run.resources.processes,
            max(fits, default=step),
            f"{most} {what}, batch {run.train.batch}",
        )
    )


def _data_parallel(run: Run, world: int, shape: Shape, choose: Any) -> tuple[int, int]:
    replicate, shard = run.mesh.dp_replicate, run.mesh.dp_shard
    if replicate == "auto" and shard == "auto":
        big = shape.params > SHARD_ABOVE_PARAMS
        why = f"{shape.params:,} parameters: " + (
            "sharded to save memory (FSDP2)" if big else "small enough to replicate (DDP)"
        )
        shard = choose("mesh.dp_shard", shard, world if big else 1, why)
    if replicate == "auto":
        replicate = choose(
            "mesh.dp_replicate", replicate, max(1, world // int(shard)), f"processes {world} by dp_shard {shard}"
        )
    if shard == "auto":
        shard = choose(
            "mesh.dp_shard", shard, max(1, world // int(replicate)), f"processes {world} by dp_replicate {replicate}"
        )
    if int(replicate) * int(shard) != world:
        raise SpecError(
            f"mesh.dp_replicate {replicate} x mesh.dp_shard {shard} is {int(replicate) * int(shard)}, but there are "
            f"{world} processes: set resources.processes to {int(replicate) * int(shard)} or one of them to auto."
        )
    return int(replicate), int(shard)


def _refuse_what_cannot_fit(shape: Shape, world: int, shard: int, device: str) -> None:
    """Weights, gradients and optimizer state alone; a proper plan comes with the planner, but this much is certain."""
    if device != "cpu":
        return  # what a GPU holds is not known without asking CUDA
    need = shape.params * STATE_BYTES * world / shard
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need > have:
        raise SetupError(
            f"{shape.params:,} parameters need at least {need / 1e9:,.0f} GB for weights, gradients and optimizer over "
            f"{world} processes, and this machine has {have / 1e9:,.0f} GB: take a smaller model."
        )


def _look_at_data(run: Run, workspace: Path) -> int:
    """The vocabulary of the data. What is wrong with the data is better said now than by every worker."""
    from shoal.data.sources import open_sources
    from shoal.data.windows import Windows

    opened = open_sources((*run.data.train, *run.data.eval), run.data, workspace)
    Windows(opened, run.data.seq_len, run.data.mask_documents)
    return opened[0].vocab_size
