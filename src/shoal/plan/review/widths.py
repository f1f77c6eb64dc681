"""Widths that kernels do not like: 16 bytes for tensor cores, tiles of 128, 16 numbers for 8 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shoal.plan.products import TILE
from shoal.plan.review.finding import HURTS, Finding, Severity, costing, percent
from shoal.plan.review.subject import Subject
from shoal.spec.eight_bits import ALIGN, head_in_8_bits
from shoal.spec.shape import round_up

# Numbers of 16 bits in 16 bytes: rows of another length are read by slower kernels (NVIDIA, "Matrix Multiplication
# Background": tensor cores want all sides to be multiples of 16 bytes).
ALIGNED = 8
SIDE = int(TILE**0.5)


def unaligned(s: Subject) -> Iterator[Finding]:
    """The planner prices all products alike, so this has no price; how much it can touch is known."""
    if s.asked.machine.cpu or s.asked.precision == "fp32":
        return
    odd = {name: width for name, width in _widths(s).items() if width % ALIGNED}
    blocks = [name for name in odd if name != "model.vocab_size"]
    touched = s.part("products") * bool(blocks) + s.part("loss") * ("model.vocab_size" in odd)
    if not odd:
        return
    tp = s.sizes.tp
    each = ", ".join(f"{name} {width * tp if _is_cut(name) else width:,}" for name, width in odd.items())
    what = " and ".join(["the products of the blocks"] * bool(blocks) + ["the head"] * ("model.vocab_size" in odd))
    near = ", ".join(f"{name} {round_up(width, 64) * (tp if _is_cut(name) else 1):,}" for name, width in odd.items())
    over = f" over mesh.tp {tp}" if tp > 1 else ""
    yield Finding(
        Severity.HURTS if touched >= HURTS else Severity.NOTE,
        "unaligned-widths",
        tuple(name.split(" ")[0] for name in odd),
        f"{each}{over} leaves rows that are no multiple of {ALIGNED} numbers (16 bytes): {what}, {percent(touched)} of "
        "a step as planned, gets slower kernels. The planner does not price that; it comes on top.",
        f"{near}: rows that are added are never a target." if list(odd) == ["model.vocab_size"] else f"{near}.",
    )


def head_in_16_bits(s: Subject) -> Iterator[Finding]:
    run, vocab = s.run, s.shape.vocab_size
    if s.asked.precision != "fp8" or not run.train.fp8_head or head_in_8_bits(run, s.shape):
        return
    even = round_up(vocab, ALIGN)
    share = 1 - s.repriced(shape=replace(s.shape, vocab_size=even)).seconds / s.found.seconds
    yield Finding(
        costing(share) or Severity.NOTE,
        "head-in-16-bits",
        ("model.vocab_size", "train.fp8_head"),
        f"model.vocab_size {vocab:,} is no multiple of {ALIGN}, so the output layer stays in 16 bits beside blocks in "
        f"8: {percent(max(share, 0.0))} of a step.",
        f"model.vocab_size {even:,}.",
        share,
    )


def partly_filled_tiles(s: Subject) -> Iterator[Finding]:
    """Kernels compute whole tiles. Theirs may be smaller than the planner's, so this is the most that it costs."""
    if s.asked.machine.cpu:
        return
    lost = sum(flops * _padding(*sides) for flops, sides in _matrices(s))
    share = s.part("products") * lost / (1 + lost)
    if costing(share) is None:
        return
    tp = s.sizes.tp
    loose = {name: width for name, width in _widths(s).items() if _over(width) > 0.01 and name != "model.vocab_size"}
    each = ", ".join(f"{name}{f' / tp {tp}' * (tp > 1 and _is_cut(name))} = {width:,}" for name, width in loose.items())
    yield Finding(
        Severity.NOTE,
        "partly-filled-tiles",
        tuple(name.split(" ")[0] for name in loose),
        f"Products are computed in tiles of up to {SIDE} x {SIDE}, and {each} fill some of them in part: up to "
        f"{percent(share)} of a step computes what nobody asked for.",
        f"Widths per process that are multiples of {SIDE}{', or a smaller mesh.tp' * (tp > 1)}.",
        share,
    )


