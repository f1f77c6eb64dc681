"""What may become of a field of a config.json, and the verdicts that several families have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

READ: Final = "read"


@dataclass(frozen=True)
class Harmless:
    why: str  # one word


@dataclass(frozen=True)
class Only:
    """These values do not change what is computed; all others are refused."""

    values: tuple[object, ...]
    why: str  # half a sentence


Verdict = str | Harmless | Only
Verdicts = dict[str, Verdict]


def read(names: str) -> Verdicts:
    return dict.fromkeys(names.split(), READ)


def harmless(**words: str) -> Verdicts:
    return {name: Harmless(why) for why, names in words.items() for name in names.split()}


NO_BIAS = Only((False,), "this family's class has none")
_NO_EXPERTS = Only(
    (0,), "transformers computes this family without experts (mixtral, qwen3_moe, dots1 and deepseek_v3 have them)"
)
DENSE: Verdicts = {"num_local_experts": _NO_EXPERTS, "num_experts": _NO_EXPERTS}
ROUTED: Verdicts = harmless(said="output_router_logits", loss="router_aux_loss_coef aux_loss_alpha seq_aux")
