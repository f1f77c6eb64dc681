"""What a training step sends, by axis and kind of operation, from sizes alone. No torch.

The same rows that `shoal.parallel.count` measures, summed over all processes, with the same convention for bytes; the
tests hold the two against each other for every axis. Two numbers cannot be known beforehand: how a router spreads its
tokens (here: evenly) and the order in which DDP's gradients become ready (here: backwards), which decides where its
buckets end. Muon, which sends matrices to whoever orthogonalises them, is not in it.

With L layers, M micro-batches a process, n processes on the axis, a token's hidden states of D numbers:

    shard       every block's parameters are gathered for the forward and again for the backward pass of each
                micro-batch, those of the last block and of the ends once; in a pipeline everything once a step.
                Gradients are scattered once a step, or with each micro-batch (`mesh.reduce`)
    replicate   gradients are reduced once a step: shards by HSDP, everything by DDP
    tp          a block gathers its input twice and scatters its result twice, and the reverse backwards; embedding
                and loss once each; gradients of what all hold whole (norms) when FSDP scatters, or once a step
    cp          all_to_all: heads for tokens and back. ring: keys and values n-1 times around, twice, gradients once
    pp          hidden states forwards, their gradients backwards, over each boundary between processes
    ep          tokens to their experts and back, and the reverse backwards
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.plan.chunks import CHUNK_BYTES, chunk_tokens
from shoal.spec.mesh import Sizes
from shoal.spec.mixers import KINDS
from shoal.spec.run import Run
from shoal.spec.shape import Shape

Dims = tuple[int, ...]
Rows = dict[tuple[str, str], list[float]]  # (axis, operation) → [calls, bytes], over all processes
FLOAT32, BFLOAT16, INT64 = 4, 2, 8
DDP_BUCKET_BYTES, DDP_FIRST_BUCKET_BYTES = 25 << 20, 1 << 20  # torch's
# Summed over all processes each step: three counts (targets, tokens, pairs that attend), whether to stop, six about
# saves; the loss; the norm.
CONTROL_BYTES = (10 * 8, 4, 8)


@dataclass(frozen=True)
class Step:
    shape: Shape
    sizes: Sizes
    batch: int  # windows of a step, over all processes
    micro_batch: int
    seq_len: int
    schedule: str = "1f1b"
    cp_method: str = "all_to_all"
    recompute: str = "none"
    compute_bytes: int = FLOAT32  # of a number that matrices multiply: what blocks exchange, what FSDP gathers
    stream_bytes: int = FLOAT32  # of a number between blocks
    chunk_bytes: int = CHUNK_BYTES["cpu"]  # of logits in the loss
    reduce: str = "step"

    @property
    def micro_batches(self) -> int:
        return self.batch // self.sizes.dp // self.micro_batch

    @property
    def reductions(self) -> int:
        """How often gradients leave a process."""
        return self.micro_batches if self.reduce == "micro_batch" else 1

    @property
    def tokens(self) -> int:
        """Of a micro-batch, on the processes of one tensor-parallel group."""
        return self.micro_batch * self.seq_len // self.sizes.cp

    @property
    def peers(self) -> int:
        """Processes of a pipeline stage (or of its pair of stages)."""
        return self.sizes.world // self.sizes.pp

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 carries the gradients."""
        return self.sizes.fsdp


def step_of(run: Run, shape: Shape) -> Step:
    """A run with nothing left open."""
    bf16 = run.train.precision in ("bf16", "fp8")
    step = Step(
        shape,
        Sizes.of(run.mesh),
        run.train.batch,
        int(run.mesh.micro_batch),
        run.data.seq_len,
        str(run.mesh.schedule),
        str(run.mesh.cp_method),
        str(run.mesh.recompute),
        BFLOAT16 if bf16 else FLOAT32,
        FLOAT32,
        CHUNK_BYTES["cuda" if run.resources.device == "cuda" else "cpu"],
        run.mesh.reduce,
    )
    return Step(**{**vars(step), "stream_bytes": BFLOAT16}) if bf16 else step


