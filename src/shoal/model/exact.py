"""The same bits for a token whatever is computed beside it: in a batch of 1 or 64, in one piece or in several, after a
cache or without one. So what an engine says of a text is bitwise what the trainer says of it.

Kernels of linear algebra choose their way by the number of rows, and sums in floating point depend on the way. Here
every product is one of `ROWS` rows, filled up with zeros; attention goes over `KEYS` keys of a text at a time, from its
beginning; and what is done number by number is done in pieces of one size, as the last numbers of an odd piece go
through other code. The gradient is the ordinary one.

That rows of one product do not depend on their neighbours, nor on where they stand, is a property of a library and a
machine: `probe` looks, and refuses what does not have it.

On a GPU one kernel attends for trainer and engine (`shoal.kernels.paged_prefill`), and what is done number by number
needs no pieces.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal import kernels
from shoal.errors import SetupError, SpecError
from shoal.model.attention import Attention, one_kind_of_mask
from shoal.model.attention import attend as attend_plainly
from shoal.model.decoder import Block, Decoder
from shoal.model.feed_forward import FeedForward
from shoal.model.head import as_computed
from shoal.model.mla import LatentAttention
from shoal.model.moe import Experts, MixtureOfExperts, Router
from shoal.model.own_model import OwnModel
from shoal.model.rope import Rope

ROWS = 32  # of a product; a tile of queries too, so that it divides KEYS
KEYS = 64
PIECE = 1 << 14  # numbers; below what torch deals out to threads, and whole vectors of every processor
CPU = torch.device("cpu")
VECTOR = 16  # numbers; of any type no kernel reads more at a time
LEAST = -1e30  # in the place of -inf: a difference of two stays a number


def apply(model: Decoder) -> None:
    """The model's seams, once and for good. It can be trained like that, and asked."""
    if getattr(model, "exact", False):
        return
    refuse(model)
    _align(model)
    probe(model)
    for module in model.modules():
        if isinstance(module, Router):
            module.forward = partial(_route, module)  # type: ignore[method-assign]
        elif isinstance(module, nn.Linear):
            module.forward = partial(_linear, module)  # type: ignore[method-assign]
        elif isinstance(module, FeedForward):
            module.act = partial(evenly, module.act)
        elif isinstance(module, Experts):
            module.compute = _experts
        elif isinstance(module, MixtureOfExperts):
            module.sigmoid = partial(evenly, torch.sigmoid)
    for block in model.blocks.values():
        assert isinstance(block.mixer, Attention | LatentAttention)
        block.mixer.attend = attend
    model.mask = mask
    model.rope = _Table(model.rope)  # type: ignore[assignment]
    if model.sliding_rope is not None:
        model.sliding_rope = _Table(model.sliding_rope)  # type: ignore[assignment]
    if model.last:
        model.head.logits = product
        model.head.loss = _loss
    model.exact = True  # type: ignore[assignment]  # a module's attributes are taken for tensors and modules


