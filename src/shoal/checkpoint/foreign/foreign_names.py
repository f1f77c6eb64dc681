"""What other programs call the tensors of a decoder and of its optimizer, in our names.

Known are our own names, those of transformers, and those of torchtitan's Llama 3 (which are Meta's). A checkpoint of a
known kind must be of it altogether: a tensor left over would be a part of the model that is silently lost. One of no
known kind is taken as it is, under its own names: then it is a container, and no run can start from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from shoal.checkpoint.foreign.incoming import Incoming, half_split, narrowed, stacked, without_ones
from shoal.errors import DataError, UsageError
from shoal.model.hf_names import is_stacked, joined_tensors, pieces, stacked_pieces
from shoal.spec.shape import Shape
from shoal.values import shown

Tensors = Mapping[str, Incoming]

_OPTIMIZER = re.compile(r"(?:(?:.*\.)?optim(?:izer)?\.)?state\.(?P<parameter>.+)\.(?P<key>\w+)")
_WRAPPERS = re.compile(r"(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
_COMPUTED = re.compile(r"(?:.*\.)?(?:freqs_cis|rotary_emb\.inv_freq|rope\.cache)")  # what a model makes by itself

_OF_TITAN = {
    "tok_embeddings": "embed",
    "norm": "norm",
    "output": "head",
    "attention.wq": "attention.q",
    "attention.wk": "attention.k",
    "attention.wv": "attention.v",
    "attention.wo": "attention.out",
    "attention_norm": "attention_norm",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn.gate",
    "feed_forward.w2": "ffn.down",
    "feed_forward.w3": "ffn.up",
}


@dataclass(frozen=True)
class Convention:
    """Who names tensors so."""

    name: str
    embedding: str
    head: str
    sign: str  # with the embedding, what tells it from others
    top: tuple[str, ...]  # the first part of all names of a model
    ours: Callable[[Tensors, Shape], dict[str, Incoming]]


@dataclass(frozen=True)
class Named:
    """What came in, in our names: `model.…` and `optim.…`."""

    tensors: dict[str, Incoming]
    convention: str | None  # None: not known, names as they were
    step: int | None = None  # of the optimizer
    notes: tuple[str, ...] = ()  # a sentence each


def of_optimizer(name: str) -> bool:
    return _OPTIMIZER.fullmatch(name) is not None


def in_our_names(raw: Tensors, shape: Shape | None, where: str) -> Named:
    """`shape` is the model's; only for names that are ours already it may be unknown."""
    raw = {_WRAPPERS.sub("", name): tensor for name, tensor in raw.items() if not _COMPUTED.fullmatch(name)}
    optimizer = {name: match for name in raw if (match := _OPTIMIZER.fullmatch(name))}
    found = _convention(raw.keys() - optimizer.keys())
    if found is None:
        words = (
            "the names of its tensors are not those of Shoal, transformers or torchtitan's Llama 3, so they are kept "
            "as they are, and no run can start from it."
        )
        return Named({f"model.{name}": tensor for name, tensor in raw.items()}, None, notes=(words,))
    convention, prefix = found
    if shape is None and convention is not _SHOAL:
        raise UsageError(
            f"{where} has the names of {convention.name}, and converting them takes the model's shape: "
            "name a run file or a Hugging Face folder that has it with --like."
        )
    weights = {
        name.removeprefix(prefix): tensor
        for name, tensor in raw.items()
        if name.startswith(tuple(f"{prefix}{top}." for top in convention.top))
    }
    others = sorted(raw.keys() - optimizer.keys() - {f"{prefix}{name}" for name in weights})
    notes = [f"left out, as no part of the model: {_some(others)}."] if others else []
    tied = _tied_copy(weights, shape, convention, where)
    weights = {name: tensor for name, tensor in weights.items() if name != tied}
    ours = convention.ours(weights, shape) if shape else weights
    named = {f"model.{name}": tensor for name, tensor in ours.items()}
    groups: dict[str, dict[str, Incoming]] = {}
    for name, match in optimizer.items():
        of = match["parameter"]
        groups.setdefault(match["key"], {})[of if of in weights else of.removeprefix(prefix)] = raw[name]
    step = _step(groups)
    for key, group in groups.items():
        group.pop(tied or "", None)
        states = convention.ours(group, shape) if shape else group
        if lost := [n for n, t in states.items() if n not in ours or t.shape != ours[n].shape]:
            notes.append(f"left out, as of no parameter of the model: the optimizer's '{key}' of {_some(lost)}.")
        named |= {f"optim.{name}.{key}": tensor for name, tensor in states.items() if name not in lost}
    return Named(named, convention.name, step, tuple(notes))