def traffic(step: Step) -> Rows:
    """(axis, operation) → [calls, bytes], summed over all processes; empty for one process."""
    rows: Rows = defaultdict(lambda: [0, 0.0])
    if step.sizes.world > 1:
        for axis in (_control, _data, _experts, _tensor, _context, _pipeline):
            axis(step, rows)
    return {key: row for key, row in sorted(rows.items()) if row[0]}


def _control(step: Step, rows: Rows) -> None:
    sums = [*CONTROL_BYTES]
    if sparse := _sparse_layers(step.shape):
        assert step.shape.experts is not None
        sums.append(sparse * step.shape.experts.count * INT64)  # loads, for the balance of the router
    for size in sums:
        _all_reduce(rows, "all", step.sizes.world, step.sizes.world, size)


def _data(step: Step, rows: Rows) -> None:
    """FSDP2, HSDP or DDP over everything but the experts that have a mesh of their own."""
    s, apart = step.sizes, _experts_apart(step)
    blocks = [_block(step.shape, layer, s.tp, apart) for layer in range(step.shape.layers)]
    if not step.sharded:
        if s.dp_replicate == s.world:
            parameters = [p for unit in (*_roots(step), *blocks) for p in unit]
            for size in _buckets([math.prod(p) * FLOAT32 for p in parameters]):
                _all_reduce(rows, "replicate", s.world, s.world, size)
        return
    ends = [blocks[-1], *_roots(step)]
    for units, gathers in ((blocks[:-1], 2 * step.micro_batches), (ends, step.micro_batches)):
        for unit in units:
            _sharded_unit(step, rows, "", unit, s.dp_shard * s.cp, gathers if s.pp == 1 else 1)


