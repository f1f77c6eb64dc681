"""The memory that a run needs on each process, part by part, and how little recomputation makes it fit. No torch.

A training step has three kinds of moments that can be its worst: the loss, when all activations are there; the backward
pass of some block, when a part of the activations has made room for gradients; the update. All of them are computed for
every place in the pipeline, and the worst is the answer. benchmarks/memory.py lays it beside what processes really use.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from shoal.devices import gpus
from shoal.plan.activations import BFLOAT16, FLOAT32, Setting, block, setting, shared_by_blocks
from shoal.plan.chunks import CHUNK_BYTES, chunk_tokens
from shoal.plan.stage_parts import Held, Part, ddp, held, micro_batches
from shoal.shared_gpu import ranks_per_gpu
from shoal.spec.eight_bits import head_in_8_bits
from shoal.spec.run import Run
from shoal.spec.shape import Shape

MODES = ("none", "selective", "attention", "full")
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
    snapshot: int = 0  # the copy that a save in the background is written from; on a GPU it is the host's

    @property
    def total(self) -> int:
        state = self.weights + self.optimizer + self.snapshot
        return state + self.gradients + self.gathered + self.activations + self.working


class _Moment(NamedTuple):
    """What is there beside the state; bare, since a search looks at tens of thousands of them."""

    total: int
    name: str
    gradients: int
    gathered: int
    activations: int
    working: int


def memory(run: Run, shape: Shape) -> Memory:
    """Of a run with nothing left open, on its `resources.device`."""
    return max((_worst(run, shape, rank) for rank in range(int(run.mesh.pp))), key=lambda m: m.total)


def choose_recompute(run: Run, shape: Shape, budget_bytes: int | None) -> tuple[str, str]:
    """As little recomputation as fits, and why. `run` has nothing left open but `mesh.recompute`."""
    if budget_bytes is None:
        return "none", "how much memory the device has is not known here"
    needs = {mode: memory(_with(run, mode), shape).total for mode in MODES}
    mode = next((mode for mode in MODES if needs[mode] <= budget_bytes), "full")
    predicted = ", ".join(f"{m} {n / 1e9:.3g}" for m, n in needs.items())
    fits = "fits" if needs[mode] <= budget_bytes else "does not fit, and nothing takes less,"
    return mode, f"predicted GB a process: {predicted}; {mode} {fits} into {budget_bytes / 1e9:.3g}"


def choose_reduce(run: Run, shape: Shape, budget_bytes: int | None) -> tuple[str, str]:
    """Whether gradients are summed up once a step or with each micro-batch, and why: the latter where it makes the run
    fit, with as much recomputation as is allowed. `run` has nothing left open but `mesh.recompute`."""
    if budget_bytes is None or micro_batches(run) == 1:
        return "step", ""
    least = run.mesh.recompute if run.mesh.recompute != "auto" else "full"
    of_way = {way: _with(run, least, way) for way in ("step", "micro_batch")}
    needs = {way: memory(of, shape).total for way, of in of_way.items()}
    if needs["step"] <= budget_bytes or needs["micro_batch"] > budget_bytes:
        return "step", ""
    predicted = ", ".join(f"{way} {n / 1e9:.3g}" for way, n in needs.items())
    return "micro_batch", f"predicted GB a process: {predicted}, of {budget_bytes / 1e9:.3g}"


def memory_budget(device: str, processes: int) -> int | None:
    """Bytes that one process's tensors may take; None where that cannot be told without starting CUDA."""
    if device == "cpu":
        return int(_machine_bytes() * USABLE / processes) - PROCESS_BYTES
    sizes = _gpu_bytes()
    return int(min(sizes) * USABLE / ranks_per_gpu(processes, len(sizes))) if sizes else None


def _with(run: Run, mode: str, reduce: str | None = None) -> Run:
    changed = {"recompute": mode, "reduce": reduce or run.mesh.reduce}
    return run.model_copy(update={"mesh": run.mesh.model_copy(update=changed)})


