"""Initial weights that do not depend on how the model is sharded, and the one way to fill a (sharded) parameter."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.errors import SpecError
from shoal.model.mixers import MIXERS
from shoal.model.packed import placements_in_parts
from shoal.spec.shape import Shape
from shoal.spec.start_values import RULES, Matrix, Role, Start

BLOCK_NUMBERS = 1 << 20  # numbers drawn from one generator
ROLES: dict[str, Role] = {  # by the last part of a matrix's name, be it dense, of an expert or of a shared one
    "embed": "embedding",
    "head": "head",
    "router": "router",
    **dict.fromkeys(("q", "k", "v", "q_a", "q_b", "kv_a", "kv_b", "x", "b", "c", "dt"), "attention"),
    "gate": "gate",
    "up": "up",
    **dict.fromkeys(("out", "down"), "residual"),
}


Rows = Callable[[torch.Size, slice], Tensor]  # (shape of the whole matrix, rows): those rows, on the CPU


def init_weights(model: nn.Module, shape: Shape, seed: int) -> None:
    """Norms one, biases zero, matrices normal by the shape's rule. Each number depends on (rule, seed, parameter name,
    place) alone."""
    own = {part: make for mixer in MIXERS.values() for part, make in mixer.starts.items()}
    own |= {part: make for m in model.modules() for part, make in getattr(m, "starts", {}).items()}
    for name, parameter in model.named_parameters():
        if make := own.get(name.removesuffix(".weight").rpartition(".")[2]):
            fill(parameter, partial(_even, make=make, seed=seed, name=name))
        elif name.endswith("norm.weight"):
            # What a norm begins with is one: as its weight, or beside a weight that is what it has more.
            begin = torch.zeros if shape.about.centred_norms else torch.ones
            fill(parameter, partial(_same, begin=begin))
        elif name.endswith(".bias"):
            fill(parameter, partial(_same, begin=torch.zeros))
        elif parameter.ndim < 2:
            raise SpecError(f"{name} has no start values: say them in `starts` of its block (docs/guide/own-code.md).")
        elif parameter.ndim == 3:
            fill_stack(parameter, partial(_normal_of_stack, start=start(shape, name, parameter), seed=seed, name=name))
        else:
            fill(parameter, partial(_normal, start=start(shape, name, parameter), seed=seed, name=name))
    clear_buffers(model)


def start(shape: Shape, name: str, parameter: Tensor) -> Start:
    """The distribution that a matrix is drawn from; a sharded one is asked as the whole."""
    parts = name.removesuffix(".weight").split(".")
    layer = int(parts[1]) if parts[0] == "blocks" else 0
    matrix = Matrix(
        role=ROLES.get(parts[-1], "up"),
        inputs=parameter.shape[-1],
        layer=layer,
        layers=shape.layers,
        dim=shape.dim,
        tied=shape.tie_embeddings or shape.about.scaled_embedding,  # which makes a small one large
        std=shape.init_std,
    )
    return RULES[shape.init](matrix)


def clear_buffers(model: nn.Module) -> None:
    """A router starts without preference and without counts; `to_empty` leaves whatever lay in memory."""
    for buffer in model.buffers():
        buffer.zero_()


@torch.no_grad()
def fill(parameter: Tensor, rows_of: Rows) -> None:
    """Fill this process's part of a parameter; `rows_of(shape, rows)` gives some rows of the whole, on the CPU.

    Rows, because FSDP shards the first dimension: a rank makes or reads only its own. A cut along another dimension
    is taken out of the rows.
    """
    local, box = local_box(parameter)
    _fill(local, box, parameter.shape, rows_of)


@torch.no_grad()
def fill_stack(parameter: Tensor, rows_of: Callable[[int], Rows]) -> None:
    """The same for matrices that are stacked in one parameter: each is filled by itself, of those that are here."""
    local, box = local_box(parameter)
    for i in range(local.shape[0]):
        _fill(local[i], box[1:], parameter.shape[1:], rows_of(box[0].start + i))


def _fill(local: Tensor, box: tuple[slice, ...], shape: torch.Size, rows_of: Rows) -> None:
    if local.is_meta:
        raise RuntimeError("the model is still on the meta device: call to_empty(device=...) before filling it")
    if local.numel() == 0:
        return
    values = rows_of(shape, box[0])
    local.copy_(values[(slice(None), *box[1:])])


def local_box(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """The part of a tensor that this process holds, and where it lies in the whole (`packed.in_parts`)."""
    if not isinstance(tensor, DTensor):
        return tensor, tuple(slice(0, n) for n in tensor.shape)
    # Not in torch's documented surface, but what its own checkpoints use; placements are too many to redo here.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placements = placements_in_parts(tensor)
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, placements)
    return tensor.to_local(), tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))


def _normal_of_stack(place: int, start: Start, seed: int, name: str) -> Rows:
    return partial(_normal, start=start, seed=seed, name=f"{name}.{place}")


def _normal(shape: torch.Size, rows: slice, start: Start, seed: int, name: str) -> Tensor:
    """Rows of a normal matrix. Blocks of rows have generators of their own, so that no rank draws the whole, and so
    that a rank draws with all its threads: one alone takes 10 s for a billion numbers."""
    height = max(1, BLOCK_NUMBERS // shape[1:].numel())

    def drawn(block: int) -> Tensor:
        first, last = block * height, min((block + 1) * height, shape[0])
        generator = torch.Generator("cpu").manual_seed(_key(seed, name, block))
        numbers = torch.empty(last - first, *shape[1:], device="cpu").normal_(0.0, start.std, generator=generator)
        if start.cut is not None:
            _draw_again(numbers, start.std, start.cut, generator)
        return numbers[max(rows.start - first, 0) : rows.stop - first]

    blocks = range(rows.start // height, -(-rows.stop // height))
    if len(blocks) == 1:
        return drawn(blocks[0])
    with ThreadPoolExecutor(min(len(blocks), torch.get_num_threads())) as threads:
        return torch.cat(list(threads.map(drawn, blocks)))


def _same(shape: torch.Size, rows: slice, begin: Callable[..., Tensor]) -> Tensor:
    return begin(rows.stop - rows.start, *shape[1:], device="cpu")


def _even(shape: torch.Size, rows: slice, make: Callable[[Tensor], Tensor], seed: int, name: str) -> Tensor:
    """Rows of what is made of numbers spread evenly over [0, 1). Such parameters are small, and drawn whole."""
    generator = torch.Generator("cpu").manual_seed(_key(seed, name, 0))
    return make(torch.empty(shape, device="cpu").uniform_(generator=generator))[rows]


def _draw_again(numbers: Tensor, std: float, cut: float, generator: torch.Generator) -> None:
    """Those that lie too far out, until none does. By the block, as everything is drawn: whoever holds a row of it
    draws the same. (`trunc_normal_` goes through erfinv, whose last digit depends on how threads share the work.)"""
    while (far := numbers.abs() > cut * std).any():
        numbers[far] = torch.empty(int(far.sum()), device="cpu").normal_(0.0, std, generator=generator)


def _key(seed: int, name: str, block: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # manual_seed takes a signed 64-bit number
