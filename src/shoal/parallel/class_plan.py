"""What a class of transformers says of how it is cut (`base_model_tp_plan`, `_tp_plan`): its words, in ours.

A plan is data: names of modules or parameters, with `*` for the number of a layer, to the name of a style. What the
styles mean is the same in every class, and is said here: which dimension of a parameter is cut, and what the module
does with its input and output. A word that is not known here is refused by its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

Way = Literal["as it is", "shared in", "summed out", "dealt in", "joined out", "rows", "rope", "experts", "share"]


@dataclass(frozen=True)
class Style:
    way: Way = "as it is"  # what its module does at its ends
    cut: int | None = None  # the dimension of its matrices, from the last; None: whole on every process
    bias: bool = False  # a bias is cut as well
    packed: bool = False  # two matrices in one, each of which is cut
    partial: bool = False  # whole, and used for this process's part alone: its gradients are summed
    alone: bool = False  # input and output are whole, so that it can as well be left whole


_JOINED = Style("joined out", cut=-2, bias=True, alone=True)
_DEALT = Style("dealt in", cut=-1, alone=True)
STYLES: dict[str, Style] = {
    "colwise": Style("shared in", cut=-2, bias=True),
    "rowwise": Style("summed out", cut=-1),
    "colwise_gather_output": _JOINED,
    "colwise_rep": _JOINED,
    "rowwise_split_input": _DEALT,
    "rowwise_rep": _DEALT,
    "embedding_rowwise": Style("rows", cut=-2, alone=True),
    "embedding_colwise": Style("joined out", cut=-1, alone=True),
    "packed_colwise": Style(cut=-2, packed=True),
    "packed_rowwise": Style(cut=-1, packed=True),
    "moe_tp_experts": Style("experts"),
    "moe_identity_expert": Style("share"),
    "mla_kv_a_proj": Style("rope"),
    "all_reduce": Style("summed out"),
    "replicated_with_grad_allreduce": Style(partial=True),
    "replicate": Style(),
}


def plan_of(net: nn.Module) -> dict[str, str]:
    """Of the names that this net has; the words as the class has them."""
    said: Mapping[str, str] = getattr(net, "tp_plan", None) or {}
    names = {general(name) for name, _ in (*net.named_modules(), *net.named_parameters(remove_duplicate=False))}
    return {name: style for name, style in said.items() if name in names}


def general(name: str) -> str:
    """A name as plans write it: `layers.0.mlp` is `layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def style_of(plan: Mapping[str, str], parameter: str) -> str | None:
    """What is said of a parameter, by its own name or by its module's."""
    name = general(parameter)
    return plan.get(name) or plan.get(name.rpartition(".")[0])