def _worst(run: Run, shape: Shape, rank: int) -> Memory:
    """The worst moment of the processes of one place in the pipeline."""
    at, has = setting(run), held(run, shape, rank)
    own = sum(part.own for part in has.parts)
    state = sum(_state_bytes(run, part) * part.own for part in has.parts)
    saved = _slots(run) * (FLOAT32 * own + state) / at.sizes.dp_replicate  # copies share the writing
    worst = max(_moments(run, shape, has, own), key=lambda moment: moment.total)
    return Memory(int(FLOAT32 * own), int(state), *worst[2:], rank, worst.name, int(saved))


def _moments(run: Run, shape: Shape, has: Held, own: float) -> Iterator[_Moment]:
    """The moments that can be the worst of processes which hold `own` parameters."""
    at = setting(run)
    yield _moment("the update", FLOAT32 * own, 0, 0, _update_bytes(run, shape))
    # Gradients that are there before the last micro-batch's: the earlier ones', which FSDP holds whole until it reduces
    # them; DDP's buckets always are.
    earlier = sum(part.params for part in has.parts)
    if micro_batches(run) == 1:
        yield from _backward(run, shape, has, own if ddp(at) else 0.0, grows=not ddp(at))
    elif run.mesh.reduce == "micro_batch":  # of the earlier ones this process's shards are there
        yield from _backward(run, shape, has, own, grows=True)
    elif at.sizes.pp > 1 and run.mesh.schedule == "gpipe":
        # All micro-batches go forwards before the first gradient; when the second goes backwards, one is gone.
        yield from _backward(run, shape, has, 0.0, grows=True)
        yield from _backward(run, shape, replace(has, flights=[n - 1 for n in has.flights]), earlier, grows=False)
    else:
        yield from _backward(run, shape, has, earlier, grows=False)


def _moment(name: str, gradients: float, gathered: float, activations: float, working: float) -> _Moment:
    a, b, c, d = int(gradients), int(gathered), int(activations), int(working)
    return _Moment(a + b + c + d, name, a, b, c, d)


def _slots(run: Run) -> int:
    """Snapshots held in the memory that is planned here; as `shoal.train.takeover` asks for them."""
    if run.resources.device != "cpu" or not run.checkpoint.background:
        return 0
    return 3 if isinstance(run.checkpoint.memory, int) else 1


def _backward(run: Run, shape: Shape, has: Held, before: float, grows: bool) -> Iterator[_Moment]:
    """The loss and the backward pass of one micro-batch, `before` being the gradients (in numbers) that are there when
    it begins, and `grows` whether it adds others to them."""
    at, mode = setting(run), str(run.mesh.recompute)
    kinds = [(shape.sparse(layer), shape.slides(layer)) for layer in has.layers]
    of_kind = {kind: block(run, shape, layer) for kind, layer in dict(zip(kinds, has.layers, strict=True)).items()}
    kept = [of_kind[kind] for kind in kinds]
    most = max(has.flights)
    head = _head(run, shape, at) if has.last else _Head(0.0, 0.0, 0.0)
    activations = sum(k.of(mode) * n for k, n in zip(kept, has.flights, strict=True))
    activations += shared_by_blocks(run, shape) * most
    # A stage's output stays with the graph that made it until its gradient comes.
    output = at.stream * at.tokens * shape.dim / at.sizes.tp
    activations += head.kept * has.flights[-1] if has.last else output * most

    # FSDP gathers the two ends for the whole step; a block when it is its turn, the last one until its backward pass,
    # and in a pipeline each once a step.
    fetched = [at.compute * sum(part.params for part in parts if part.fsdp) for parts in has.blocks]
    cast = [at.compute * sum(part.params for part in parts if not part.fsdp) * at.autocast for parts in has.blocks]
    if at.eight:  # what the backward pass multiplies with, one byte a number
        cast = [float(sum(part.params for part in parts)) for parts in has.blocks]
    gathered = at.compute * sum(part.params for part in has.ends if part.fsdp)
    if at.sizes.pp > 1:
        gathered += sum(fetched)
    if mode == "none":  # every micro-batch's graph has its own copies of the weights
        gathered += sum(c * n for c, n in zip(cast, has.flights, strict=True))

    if has.last:
        last = gathered + (fetched[-1] if at.sizes.pp == 1 else 0.0)
        yield _moment("the loss", FLOAT32 * before, last + head.weight_copy, activations, head.working)
    # Block by block, each gives up its activations for gradients. The head's, which FSDP reduces with the embedding's
    # at the very end, came first. Shards are added to those that are there.
    gradients, there = before, before > 0
    if has.last and grows:
        gradients += has.ends[-1].params
    activations -= head.kept
    largest = FLOAT32 * max(shape.dim * shape.ffn_dim, shape.dim * shape.q_dim) / at.sizes.tp
    for i in reversed(range(len(has.layers))):
        rest, number = activations - kept[i].of(mode), has.layers[i]
        now = gathered + (cast[i] if mode != "none" else 0.0)
        if at.sizes.pp == 1:
            now += fetched[i] + (fetched[i - 1] if i else 0.0)  # the one that is next is on its way
        working = kept[i].working + largest
        held_now = FLOAT32 * gradients
        yield _moment(f"the backward pass of block {number}", held_now, now, rest + kept[i].none, working)
        if fetched[i]:
            # Its gradients, and in float32 a copy of them in the order of the processes that they go to.
            working = (grows + FLOAT32 / at.compute) * fetched[i]
            yield _moment(f"the reduction of block {number}", held_now, now, rest, working)
        activations = rest
        if grows and not there:
            gradients += sum(part.own for part in has.blocks[i])


