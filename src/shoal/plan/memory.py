"""The memory that a run needs on each process, part by part, and how little recomputation makes it fit. No torch.

A training step has three kinds of moments that can be its worst: the loss, when all activations are there; the backward
pass of some block, when a part of the activations has made room for gradients; the update. All of them are computed for
every stage of the pipeline, and the worst is the answer. benchmarks/memory.py lays it beside what processes really use.
"""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.parallel.stages import stages_of, stretches
from shoal.plan.activations import FLOAT32, Setting, block, setting, shared_by_blocks
from shoal.spec.run import Run
from shoal.spec.shape import Shape

MODES = ("none", "selective", "full")
CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}  # as shoal.model.head has them
CHUNK_TOKENS = 128  # at least
# Of a device's memory, what a plan may use: fragments and what other programs hold take the rest.
USABLE = 0.9
# Python, torch and its libraries in one process, before any tensor.
PROCESS_BYTES = 400 << 20


@dataclass(frozen=True)
class Memory:
    """Bytes on the process that needs the most, at its worst moment."""

    weights: int  # float32, this process's part
    optimizer: int
    gradients: int
    gathered: int  # weights as they are computed with: what FSDP gathers, what autocast makes
    activations: int  # kept for the backward pass
    working: int  # of the block under way, of the head, or of the update
    stage: int  # the process's place in the pipeline
    moment: str

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.gradients + self.gathered + self.activations + self.working


def memory(run: Run, shape: Shape) -> Memory:
    """Of a run with nothing left open. The device is `resources.device`."""
    return max((m for rank in range(int(run.mesh.pp)) for m in _moments(run, shape, rank)), key=lambda m: m.total)


def choose_recompute(run: Run, shape: Shape, budget_bytes: int | None) -> tuple[str, str]:
    """As little recomputation as fits, and why. `run` has nothing left open but `mesh.recompute`."""
    if budget_bytes is None:
        return "none", "how much memory the device has is not known here"
    needs = {mode: memory(_with(run, mode), shape).total for mode in MODES}
    mode = next((mode for mode in MODES if needs[mode] <= budget_bytes), "full")
    predicted = ", ".join(f"{m} {b / 1e9:.2f}" for m, b in needs.items())
    fits = "fits" if needs[mode] <= budget_bytes else "does not fit, and nothing takes less"
    return mode, f"predicted GB a process: {predicted}; {mode} {fits} into {budget_bytes / 1e9:.2f}"


def memory_budget(device: str, processes: int) -> int | None:
    """Bytes that one process's tensors may take; None where that cannot be told without starting CUDA."""
    if device == "cpu":
        return int(_machine_bytes() * USABLE / processes) - PROCESS_BYTES
    smallest = _gpu_bytes()
    return None if smallest is None else int(smallest * USABLE)


def _with(run: Run, mode: str) -> Run:
    return run.model_copy(update={"mesh": run.mesh.model_copy(update={"recompute": mode})})


@dataclass(frozen=True)
class _Part:
    """Some parameters of this process: as many as it computes with, and over how many processes FSDP spreads them."""

    params: float
    shards: int
    matrices: bool = True  # of a block: Muon's

    @property
    def own(self) -> float:
        return self.params / self.shards


