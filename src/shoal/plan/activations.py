"""What a block keeps of a micro-batch for its backward pass: bytes on one process, by way of recomputing. No torch.

Counted from the code and checked against it (tests/plan compare with the live tensors of real blocks). With D the width
of the stream between blocks, Q and K those of queries and of keys, F that of the feed-forward, H heads; a token keeps

    eager, none                       in bytes of           why
    x and h, the norms' inputs        stream    2D          RMSNorm; on a CPU its kernel is several, which keep the
                                                            input in float32 and also the normed input
    both norms' results               compute   2D          inputs of q, k, v and of gate, up
    q, k, v and their mixture         compute   2Q + 2K     attention; and H log-sum-exps in float32
    gate, silu(gate), up, product     compute   4F          silu, the product, and the input of `down`
    mask as numbers                   compute   seq         made of the boolean one by each block that has one

    selective                         x                     the block's input
                                      q, k, v, mixture, out, gate, up         products and attention, but for `down`
    attention                         x, mixture            and the mixture's log-sum-exps
    full                              x

In 8 bits (`fp8`) the inputs of products are kept as one byte a number, which goes for what only they need: both norms'
results and the input of `down`; the mixture's is kept beside it. Recomputation makes the casts again.

Tensor parallelism divides all of it but the norms' results, which are gathered for the products; context parallelism
and data parallelism divide the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal.plan.documents import skips_between
from shoal.spec.mesh import Sizes
from shoal.spec.mixers import mamba as facts
from shoal.spec.mixers import mla as latent
from shoal.spec.run import Run
from shoal.spec.shape import Shape

FLOAT32, BFLOAT16 = 4, 2


@dataclass(frozen=True)
class Setting:
    """What decides how much is kept, of a run with nothing left open."""

    sizes: Sizes
    tokens: float  # of a micro-batch, on the processes of one tensor-parallel group
    seq: int  # tokens of a whole window
    compute: int  # bytes of a number that matrices multiply
    stream: int  # bytes of a number between blocks
    autocast: bool  # the compute type is made of float32 on the way, not by FSDP beforehand
    sharded: bool  # FSDP2 carries the gradients
    cuda: bool
    compiled: bool
    ring: bool
    eight: bool = False  # products in 8 bits


def setting(run: Run) -> Setting:
    s = Sizes.of(run.mesh)
    readers = s.dp * s.cp
    sharded = s.dp_shard * s.cp > 1 or 1 < readers < s.world  # as shoal.parallel.shard decides
    bf16 = run.train.precision in ("bf16", "fp8")
    return Setting(
        sizes=s,
        tokens=int(run.mesh.micro_batch) * run.data.seq_len / s.cp,
        seq=run.data.seq_len,
        compute=BFLOAT16 if bf16 else FLOAT32,
        stream=BFLOAT16 if bf16 else FLOAT32,
        autocast=bf16 and not sharded,
        sharded=sharded,
        cuda=run.resources.device == "cuda",
        compiled=run.train.compile is True,
        ring=s.cp > 1 and run.mesh.cp_method == "ring",
        eight=run.train.precision == "fp8",
    )


@dataclass(frozen=True)
class Kept:
    """Bytes of one block and one micro-batch."""

    none: float
    selective: float
    attention: float
    full: float
    working: float  # beside all of `none`: what the backward pass of this block holds at its worst moment

    def of(self, mode: str) -> float:
        return float(getattr(self, mode))


def block(run: Run, shape: Shape, layer: int) -> Kept:
    at = setting(run)
    tp, c, r = at.sizes.tp, at.compute, at.stream
    mixer = MIXERS[shape.mixer(layer)](run, at, shape, layer)
    ffn, ffn_selective, inner = _sparse(at, shape) if shape.sparse(layer) else _dense(at, shape.dim, shape.ffn_dim)
    # What a mixer and a feed-forward said is kept where it is normed too.
    norms = shape.norms * _norm_input(at, shape) * shape.dim / tp
    if at.compiled:
        # The compiler's partitioner computes silu again, and the norms from their input and one number a token.
        none = (r + c * (shape.norms - 1)) * shape.dim / tp + c * shape.dim + mixer.none + ffn
    else:
        none = norms + c * shape.dim + mixer.none + mixer.mask + ffn
    if at.eight:
        none += shape.q_dim - (c - 1) * shape.dim
        none -= 0 if shape.sparse(layer) else (c - 1) * (shape.dim + shape.ffn_dim)
    selective = (r + c * shape.norms / 2) * shape.dim / tp + mixer.selective + ffn_selective
    # The gradients of the stream and of what the feed-forward was computing; with tensor parallelism the former is
    # gathered first.
    working = r * shape.dim / tp + 2 * c * inner + (c * shape.dim if tp > 1 else 0)
    full = r * shape.dim / tp
    mixed = full + mixer.attention
    if at.compiled and tp > 1:  # shoal.parallel.recompute has the reason
        full = mixed
    return Kept(*(at.tokens * per_token for per_token in (none, selective, mixed, full, working + mixer.working)))


@dataclass(frozen=True)
class Mixing:
    """Bytes a token that a mixer keeps, beside the normed input, by way of recomputing."""

    none: float
    selective: float
    attention: float
    mask: float = 0.0  # where nothing is compiled
    working: float = 0.0  # gradients at its worst moment, where they are more than those of the feed-forward


def _attention_kept(run: Run, at: Setting, shape: Shape, layer: int) -> Mixing:
    kept, exchanged = _attention(at, shape)
    masked = _masked(run, shape, layer) and not at.ring and not _by_rule(run, shape)
    return Mixing(
        none=kept + exchanged + _qk_norm(at, shape),
        selective=kept + 2 * exchanged,
        attention=(at.compute * shape.q_dim + FLOAT32 * shape.heads) / at.sizes.tp,
        mask=at.compute * at.seq * at.sizes.cp if masked else 0,
    )


def _mamba_kept(run: Run, at: Setting, shape: Shape, layer: int) -> Mixing:
    """Of a state space, per token: for each channel of the convolution its input, that shifted once for each token
    before it, the sum, and the result in float32; then float32 alone: what the scan takes in and gives, the gate, and
    for each head and group the decays and scores within a chunk; a state per chunk."""
    m, c, tp = facts.of(shape), at.compute, at.sizes.tp
    inner, states = facts.inner_dim(m), m.groups * m.state_dim
    channels = inner / tp + 2 * states / (tp if m.groups > 1 else 1)
    heads, groups, width = m.heads / tp, max(1.0, m.groups / tp), inner / tp
    chunk = min(facts.CHUNK, at.seq)
    convolved = c * channels * (m.conv_width + 1) + FLOAT32 * channels
    within = FLOAT32 * (chunk * (2 * heads + groups) + 7 * width + 2 * heads)
    # Between chunks: what each leaves and takes up, and five sets of states.
    between = FLOAT32 * (2 * width + 5 * width * m.state_dim / chunk) if at.seq > chunk else 0.0
    none = convolved + within + between + (c * width if c < FLOAT32 else 0)
    products = c * (2 * width + (channels - width) + heads)
    return Mixing(none=none, selective=products, attention=0.0, working=FLOAT32 * chunk * 2 * heads)


def _mla_kept(run: Run, at: Setting, shape: Shape, layer: int) -> Mixing:
    """Of latent attention: the short vectors and what they were before their norms; queries, keys, values and the
    mixture, all as wide as queries; and what of the mixture goes out."""
    m, c, tp = latent.of(shape), at.compute, at.sizes.tp
    short, turned = (m.q_lora_rank or 0) + m.kv_lora_rank, m.qk_rope_head_dim
    values = shape.heads * m.v_head_dim
    mixture = (c * shape.q_dim + FLOAT32 * shape.heads) / tp
    none = 3 * c * shape.q_dim / tp + mixture + (c * values / tp if m.v_head_dim < shape.head_dim else 0)
    none += (c if at.cuda else 2 * FLOAT32) * short / tp + c * turned / tp + c * short
    if m.q_lora_rank is not None:
        none -= c * shape.dim * (1 - 1 / tp)  # of its input nothing is gathered
    products = c * (short + turned + shape.q_dim + shape.heads * m.qk_nope_head_dim + values) / tp
    masked = _masked(run, shape, layer) and not at.ring and not _by_rule(run, shape)
    exchanged = 0.0 if at.sizes.cp == 1 or at.ring else 2 * c * shape.q_dim / tp
    return Mixing(
        none=none + exchanged,
        selective=products + mixture + 2 * exchanged,
        attention=mixture,
        mask=c * at.seq * at.sizes.cp if masked else 0,
    )


def shared_by_blocks(run: Run, shape: Shape) -> float:
    """Masks and rotary positions, made once a forward pass."""
    at = setting(run)
    angles = at.tokens * FLOAT32 * shape.rotary_dim * (1 if shape.sliding_rope_theta is None else 2)
    if at.ring or _by_rule(run, shape) or not any(_masked(run, shape, layer) for layer in range(shape.layers)):
        return angles
    both = 2 if run.data.mask_documents and 0 < shape.sliding_layers < shape.attending_layers else 1
    return angles + both * int(run.mesh.micro_batch) * at.seq**2


def _norm_input(at: Setting, shape: Shape) -> int:
    """Bytes a number that RMSNorm keeps of its input: one kernel keeps it as it came, or in float32 where its weight is
    centred; the CPU's several keep it, and it divided by its norm, in float32."""
    kept = FLOAT32 if shape.about.centred_norms else at.stream
    return kept if at.cuda else 2 * FLOAT32


