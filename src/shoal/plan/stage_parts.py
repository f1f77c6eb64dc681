"""What one process of the pipeline holds of a model, and how many micro-batches it has in flight. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shoal.plan.activations import Setting, setting
from shoal.spec.run import Run
from shoal.spec.shape import Shape
from shoal.spec.stages import stages_of, stretches


@dataclass(frozen=True)
class Part:
    """Some parameters: as many as this process computes with, and over how many processes FSDP spreads them."""

    params: float
    shards: int
    fsdp: bool  # gathered for computing, gradients reduced
    muon: bool  # matrices of a block, which Muon updates where it is asked for

    @property
    def own(self) -> float:
        return self.params / self.shards


@dataclass(frozen=True)
class Held:
    """By one process: its layers in the order they run, and the model's two ends where it has them."""

    layers: list[int]
    blocks: list[list[Part]]  # of each layer
    ends: list[Part]  # embedding and head
    last: bool
    flights: list[int]  # of each layer: micro-batches in flight at the worst moment

    @property
    def parts(self) -> list[Part]:
        return [*self.ends, *(part for parts in self.blocks for part in parts)]


def held(run: Run, shape: Shape, rank: int) -> Held:
    """By the processes of place `rank` in the pipeline."""
    at, schedule = setting(run), str(run.mesh.schedule)
    pp = at.sizes.pp
    cut, numbers, counts = [range(shape.layers)], [0], [1]
    if pp > 1:
        cut = _cut(shape, pp, schedule, run.data.seq_len)
        numbers = stages_of(rank, pp, schedule)
        counts = in_flight(schedule, pp, rank, micro_batches(run))
    first, last = 0 in numbers, len(cut) - 1 in numbers
    matrix = Part(shape.vocab_size * shape.dim / at.sizes.tp, _shards(at), at.sharded, muon=False)
    own_head = last and (len(cut) > 1 or not shape.tie_embeddings)  # stages apart hold a tied embedding twice
    layers = [layer for n in numbers for layer in cut[n]]
    return Held(
        layers=layers,
        blocks=[_block(at, shape, layer) for layer in layers],
        ends=[matrix] * (first + own_head),
        last=last,
        flights=[count for n, count in zip(numbers, counts, strict=True) for _ in cut[n]],
    )


@lru_cache(maxsize=256)  # asked for by every place of a pipeline, and by every layout of a search
def _cut(shape: Shape, pp: int, schedule: str, seq_len: int) -> list[range]:
    return stretches(shape, pp, schedule, seq_len)


def micro_batches(run: Run) -> int:
    """Of one process and one step."""
    return run.train.batch // setting(run).sizes.dp // int(run.mesh.micro_batch)


def in_flight(schedule: str, pp: int, rank: int, micro_batches: int) -> list[int]:
    """Of each stage of a process, the micro-batches whose activations it holds at its worst moment.

    As torch.distributed.pipelining orders them: gpipe has run all; 1f1b as many as there are stages from here on;
    interleaved its warm-up and one more; zbv two for each process, the more of them in its first stage the earlier it
    stands.
    """
    if schedule == "gpipe":
        return [micro_batches]
    if schedule == "1f1b":
        return [min(micro_batches, pp - rank)]
    if schedule == "zbv":
        return [min(micro_batches, 2 * pp - rank), min(micro_batches, max(1, rank))]
    round_of = micro_batches // max(1, micro_batches // pp)  # of one stage before the other's
    forwards = min(2 * micro_batches, round_of + 2 * (pp - 1 - rank) + 1)
    second = sum(i // round_of % 2 for i in range(forwards))
    return [forwards - second, second]


def ddp(at: Setting) -> bool:
    return at.sizes.world > 1 and at.sizes.dp_replicate == at.sizes.world


def _shards(at: Setting) -> int:
    return at.sizes.dp_shard * at.sizes.cp


def _block(at: Setting, shape: Shape, layer: int) -> list[Part]:
    tp, dim = at.sizes.tp, shape.dim
    mixer = shape.mixer_weights(layer)
    dense = sum(w.numbers / (1 if w.cut is None else tp) for w in mixer) + 2 * dim
    if not shape.sparse(layer):
        return [Part(dense + 3 * dim * shape.ffn_dim / tp, _shards(at), at.sharded, muon=True)]
    e = shape.experts
    assert e is not None
    dense += dim * e.count + 3 * dim * e.ffn_dim * e.shared / tp
    # Experts are not cut by tensor parallelism: its processes are among those that share them.
    peers = 1 if ddp(at) else _shards(at) * tp // at.sizes.ep
    return [
        Part(dense, _shards(at), at.sharded, muon=True),
        Part(3 * dim * e.ffn_dim * e.count / at.sizes.ep, peers, peers > 1, muon=True),
    ]