def _convention(names: Set[str]) -> tuple[Convention, str] | None:
    """The convention, and what stands before every name (a state dict is often put under `model.` or `app.model.`)."""
    for convention in (_TITAN, _TRANSFORMERS, _SHOAL):
        for name in sorted(names, key=len):
            prefix = name.removesuffix(convention.embedding)
            if prefix != name and prefix[-1:] in ("", ".") and f"{prefix}{convention.sign}" in names:
                return convention, prefix
    return None


def _tied_copy(weights: Tensors, shape: Shape | None, convention: Convention, where: str) -> str | None:
    """The name of a tied head that was written all the same; it must be the embedding, and is then dropped."""
    head, embedding = convention.head, convention.embedding
    if shape is None or not shape.tie_embeddings or head not in weights:
        return None
    if not torch.equal(weights[head].whole(), weights[embedding].whole()):
        raise DataError(f"{where} has a {head} that is not its {embedding}, but the shape says that the two are tied.")
    return head


def _step(groups: dict[str, dict[str, Incoming]]) -> int | None:
    """AdamW counts its steps for each parameter. Ours are the run's: where all agree, one number is left of them."""
    numbers = {float(tensor.whole()) for tensor in groups.get("step", {}).values() if tensor.shape == ()}
    if len(numbers) != 1:
        return None
    del groups["step"]
    return int(numbers.pop())


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(map(shown, names[:3]))}{more}"


def _of_transformers(tensors: Tensors, shape: Shape) -> dict[str, Incoming]:
    in_stacks = is_stacked(tensors, shape)
    ours: dict[str, Incoming] = {}
    experts: dict[str, list[Incoming]] = {}
    taken = set()
    joined = joined_tensors(shape)
    for piece in stacked_pieces(shape) if in_stacks else pieces(shape):
        if piece.name not in tensors:
            continue  # what is missing is told by our name, with all the others
        taken.add(piece.name)
        tensor = tensors[piece.name]
        if piece.expert is not None:
            experts.setdefault(piece.of, []).append(tensor)
        elif in_stacks and piece.name.endswith(".experts.gate_up_proj"):
            half = tensor.shape[1] // 2
            ours[piece.of] = narrowed(tensor, 1, half if piece.of.endswith(".up") else 0, half)
        elif piece.of in joined and piece.shape == tensor.shape:
            part = narrowed(tensor, 0, piece.first, joined[piece.of][0])
            ours[piece.of] = without_ones(part) if part.shape != joined[piece.of] else part
        else:
            ours[piece.of] = tensor
    ours |= {name: stacked(parts) for name, parts in experts.items()}
    return ours | {name: tensor for name, tensor in tensors.items() if name not in taken}


def _of_titan(tensors: Tensors, shape: Shape) -> dict[str, Incoming]:
    ours = {}
    for name, tensor in tensors.items():
        block, inner = re.fullmatch(r"(?:layers\.(\d+)\.)?(.+)", name).groups()  # type: ignore[union-attr]  # `.+` fits
        module, _, kind = inner.rpartition(".")
        if module not in _OF_TITAN:
            ours[name] = tensor  # told with all the others that do not belong
            continue
        place = f"blocks.{block}." if block is not None else ""
        if module in ("attention.wq", "attention.wk") and tensor.shape[:1] and not tensor.shape[0] % shape.head_dim:
            tensor = half_split(tensor, shape.head_dim)
        ours[f"{place}{_OF_TITAN[module]}.{kind}"] = tensor
    return ours


_TITAN = Convention(
    "torchtitan",
    embedding="tok_embeddings.weight",
    head="output.weight",
    sign="layers.0.attention.wq.weight",
    top=("tok_embeddings", "layers", "norm", "output"),
    ours=_of_titan,
)
_TRANSFORMERS = Convention(
    "transformers",
    embedding="model.embed_tokens.weight",
    head="lm_head.weight",
    sign="model.layers.0.input_layernorm.weight",
    top=("model", "lm_head"),
    ours=_of_transformers,
)
_SHOAL = Convention(
    "Shoal",
    embedding="embed.weight",
    head="head.weight",
    sign="blocks.0.ffn_norm.weight",
    top=("embed", "blocks", "norm", "head"),
    ours=lambda tensors, _: dict(tensors),
)