def odd_heads(s: Subject) -> Iterator[Finding]:
    """As `shoal.plan.documents.skips_between` has it."""
    width, run = s.shape.head_dim, s.run
    fast = not s.asked.machine.cpu and s.asked.precision != "fp32" and run.train.kernels != "plain"
    if not fast or not run.data.mask_documents or (width >= 16 and not width & (width - 1)):
        return
    latent = s.shape.mla is not None
    name = "model.mla.qk_nope_head_dim + qk_rope_head_dim" if latent else "model.head_dim"
    other = "" if latent else f"model.head_dim {_power(width)} with model.heads {_heads(s)}, or "
    yield Finding(
        Severity.HURTS if s.part("attention") >= HURTS else Severity.NOTE,
        "odd-heads",
        ("model.mla" if latent else "model.head_dim", "data.mask_documents"),
        f"{name} {width} is no power of two from 16 on, so the kernel that skips what lies between documents "
        f"does not take it: a mask of {run.data.seq_len:,} x {run.data.seq_len:,} is made, and attention, "
        f"{percent(s.part('attention'))} of a step, computes all of it.",
        f"{other}data.mask_documents false where windows are single documents.",
    )


def _heads(s: Subject) -> int:
    return max(1, round(s.shape.q_dim / _power(s.shape.head_dim)))


def _widths(s: Subject) -> dict[str, int]:
    """Of one process."""
    shape, tp, experts = s.shape, s.sizes.tp, s.shape.experts
    widths = {"model.dim": shape.dim}
    if shape.mla is None:
        widths |= {"model.heads x head_dim": shape.q_dim // tp, "model.kv_heads x head_dim": shape.kv_dim // tp}
    else:
        widths["model.mla.kv_lora_rank"] = shape.mla.kv_lora_rank
        widths["model.heads x mla.v_head_dim"] = shape.heads * shape.mla.v_head_dim // tp
    if experts is None or experts.dense_layers:
        widths["model.ffn_dim"] = shape.ffn_dim // tp
    if experts is not None:
        widths["model.experts.ffn_dim"] = experts.ffn_dim
    return widths | {"model.vocab_size": shape.vocab_size // tp}


def _is_cut(name: str) -> bool:
    """By tensor parallelism."""
    return name not in ("model.dim", "model.experts.ffn_dim", "model.mla.kv_lora_rank")


def _matrices(s: Subject) -> Iterator[tuple[float, tuple[int, int]]]:
    """Of a block: its share of the products' work, and its two sides on a process."""
    shape, tp, e = s.shape, s.sizes.tp, s.shape.experts
    sides = [(w.local(tp)[0], w.local(tp)[1]) for w in shape.mixer_weights(0) if w.product]
    work: list[tuple[float, tuple[int, int]]] = [(1.0, side) for side in sides]
    sparse = sum(shape.sparse(layer) for layer in range(shape.layers)) / shape.layers
    if sparse < 1:
        work.append((3 * (1 - sparse), (shape.dim, shape.ffn_dim // tp)))
    if e is not None:
        work.append((3 * sparse * (e.top_k / tp + e.shared), (shape.dim, e.ffn_dim)))
    whole = sum(times * a * b for times, (a, b) in work)
    return ((times * a * b / whole, (a, b)) for times, (a, b) in work)


def _padding(a: int, b: int) -> float:
    """What a linear layer's three products compute more than they need: results of width b, a, and a x b."""
    return (_over(a) + _over(b) + (1 + _over(a)) * (1 + _over(b)) - 1) / 3


def _over(width: int) -> float:
    return round_up(width, SIDE) / width - 1


def _power(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())