def _qk_norm(at: Setting, shape: Shape) -> float:
    if not shape.qk_norm:
        return 0.0
    return (at.compute if at.cuda else 2 * FLOAT32) * (shape.q_dim + shape.kv_dim) / at.sizes.tp


def _attention(at: Setting, shape: Shape) -> tuple[float, float]:
    """Bytes a token of q, k, v, their mixture and its log-sum-exp; and of what the exchange between the processes of a
    sequence (all_to_all) adds to them."""
    tp, c = at.sizes.tp, at.compute
    # In float32 CUDA has no kernel that shares key and value heads: they are copied for each query head.
    keys = shape.q_dim if at.cuda and c == FLOAT32 else shape.kv_dim
    kept = (c * (2 * shape.q_dim + 2 * keys) + FLOAT32 * shape.heads) / tp
    if at.sizes.cp == 1 or at.ring:
        return kept, 0.0
    return kept, c * (shape.q_dim + shape.kv_dim) / tp


def _dense(at: Setting, dim: int, width: int) -> tuple[float, float, float]:
    """Bytes a token that a feed-forward keeps with its input, those of selective recomputation, and its local width."""
    local = width / at.sizes.tp
    return at.compute * (dim + local * (3 if at.compiled else 4)), at.compute * local * 2, local


