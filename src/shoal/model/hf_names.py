"""What transformers calls the tensors of a Decoder, and how it stores a stack of experts.

On disk every expert has matrices of its own: so the published folders are, and so transformers 5 writes them. It can
also write what it holds in memory, stacks with gate and up in one (`save_original_format=False`); that is read too.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import torch

from shoal.model.decoder import Decoder
from shoal.spec.balancing import holds_bias
from shoal.spec.families import FAMILIES, Family
from shoal.spec.shape import Shape

_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_PARTS = {  # of a block, without `.weight` or `.bias`: Shoal's name to that of all families
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mla_norm": "input_layernorm",
    "mla.q": "self_attn.q_proj",
    "mla.q_a": "self_attn.q_a_proj",
    "mla.q_norm": "self_attn.q_a_layernorm",
    "mla.q_b": "self_attn.q_b_proj",
    "mla.kv_a": "self_attn.kv_a_proj_with_mqa",
    "mla.kv_norm": "self_attn.kv_a_layernorm",
    "mla.kv_b": "self_attn.kv_b_proj",
    "mla.out": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
    "ffn.router": "mlp.gate",
    "ffn.experts": "mlp.experts",
    "ffn.shared.gate": "mlp.shared_experts.gate_proj",
    "ffn.shared.up": "mlp.shared_experts.up_proj",
    "ffn.shared.down": "mlp.shared_experts.down_proj",
}
_STACKED = {"ffn.experts.gate": "gate_proj", "ffn.experts.up": "up_proj", "ffn.experts.down": "down_proj"}


@dataclass(frozen=True)
class Piece:
    """A tensor of a folder, and the tensor of the Decoder that it holds all or (one expert, or some of it) part of."""

    name: str  # in the folder
    shape: tuple[int, ...]
    of: str  # name in the Decoder
    expert: int | None = None  # which matrix of a stack this is; None: all there is
    first: int = 0  # the row of the folder's tensor at which ours begins, where several of ours are one there


def pieces(shape: Shape) -> list[Piece]:
    """Every tensor of a folder that holds a model of this shape, in the order in which it is written. One that several
    of ours make up is there as often."""
    found = []
    own, tensors = FAMILIES[shape.family], tensors_of(shape)
    for name, size in tensors.items():
        block, part = _split(name)
        if part in _STACKED:
            names = _experts(block, part, shape)
            found += [Piece(hf, tuple(size[1:]), name, i) for i, hf in enumerate(names)]
        elif theirs := _joined(part, own):
            found.append(_row_piece(name, block, theirs, own.joined[theirs], tensors))
        else:
            found.append(Piece(_plain(block, part, own.parts), tuple(size), name))
    return found


def joined_tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Those of ours that are a part of a folder's tensor, and their dimensions."""
    own = FAMILIES[shape.family]
    return {name: tuple(size) for name, size in tensors_of(shape).items() if _joined(_split(name)[1], own)}


def _joined(part: str, own: Family) -> str | None:
    """The module of the family's class that this is a part of."""
    module = part.rpartition(".")[0]
    return next((theirs for theirs, ours in own.joined.items() if module in ours), None)


def _row_piece(name: str, block: str, theirs: str, ours: Sequence[str], tensors: Mapping[str, torch.Size]) -> Piece:
    kind = name.rpartition(".")[2]
    before = [tensors[f"blocks.{block}.{module}.{kind}"] for module in ours]
    at = [f"blocks.{block}.{module}.{kind}" for module in ours].index(name)
    inside = tuple(tensors[name][1:])
    if theirs.endswith("conv1d") and inside:
        inside = (1, *inside)  # torch's convolution has a dimension for the channels of a group, of which there is one
    return Piece(
        f"model.layers.{block}.{theirs}.{kind}",
        (sum(size[0] for size in before), *inside),
        name,
        first=sum(size[0] for size in before[:at]),
    )


def stacked_pieces(shape: Shape) -> list[Piece]:
    """The same for the form with stacks: of `gate` and `up` the two halves of one tensor, which is named twice."""
    found = []
    for name, size in tensors_of(shape).items():
        block, part = _split(name)
        if part == "ffn.experts.down":
            found.append(Piece(f"model.layers.{block}.mlp.experts.down_proj", tuple(size), name))
        elif part in _STACKED:
            both = (size[0], 2 * size[1], size[2])
            found.append(Piece(f"model.layers.{block}.mlp.experts.gate_up_proj", both, name))
        else:
            found.append(Piece(_plain(block, part, {}), tuple(size), name))
    return found


def is_stacked(held: Container[str], shape: Shape) -> bool:
    """Whether a folder that holds tensors of these names has its experts in stacks."""
    if shape.experts is None:
        return False
    return any(".experts." in piece.name and piece.name in held for piece in stacked_pieces(shape))


def tensors_of(shape: Shape) -> dict[str, torch.Size]:
    """The tensors of a whole Decoder that a folder can hold."""
    with torch.device("meta"):
        state = Decoder(shape).state_dict()
    left_out = ("ffn.excess",) if holds_bias(shape.family) else ("ffn.excess", "ffn.bias")
    return {name: t.shape for name, t in state.items() if not name.endswith(left_out)}


def _split(name: str) -> tuple[str, str]:
    """The number of a block and the name inside it; no number at the top."""
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    return (block[1], block[2]) if block else ("", name)


def _plain(block: str, part: str, own: Mapping[str, str]) -> str:
    """`own`: what the family's class calls otherwise."""
    if not block:
        module = part.removesuffix(".weight")
        return f"model.{own[module]}.weight" if module in own else _TOP[part]
    if part == "ffn.bias":
        return f"model.layers.{block}.mlp.gate.e_score_correction_bias"
    module, kind = part.rsplit(".", 1)
    if part in own:  # a parameter of the mixer itself
        return f"model.layers.{block}.{own[part]}"
    return f"model.layers.{block}.{own.get(module) or _PARTS[module]}.{kind}"


def _experts(block: str, part: str, shape: Shape) -> list[str]:
    assert shape.experts is not None
    own, theirs = FAMILIES[shape.family].parts, _STACKED[part]
    home, matrix = own.get("ffn.experts", _PARTS["ffn.experts"]), own.get(theirs, theirs)
    return [f"model.layers.{block}.{home}.{i}.{matrix}.weight" for i in range(shape.experts.count)]