def _moments(run: Run, shape: Shape, rank: int) -> Iterator[Memory]:
    """The worst moments of one process of the pipeline."""
    at, mode = setting(run), str(run.mesh.recompute)
    layers, ends, flights = _stage(run, shape, rank)
    blocks = [_block_parts(at, shape, layer) for layer in layers]
    kept = [block(run, shape, layer) for layer in layers]
    everything = [*ends, *(part for parts in blocks for part in parts)]
    micro_batches = run.train.batch // at.sizes.dp // int(run.mesh.micro_batch)
    has_head = rank == _last_rank(run)

    own = sum(part.own for part in everything)
    whole = sum(part.params for part in everything)
    base = Memory(
        weights=int(FLOAT32 * own),
        optimizer=int(sum(_state_bytes(run, part) * part.own for part in everything)),
        gradients=0,
        gathered=0,
        activations=0,
        working=0,
        stage=rank,
        moment="",
    )
    # Gradients that are there before the backward pass of the last micro-batch: those of the ones before it, which FSDP
    # holds whole until it reduces them; DDP's buckets are always there.
    earlier = micro_batches > 1
    before = (whole if at.sharded else own) if earlier else own if _ddp(at) else 0.0

    pipeline = at.sizes.pp > 1
    common = shared_by_blocks(run, shape) * max(flights)
    head = _head(run, shape, at) if has_head else _Head(0.0, 0.0, 0.0)
    # The stage's output waits with the graph that made it until its gradient comes.
    stored = sum(k.of(mode) * n for k, n in zip(kept, flights, strict=True)) + common
    stored += head.kept * flights[-1] if has_head else at.stream * at.tokens / at.sizes.tp * shape.dim * max(flights)
    ends_computed = at.compute * sum(part.params for part in ends) if at.sharded else 0.0
    blocks_computed = [at.compute * sum(part.params for part in parts) for parts in blocks]
    casts = at.autocast and mode == "none"
    resident = ends_computed + (sum(blocks_computed) if at.sharded and pipeline else 0.0)
    if casts:
        resident += sum(c * n for c, n in zip(blocks_computed, flights, strict=True))

    if has_head:
        yield replace(
            base,
            gradients=int(FLOAT32 * before),
            gathered=int(resident + head.weight_copy),
            activations=int(stored),
            working=int(head.working),
            moment="the loss",
        )
    # Backwards, block by block. Those behind have given up their activations of this micro-batch for gradients.
    done = 0.0 if earlier or _ddp(at) else sum(p.params if at.sharded else p.own for p in ends) * has_head
    left = stored - head.kept * has_head
    largest = FLOAT32 * max(shape.dim * shape.ffn_dim, shape.dim * shape.q_dim) / at.sizes.tp
    for i in reversed(range(len(layers))):
        params = sum(part.params for part in blocks[i])
        fetched = 0.0
        if at.sharded and not pipeline:
            fetched = blocks_computed[i] + (blocks_computed[i - 1] if i else 0.0)
        elif at.autocast and not casts:
            fetched = blocks_computed[i]
        yield replace(
            base,
            gradients=int(FLOAT32 * (before + done)),
            gathered=int(resident + fetched),
            activations=int(left - kept[i].of(mode) + kept[i].none),
            working=int(kept[i].working + largest),
            moment=f"the backward pass of block {layers[i]}",
        )
        left -= kept[i].of(mode)
        if at.sharded:
            # Its gradients, and a copy of them in the order of the processes that they are sent to.
            yield replace(
                base,
                gradients=int(FLOAT32 * (before + done)),
                gathered=int(resident + fetched),
                activations=int(left),
                working=int((0 if earlier else at.compute * params) + FLOAT32 * params),
                moment=f"the reduction of block {layers[i]}",
            )
        if not (earlier or _ddp(at)):
            done += sum(part.own for part in blocks[i])
    yield replace(base, gradients=int(FLOAT32 * own), working=int(_update_bytes(run, shape)), moment="the update")


def _last_rank(run: Run) -> int:
    pp = int(run.mesh.pp)
    return next(r for r in range(pp) if _stage_numbers(run, r)[-1] == _stage_numbers(run, _v(run, pp))[-1])


def _v(run: Run, pp: int) -> int:
    return 0 if run.mesh.schedule == "zbv" else pp - 1


def _stage_numbers(run: Run, rank: int) -> list[int]:
    return stages_of(rank, int(run.mesh.pp), str(run.mesh.schedule))