def _experts(step: Step, rows: Rows) -> None:
    """Tokens to their experts and back; and FSDP2 over the processes that hold the same experts."""
    if not (sparse := _sparse_layers(step.shape)):
        return
    s, e = step.sizes, step.shape.experts
    assert e is not None
    if s.ep > 1:
        again = step.recompute in ("attention", "full")  # selective recomputation keeps what has travelled
        calls = sparse * step.micro_batches * step.peers
        _all_to_all(rows, "ep", s.ep, calls * (2 if again else 1), e.count * INT64)
        numbers = step.tokens // s.tp * e.top_k * step.shape.dim
        _all_to_all(rows, "ep", s.ep, calls * (6 if again else 4), numbers * step.compute_bytes)
    if _experts_apart(step):
        own = [(e.count // s.ep, e.ffn_dim, step.shape.dim)] * 3
        shard = s.dp_shard * s.cp * s.tp // s.ep
        for _ in range(sparse):
            # Sharded alone, without the blocks around them, they are gathered anew for each pass in a pipeline too.
            once = s.pp > 1 and step.sharded
            _sharded_unit(step, rows, "expert ", own, shard, 1 if once else 2 * step.micro_batches)


def _sharded_unit(step: Step, rows: Rows, prefix: str, unit: Sequence[Dims], n: int, gathers: int) -> None:
    """What FSDP2 moves for the parameters that it gathers together: each is padded to n equal parts of its rows."""
    part = sum(_part(p, n) for p in unit)
    copies, grads = step.sizes.dp_replicate, part * FLOAT32
    if n > 1:
        _add(rows, f"{prefix}shard", "all_gather", gathers * step.peers, (n - 1) * part * step.compute_bytes)
        _add(rows, f"{prefix}shard", "reduce_scatter", step.reductions * step.peers, (n - 1) * grads)
    _all_reduce(rows, f"{prefix}replicate", copies, step.peers, grads)


def _tensor(step: Step, rows: Rows) -> None:
    n, shape, m = step.sizes.tp, step.shape, step.micro_batches * step.peers
    if n == 1:
        return
    hidden = step.tokens * shape.dim / n  # numbers of one process's stretch
    kept, full = step.recompute == "none", step.recompute in ("attention", "full")
    for layer in range(shape.layers):
        taken = [KINDS[shape.mixer(layer)].gathered(shape)]  # by the mixer, and by the feed-forward
        taken += [] if shape.sparse(layer) and not _shared(shape) else [(shape.dim,)]
        # The scatter that ends a block is not done again: nothing in its backward pass needs the result, but a norm.
        for op, times in (("all_gather", 1 + (not kept)), ("reduce_scatter", 1)):
            for width in (width for widths in taken for width in widths):
                _add(rows, "tp", op, times * m, (n - 1) * step.tokens * width / n * step.compute_bytes)
            other = "reduce_scatter" if op == "all_gather" else "all_gather"  # what comes out, and its gradient
            _add(rows, "tp", other, len(taken) * m, (n - 1) * hidden * step.compute_bytes)
        if full:
            _add(rows, "tp", "reduce_scatter", m * shape.norms // 2, (n - 1) * hidden * step.compute_bytes)
    # A state space norms its heads together: a sum for each token, and its gradient's.
    _all_reduce(rows, "tp", n, (3 if full else 2) * m * shape.layers_of("mamba"), step.tokens * FLOAT32)
    _add(rows, "tp", "reduce_scatter", m, (n - 1) * hidden * step.stream_bytes)  # the embedding
    _add(rows, "tp", "all_gather", m, (n - 1) * hidden * step.stream_bytes)
    chunk = max(1, chunk_tokens(shape.vocab_size // n, step.chunk_bytes) // (2 * n))
    for begin in range(0, step.tokens // n, chunk):  # the loss
        size = min(chunk, step.tokens // n - begin)
        for op in ("all_gather", "reduce_scatter"):
            _add(rows, "tp", op, m, (n - 1) * size * shape.dim * step.compute_bytes)
        _add(rows, "tp", "all_gather", m, (n - 1) * size * n * 3 * FLOAT32)  # three numbers a token of each process
    # FSDP adds micro-batches up in float32; what it reduces alone it leaves as it was computed.
    alone = step.sharded and (step.micro_batches == 1 or step.reduce == "micro_batch")
    for size in _held_whole(shape):
        _all_reduce(rows, "tp", n, step.peers * step.reductions, size * (step.compute_bytes if alone else FLOAT32))


def _context(step: Step, rows: Rows) -> None:
    s, shape = step.sizes, step.shape
    if s.cp == 1:
        return
    calls = shape.layers * step.micro_batches * step.peers
    q, kv = (step.tokens * dim // s.tp for dim in (shape.q_dim, shape.kv_dim))
    # Selective recomputation keeps what has travelled; attention's result is the ring's, but not the exchanges'.
    again = step.recompute == "full" or (step.recompute == "attention" and step.cp_method == "all_to_all")
    times = 3 if again else 2
    if step.cp_method == "all_to_all":
        for numbers in (q + 2 * kv, q):
            _all_to_all(rows, "cp", s.cp, times * calls, numbers * step.compute_bytes)
    else:
        rounds = (s.cp - 1) * calls
        _add(rows, "cp", "send", times * rounds, 2 * kv * step.compute_bytes)
        _add(rows, "cp", "send", rounds, 2 * kv * FLOAT32)


def _pipeline(step: Step, rows: Rows) -> None:
    s, shape = step.sizes, step.shape
    if s.pp == 1:
        return
    two = step.schedule in ("interleaved", "zbv")
    # In a "V" the two stages in the middle are on one process, and so are the first and the last.
    boundaries = s.pp * (2 if two else 1) - 1 - (step.schedule == "zbv")
    message = step.tokens // s.tp * shape.dim * step.stream_bytes
    _add(rows, "pp", "send", 2 * boundaries * step.micro_batches * step.peers, message)
    if shape.tie_embeddings and step.schedule != "zbv":  # both uses' gradients, each to the other's process
        n = s.dp_shard * s.cp if step.sharded else 1
        for held in filter(None, _parts(shape.vocab_size // s.tp, n)):
            _add(rows, "pp", "send", 2 * step.peers // n, held * shape.dim * FLOAT32)


def _roots(step: Step) -> list[list[Dims]]:
    """Parameters outside of the blocks, as FSDP2 gathers them: the embedding, and norm and head; where these share a
    matrix, all together, unless it lies on two stages."""
    shape, s = step.shape, step.sizes
    matrix = (shape.vocab_size // s.tp, shape.dim)
    end = [(shape.dim,)] if shape.tie_embeddings else [(shape.dim,), matrix]
    if s.pp == 1 and shape.tie_embeddings:
        return [[matrix, *end]]
    return [[matrix], [*([matrix] if shape.tie_embeddings else []), *end]]


def _block(shape: Shape, layer: int, tp: int, experts_apart: bool) -> list[Dims]:
    """The parameters of a block on one tensor-parallel process."""
    dim, ffn = shape.dim, shape.ffn_dim // tp
    mixer = [weight.local(tp) for weight in shape.mixer_weights(layer)]
    out: list[Dims] = [(dim,), *mixer, (dim,)]
    after: list[Dims] = [(dim,)] * (shape.norms - 2)
    if not shape.sparse(layer):
        biases: list[Dims] = [(ffn,), (ffn,), (dim,)] if shape.mlp_bias else []
        return [*out, (ffn, dim), (ffn, dim), (dim, ffn), *biases, *after]
    e = shape.experts
    assert e is not None
    out.append((e.count, dim))
    if e.shared:
        width = e.shared * e.ffn_dim // tp
        out += [(width, dim), (width, dim), (dim, width)]
    if not experts_apart:
        out += [(e.count, e.ffn_dim, dim), (e.count, e.ffn_dim, dim), (e.count, dim, e.ffn_dim)]
    return out + after


def _held_whole(shape: Shape) -> Iterable[int]:
    """Numbers of each parameter that tensor parallelism does not cut, and whose gradient it sums."""
    yield shape.dim
    for layer in range(shape.layers):
        yield from [shape.dim] * shape.norms
        yield from (weight.numbers for weight in shape.mixer_weights(layer) if weight.summed)
        if shape.sparse(layer):
            assert shape.experts is not None
            yield shape.experts.count * shape.dim


def _experts_apart(step: Step) -> bool:
    """Whether experts are left to their own mesh: sharded over it, or alone on their process. Not under DDP."""
    return _sparse_layers(step.shape) > 0 and step.sizes.dp_replicate != step.sizes.world


def _sparse_layers(shape: Shape) -> int:
    return sum(shape.sparse(layer) for layer in range(shape.layers))


def _shared(shape: Shape) -> bool:
    return shape.experts is not None and shape.experts.shared > 0


def _buckets(sizes: Sequence[int]) -> list[int]:
    """DDP's all-reduces: gradients as they become ready, last parameters first, until a bucket is full."""
    buckets: list[int] = []
    filled = 0
    for size in reversed(sizes):
        filled += size
        if filled >= (DDP_BUCKET_BYTES if buckets else DDP_FIRST_BUCKET_BYTES):
            buckets.append(filled)
            filled = 0
    return [*buckets, filled] if filled else buckets


def _part(shape: Dims, n: int) -> int:
    """Numbers that each of n processes holds of a parameter, padding included."""
    return -(-shape[0] // n) * math.prod(shape[1:])


def _parts(rows: int, n: int) -> list[int]:
    """Rows that each of n processes holds, without padding."""
    width = -(-rows // n)
    return [max(0, min(width, rows - i * width)) for i in range(n)]


def _all_reduce(rows: Rows, axis: str, n: int, calls: int, size: float) -> None:
    if n > 1:
        _add(rows, axis, "all_reduce", calls, 2 * (n - 1) / n * size)


def _all_to_all(rows: Rows, axis: str, n: int, calls: int, size: float) -> None:
    _add(rows, axis, "all_to_all", calls, (n - 1) / n * size)


def _add(rows: Rows, axis: str, op: str, calls: int, size: float) -> None:
    """`calls` over all processes, each of `size` bytes."""
    row = rows[axis, op]
    row[0] += calls
    row[1] += calls * size