def _sparse(at: Setting, shape: Shape) -> tuple[float, float, float]:
    """The same of a mixture of experts, in step (all experts get as many tokens)."""
    e = shape.experts
    assert e is not None
    c, own = at.compute, 1 / at.sizes.tp  # a process routes the tokens of its own stretch
    rows = e.top_k * own
    # The router reads its input in float32 and keeps three tables of all experts; rows keep where they came from.
    routing = own * (FLOAT32 * (shape.dim + 3 * e.count) + 6 * 8 * e.top_k)
    none = c * rows * (2 * shape.dim + 4 * e.ffn_dim) + routing
    selective = c * rows * (shape.dim + 2 * e.ffn_dim) + own * FLOAT32 * e.count
    if at.sizes.ep > 1:
        selective += 2 * c * rows * shape.dim  # what the two exchanges brought
    if not e.shared:
        return none, selective, rows * e.ffn_dim
    shared, shared_selective, width = _dense(at, shape.dim, e.shared * e.ffn_dim)
    if c == FLOAT32 and at.sizes.tp == 1:
        shared -= c * shape.dim  # its input is the router's
    return none + shared, selective + shared_selective + c * shape.dim * own, max(width, rows * e.ffn_dim)


def _by_rule(run: Run, shape: Shape) -> bool:
    """Whether documents are told apart by a rule instead of a matrix (shoal.model.documents)."""
    cuda, precision = run.resources.device == "cuda", str(run.train.precision)
    return run.mesh.cp == 1 and skips_between(run, shape, cuda, precision)


def _masked(run: Run, shape: Shape, layer: int) -> bool:
    """Whether attention takes a mask: packed documents are assumed wherever they are kept apart."""
    window = shape.sliding_window
    slides = window is not None and window < run.data.seq_len and shape.slides(layer)
    return run.data.mask_documents or slides


MIXERS: dict[str, Callable[[Run, Setting, Shape, int], Mixing]] = {
    "attention": _attention_kept,
    "mamba": _mamba_kept,
    "mla": _mla_kept,
}