def _stage(run: Run, shape: Shape, rank: int) -> tuple[list[int], list[_Part], list[int]]:
    """The layers of a process, what it holds of the model's two ends, and how many micro-batches of each layer
    are in flight at the worst moment."""
    at = setting(run)
    pp, schedule = at.sizes.pp, str(run.mesh.schedule)
    if pp == 1:
        cut, numbers, counts = [range(shape.layers)], [0], [1]
    else:
        cut = stretches(shape, pp, schedule, run.data.seq_len)
        numbers = _stage_numbers(run, rank)
        counts = in_flight(schedule, pp, rank, run.train.batch // at.sizes.dp // int(run.mesh.micro_batch))
    matrix = _Part(shape.vocab_size * shape.dim / at.sizes.tp, _shards(at), matrices=False)
    first, last = 0 in numbers, len(cut) - 1 in numbers
    apart = len(cut) > 1  # a tied embedding of two stages is held twice
    ends = [matrix] * (first + (last and (apart or not shape.tie_embeddings)))
    layers = [layer for n in numbers for layer in cut[n]]
    return layers, ends, [count for n, count in zip(numbers, counts, strict=True) for _ in cut[n]]


def in_flight(schedule: str, pp: int, rank: int, micro_batches: int) -> list[int]:
    """Of each stage of a process, the micro-batches whose activations it holds at its worst moment.

    As torch.distributed.pipelining orders them: 1f1b has as many as there are stages from here on; interleaved has run
    its warm-up and one more; zbv has two for each process, the more of them in its first stage the earlier it stands.
    """
    if schedule == "gpipe":
        return [micro_batches]
    if schedule == "1f1b":
        return [min(micro_batches, pp - rank)]
    if schedule == "zbv":
        return [min(micro_batches, 2 * pp - rank), min(micro_batches, max(1, rank))]
    round_of = micro_batches // max(1, micro_batches // pp)  # interleaved: micro-batches of a stage before the other's
    forwards = min(2 * micro_batches, round_of + 2 * (pp - 1 - rank) + 1)
    second = sum(i // round_of % 2 for i in range(forwards))
    return [forwards - second, second]


def _shards(at: Setting) -> int:
    return at.sizes.dp_shard * at.sizes.cp


def _ddp(at: Setting) -> bool:
    return at.sizes.world > 1 and at.sizes.dp_replicate == at.sizes.world


def _block_parts(at: Setting, shape: Shape, layer: int) -> list[_Part]:
    tp, dim = at.sizes.tp, shape.dim
    dense = dim * (2 * shape.q_dim + 2 * shape.kv_dim) / tp + 2 * dim
    if not shape.sparse(layer):
        return [_Part(dense + 3 * dim * shape.ffn_dim / tp, _shards(at))]
    e = shape.experts
    assert e is not None
    dense += dim * e.count + 3 * dim * e.ffn_dim * e.shared / tp
    # Experts are not cut by tensor parallelism: its processes are among those that share them.
    peers = _shards(at) * tp // at.sizes.ep if not _ddp(at) else 1
    return [_Part(dense, _shards(at)), _Part(3 * dim * e.ffn_dim * e.count / at.sizes.ep, peers)]


def _state_bytes(run: Run, part: _Part) -> int:
    """AdamW's two moments, or Muon's one, of a parameter; norms are too few to tell apart."""
    return FLOAT32 if run.train.optimizer.name == "muon" and part.matrices else 2 * FLOAT32


def _update_bytes(run: Run, shape: Shape) -> float:
    """AdamW updates in place. Muon holds a whole matrix several times: the gathered, its scaled copy and iterates."""
    if run.train.optimizer.name != "muon":
        return 0.0
    width = max(shape.ffn_dim, shape.q_dim)
    return FLOAT32 * (5 * shape.dim * width + 3 * min(shape.dim, width) ** 2)


@dataclass(frozen=True)
class _Head:
    kept: float  # of each micro-batch in flight: the last norm's input, and the gradients, which are taken forwards
    weight_copy: float
    working: float  # a chunk of logits


def _head(run: Run, shape: Shape, at: Setting) -> _Head:
    device = "cuda" if at.cuda else "cpu"
    rows, tokens, c = shape.vocab_size / at.sizes.tp, at.tokens / at.sizes.tp, at.compute
    chunk = min(at.tokens, max(CHUNK_TOKENS, CHUNK_BYTES[device] // (FLOAT32 * math.ceil(rows))))
    norm = at.stream if at.cuda else 2 * FLOAT32
    # Its input, its result and the gradient of that.
    kept = tokens * shape.dim * (norm + c + c) + FLOAT32 * rows * shape.dim
    # Logits and, in float32, their softmax.
    working = chunk * rows * (c + FLOAT32) + (c * rows * shape.dim if c < FLOAT32 else 0)
    return _Head(kept, c * rows * shape.dim if at.autocast else 0.0, working)


def _machine_bytes() -> int:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
    allowed = [int(text) for path in limits if path.exists() and (text := path.read_text().strip()).isdigit()]
    return min(whole, *allowed) if allowed else whole


def _gpu_bytes() -> int | None:
    """The smallest GPU's memory, asked of the driver's own tool: CUDA must not be started before the workers are."""
    ask = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    sizes = [int(line) for line in told.split("\n") if line.strip().isdigit()]
    return min(sizes) << 20 if sizes else None