def _align(model: Decoder) -> None:
    """Weights that were mapped from a file lie anywhere, and those of an engine lie across; kernels go by both."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) or parameter.device.type != "cpu":
            continue
        if parameter.data_ptr() % 64 or not parameter.is_contiguous():
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)


def refuse(model: Decoder) -> None:
    if isinstance(model, OwnModel) or any(type(block).forward is not Block.forward for block in model.blocks.values()):
        raise SpecError(
            "exact needs to know how a model computes: own models, own blocks and classes of transformers have no such "
            "mode."
        )
    if any(not isinstance(block.mixer, Attention | LatentAttention) for block in model.blocks.values()):
        raise SpecError("exact is not there for state-space layers: their sums go over chunks of a text.")
    scaling = model.shape.rope_scaling
    if scaling is not None and scaling.kind == "dynamic":
        raise SpecError("exact is not there for dynamic angles, which change with the length of a text.")


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear, whose rows do not know of each other."""
    flat = as_computed(x.flatten(0, -2))
    y: Tensor = _Product.apply(flat, weight.to(flat.dtype))
    y = y.unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return tiles(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad
        return grad @ weight if wants_x else None, grad.t() @ x if wants_weight else None


def tiles(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, in] @ weight [out, in].T, so many rows at a time."""
    rows = len(x)
    x = F.pad(x, (0, 0, 0, -rows % ROWS))
    if len(x) == ROWS:
        return F.linear(x, weight)[:rows]
    out = x.new_empty(len(x), weight.shape[0])
    for at in range(0, len(x), ROWS):
        torch.mm(x[at : at + ROWS], weight.t(), out=out[at : at + ROWS])
    return out[:rows]


def evenly(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A function of single numbers, in whole pieces."""
    if x.is_cuda:
        return function(x)
    flat = x.reshape(-1)
    count = flat.numel()
    flat = F.pad(flat, (0, -count % 64))
    parts = [function(part) for part in flat.split(PIECE)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[:count].view(x.shape)


def _linear(linear: nn.Linear, x: Tensor) -> Tensor:
    return product(x, linear.weight, linear.bias)


def _route(router: Router, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return product(x.float(), router.weight.float())


def _experts(x: Tensor, counts: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    triples = zip(x.split(counts.tolist()), gate.unbind(), up.unbind(), down.unbind(), strict=True)
    return torch.cat([product(evenly(F.silu, product(rows, g)) * product(rows, u), d) for rows, g, u, d in triples])


def _loss(hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    """As `shoal.model.head.summed_cross_entropy`, with all logits at once."""
    spread = log_softmax(product(hidden.flatten(0, -2), weight))
    return F.nll_loss(spread, targets.flatten(), reduction="sum", ignore_index=-100)


def log_softmax(logits: Tensor) -> Tensor:
    """[..., vocab] in float32. A GPU's kernel begins a row by where it lies in memory: rows of whole vectors begin
    alike."""
    wide = logits.shape[-1]
    if logits.is_cuda and wide % VECTOR:
        logits = F.pad(logits, (0, -wide % VECTOR), value=-torch.inf)
    return F.log_softmax(logits, -1, dtype=torch.float32)[..., :wide]


class _Table:
    """Angles of all positions, made once."""

    def __init__(self, rope: Rope) -> None:
        self.shape, self.scale = rope.shape, rope.scale
        positions = torch.arange(rope.shape.max_seq_len)
        angles = positions[:, None].float() * rope._on(torch.device("cpu"))
        table = evenly(torch.cos, angles) * rope.scale, evenly(torch.sin, angles) * rope.scale
        self._on = {torch.device("cpu"): table}

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        device = positions.device
        if device not in self._on:
            cos, sin = self._on[torch.device("cpu")]
            self._on[device] = cos.to(device), sin.to(device)
        cos, sin = self._on[device]
        return cos[positions][:, :, None], sin[positions][:, :, None]


@dataclass(frozen=True)
class Texts:
    """What `attend` goes by: the texts of each row, from where to where."""

    rows: Sequence[Sequence[tuple[int, int]]] | None  # None: each row is one text
    window: int | None


def mask(documents: Tensor | None, seq: int, window: int | None, device: torch.device) -> Texts:
    if documents is None:
        return Texts(None, window)
    rows = []
    for row in documents.tolist():
        ends = [i for i in range(1, seq) if row[i] != row[i - 1]]
        rows.append(list(zip([0, *ends], [*ends, seq], strict=True)))
    return Texts(rows, window)


def attend(q: Tensor, k: Tensor, v: Tensor, texts: Texts, groups: int) -> Tensor:
    """As `shoal.model.attention.attend`."""
    rows = texts.rows or [[(0, q.shape[1])]] * q.shape[0]
    if kernels.fit((q, k, v)):
        on_gpu: Tensor = _Attended.apply(q, k, v, rows, texts.window)
        return on_gpu
    mixed = [
        torch.cat(
            [of_a_text(q[row, a:b], k[row, a:b], v[row, a:b], 0, texts.window) for a, b in spans],
        )
        for row, spans in enumerate(rows)
    ]
    return torch.stack(mixed)


class _Attended(torch.autograd.Function):
    """By the kernel that attends over an engine's blocks, too. The gradient is that of ordinary attention."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rows: Sequence[Any], window: int | None) -> Tensor:
        from shoal.kernels.paged_prefill import attend_rows

        ctx.save_for_backward(q, k, v)
        ctx.rows, ctx.window, seq = rows, window, q.shape[1]
        begins = [row * seq + begin for row, spans in enumerate(rows) for begin, _ in spans]
        longest = max(end - begin for spans in rows for begin, end in spans)
        at = torch.tensor([*begins, len(q) * seq], dtype=torch.int32).to(q.device)
        flat_q, flat_k, flat_v = (t.flatten(0, 1).contiguous() for t in (q, k, v))
        return attend_rows(flat_q, flat_k, flat_v, at, longest, window=window).view(q.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        found = [torch.empty_like(t) for t in saved]
        for row, spans in enumerate(ctx.rows):
            for begin, end in spans:
                at = slice(row, row + 1), slice(begin, end)
                with torch.enable_grad():
                    parts = [t[at].detach().requires_grad_() for t in saved]
                    seen = one_kind_of_mask(None, end - begin, ctx.window, grad.device)
                    groups = parts[0].shape[2] // parts[1].shape[2]
                    mixed = attend_plainly(parts[0], parts[1], parts[2], seen, groups)
                for whole, part in zip(found, torch.autograd.grad(mixed, parts, grad[at]), strict=True):
                    whole[at] = part
        return *found, None, None


def of_a_text(q: Tensor, k: Tensor, v: Tensor, begin: int, window: int | None) -> Tensor:
    """q [n, heads, width] of tokens from `begin` on; k, v [all, key heads, width] from the text's beginning."""
    n = q.shape[0]
    first = begin // ROWS
    count = -(-(begin + n) // ROWS) - first
    spread = F.pad(q, (0, 0, 0, 0, begin - first * ROWS, (first + count) * ROWS - begin - n))
    spread = spread.unflatten(0, (count, ROWS)).transpose(1, 2)  # [tiles, heads, ROWS, width]
    k, v = (_by_tiles(t, q.shape[1]) for t in (k, v))
    starts = torch.arange(first, first + count) * ROWS
    mixed = over_keys(spread, starts, k[:, None], v[:, None], window)
    return mixed.transpose(1, 2).flatten(0, 1)[begin - first * ROWS :][:n]


def of_last_tokens(q: Tensor, keys: Tensor, values: Tensor, at: Tensor, window: int | None) -> Tensor:
    """One token of each text: q [texts, heads, width] at `at`; keys, values [texts, key heads, longest, width]."""
    rows = torch.arange(len(q))
    spread = q.new_zeros(len(q), q.shape[1], ROWS, q.shape[2])
    spread[rows, :, at % ROWS] = q
    k, v = (_by_tiles(t.permute(2, 0, 1, 3).flatten(1, 2), len(q) * q.shape[1]) for t in (keys, values))
    k, v = (t.unflatten(1, (len(q), -1)) for t in (k, v))  # [tiles, texts, heads, KEYS, width]
    return over_keys(spread, at // ROWS * ROWS, k, v, window)[rows, :, at % ROWS]


def _by_tiles(t: Tensor, heads: int) -> Tensor:
    """[tokens, key heads, width] as [tiles, heads, KEYS, width]."""
    t = F.pad(t, (0, 0, 0, 0, 0, -t.shape[0] % KEYS))
    t = t.unflatten(0, (-1, KEYS)).transpose(1, 2)
    return t if t.shape[1] == heads else t.repeat_interleave(heads // t.shape[1], 1)


def over_keys(q: Tensor, starts: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """q [tiles, heads, ROWS, width], whose first tokens stand at `starts`; k, v [tiles of keys, 1 or tiles, heads,
    KEYS, width]. Tile after tile: a token's sum ends with its own tile, and what comes later adds zero to it."""
    scale = 1.0 / math.sqrt(q.shape[-1])
    at = starts[:, None] + torch.arange(ROWS)  # [tiles, ROWS]
    best = q.new_full((*q.shape[:-1], 1), LEAST)
    total, mixed = torch.zeros_like(best), torch.zeros_like(q)
    for number in range(int(starts.max()) // KEYS + 1):
        scores = _each(q, k[number].expand(q.shape[0], -1, -1, -1).mT) * scale
        back = at[:, None, :, None] - (number * KEYS + torch.arange(KEYS))
        seen = back >= 0
        if window is not None:
            seen = seen & (back < window)
        scores = scores.masked_fill(~seen, LEAST)
        higher = torch.maximum(best, scores.amax(-1, keepdim=True))
        parts = evenly(torch.exp, scores - higher).masked_fill(~seen, 0.0)
        kept = evenly(torch.exp, best - higher)
        total = total * kept + parts.sum(-1, keepdim=True)
        mixed = mixed * kept + _each(parts, v[number].expand(q.shape[0], -1, -1, -1))
        best = higher
    return mixed / total


def _each(a: Tensor, b: Tensor) -> Tensor:
    """Products of [tiles, heads, …] one by one: a batch of them is dealt out by its size."""
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])


def probe(model: Decoder) -> None:
    """Whether rows of a product are the same bits wherever they stand, whatever stands beside them, and for any number
    of threads."""
    here = next(model.parameters())
    for shape in {tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Linear)}:
        probe_product(shape, here.device, here.dtype)
    if model.last:
        probe_product((model.shape.vocab_size, model.shape.dim), here.device, here.dtype)


@functools.cache
def probe_product(shape: tuple[int, int], device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> None:
    generator = torch.Generator(device).manual_seed(1)
    drawn = partial(torch.randn, generator=generator, device=device)
    weight = drawn(*shape).to(dtype)
    x, other = (drawn(ROWS, shape[1]).to(dtype) for _ in range(2))
    wanted = tiles(x, weight)
    threads = torch.get_num_threads()
    moved = [(tiles(x.roll(by, 0), weight), by, range(ROWS)) for by in (1, 7, 16)]
    only = [(torch.arange(ROWS, device=device) == row)[:, None] for row in range(ROWS)]
    moved += [(tiles(torch.where(only[row], x, other), weight), 0, range(row, row + 1)) for row in (0, 13, ROWS - 1)]
    moved.append((tiles(torch.cat((other, x)), weight)[ROWS:], 0, range(ROWS)))
    torch.set_num_threads(1)
    try:
        moved.append((tiles(x, weight), 0, range(ROWS)))
    finally:
        torch.set_num_threads(threads)
    for found, by, rows in moved:
        if any(not torch.equal(found[(row + by) % ROWS], wanted[row]) for row in rows):
            raise SetupError(
                f"exact is not possible on this machine: a product with a matrix of {shape[0]} x {shape[1]} gives a "
                "row other bits beside other rows."
            )