def _state_bytes(run: Run, part: Part) -> int:
    """AdamW's two moments of a parameter, or Muon's one; norms are too few to be told apart."""
    if run.train.optimizer.name == "muon" and part.muon:
        return FLOAT32
    return 2 * (BFLOAT16 if run.train.optimizer.moments == "bf16" else FLOAT32)


def _update_bytes(run: Run, shape: Shape) -> float:
    """AdamW updates in place. Muon holds a whole matrix several times: as it was sent and came, its scaled copy and
    iterates, and the result as it goes back."""
    if run.train.optimizer.name != "muon":
        return 0.0
    width = max(shape.ffn_dim, shape.q_dim)
    return FLOAT32 * (7 * shape.dim * width + 3 * min(shape.dim, width) ** 2)


@dataclass(frozen=True)
class _Head:
    kept: float  # of each micro-batch in flight: the last norm's input and result, and the gradients, taken forwards
    weight_copy: float  # autocast's
    working: float  # a chunk of logits


def _head(run: Run, shape: Shape, at: Setting) -> _Head:
    rows, c = shape.vocab_size / at.sizes.tp, at.compute
    chunk = min(at.tokens, chunk_tokens(math.ceil(rows), CHUNK_BYTES["cuda" if at.cuda else "cpu"]))
    norm = at.stream if at.cuda else 2 * FLOAT32
    copies = c * rows * shape.dim if at.autocast else 0.0
    kept = at.tokens / at.sizes.tp * shape.dim * (norm + c + c) + FLOAT32 * rows * shape.dim
    if head_in_8_bits(run, shape):
        # The gradient of a group, of two chunks, in 8 bits; of an eighth of it logits and gradient as well. The weight
        # in 8 bits, as it is and transposed.
        group = min(at.tokens, 2 * chunk)
        return _Head(kept, 2 * rows * shape.dim, rows * (group + 3 * group / 8))
    if at.cuda and run.train.kernels != "plain":
        # Logits become their gradient in place, and cuBLAS adds products up in float32. With tensor parallelism torch's
        # operations do it, on two chunks of half the size.
        working = chunk * rows * (c if at.sizes.tp == 1 else c + FLOAT32)
    else:
        # Logits and, in float32, their softmax; a product that is not float32 is held before it is added up.
        working = chunk * rows * (c + FLOAT32) + (c * rows * shape.dim if c < FLOAT32 and not at.cuda else 0)
    return _Head(kept, copies, working)


def _machine_bytes() -> int:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
    allowed = [int(text) for path in limits if path.exists() and (text := path.read_text().strip()).isdigit()]
    return min(whole, *allowed) if allowed else whole


def _gpu_bytes() -> list[int]:
    """Of each GPU that says it."""
    return [gpu.memory_bytes for gpu in gpus() if gpu.memory_bytes]
