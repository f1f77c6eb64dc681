"""How the weights of a new model begin: the rules that `model.init` names. No torch here; `shoal.model.init` draws.

A rule gives each kind of matrix its standard deviation. Norms begin at one and biases at zero under every rule. The
rules stand as one table in docs/guide/models.md; what was measured is in docs/decisions/044-start-values.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from shoal.spec.families import FAMILIES
from shoal.spec.model import Model

STD = 0.02  # where model.init_std is `auto`: GPT-2's, and what transformers takes for granted

Role = Literal["embedding", "head", "router", "attention", "gate", "up", "residual"]


@dataclass(frozen=True)
class Matrix:
    """What a rule may ask about a matrix."""

    role: Role  # `attention`: q, k, v; `residual`: out and down, which write to the residual stream
    inputs: int  # numbers that go into one of its results; of stacked experts, into one of one expert
    layer: int  # counted from 0; 0 outside the blocks
    layers: int  # of the whole model
    dim: int
    tied: bool  # the model's head is its embedding
    std: float  # model.init_std


@dataclass(frozen=True)
class Start:
    """A normal distribution around zero."""

    std: float
    cut: float | None = None  # numbers of more than so many standard deviations are drawn again


def _normal(m: Matrix) -> Start:
    """One standard deviation for all, as transformers does."""
    return Start(m.std)


def _megatron(m: Matrix) -> Start:
    """GPT-2's and Megatron's: what is added to the residual stream is less, the more layers add to it."""
    return Start(m.std / math.sqrt(2 * m.layers) if m.role == "residual" else m.std)


def _torchtitan(m: Matrix) -> Start:
    """As torchtitan begins its Llama and its mixtures. It cuts the others too, at 100 standard deviations."""
    match m.role:
        case "embedding" if not m.tied:
            return Start(1.0)
        case "embedding" | "head":
            return Start(m.dim**-0.5, cut=3.0)
        case "attention" | "gate":
            return Start(m.std)
        case "up" | "residual" | "router":
            return Start(m.std / math.sqrt(2 * (m.layer + 1)))


def _scaled(m: Matrix) -> Start:
    """Every product begins with results of its inputs' size, whatever the width; all that the blocks add to the
    residual stream together is of the embedding's size, so that a token is still heard in the last layer."""
    embedding = m.dim**-0.5 if m.tied else 1.0
    match m.role:
        case "embedding":
            return Start(embedding)
        case "head":
            return Start(m.dim**-0.5)
        case "attention" | "gate" | "up" | "router":
            return Start(m.inputs**-0.5)
        case "residual":
            return Start(embedding * (2 * m.layers * m.inputs) ** -0.5)


def _zero(m: Matrix) -> Start:
    """As `scaled`, but the blocks begin by adding nothing (nanochat, modded-nanogpt; muP's advice for outputs)."""
    return Start(0.0) if m.role == "residual" else _scaled(m)


RULES: dict[str, Callable[[Matrix], Start]] = {
    "normal": _normal,
    "megatron": _megatron,
    "torchtitan": _torchtitan,
    "scaled": _scaled,
    "zero": _zero,
}
FROM_THE_SHAPE = ("scaled", "zero")  # have no use for model.init_std

# What `auto` takes, by family and by optimizer: chosen by benchmarks/time_to_loss.py, and to be changed here only. Muon
# moves a matrix by as much whatever its size, so that it turns small ones faster; AdamW learns faster from large ones.
# All families are settings of one decoder, and of them one without experts and one with experts were measured.
_FASTEST = {"adamw": "scaled", "muon": "torchtitan"}
AUTO = dict.fromkeys(FAMILIES, _FASTEST)


def rule_of(model: Model, optimizer: str = "adamw") -> tuple[str, str]:
    """The rule that a model begins by, and why that one. A standard deviation for all is what `normal` means."""
    if model.init != "auto":
        return model.init, "as stated"
    if model.init_std != "auto":
        return "normal", f"model.init_std {model.init_std:g} is for all matrices"
    return AUTO[model.family][optimizer], f"learns fastest with {optimizer}"


def with_rule(model: Model, optimizer: str) -> Model:
    """With the rule's name in the place of `auto`: a later Shoal may choose another. Weights that come from elsewhere
    begin by no rule, and it stays open."""
    return model if model.weights is not None else model.model_copy(update={"init": rule_of(model, optimizer)[0]})
