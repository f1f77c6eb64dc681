"""How gradients become updates, as it is asked for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shoal.spec.base import Auto, Fraction, Says, Strict

# A rate, or as AdamW's.
OwnRate = Annotated[Auto | Annotated[float, Field(gt=0)], Says("`auto`, or a number above 0")]


class Optimizer(Strict):
    """How gradients become updates."""

    name: Literal["adamw", "muon"] = Field("adamw", description="`muon`: matrices by Muon, the rest by AdamW.")
    lr: float = Field(3e-4, gt=0, description="Peak learning rate.")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), description="AdamW's two decay rates.")
    eps: float = Field(1e-8, gt=0, description="Added to the denominator.")
    weight_decay: float = Field(0.1, ge=0, description="Decoupled decay, on matrices only.")
    decay_embeddings: bool = Field(True, description="The embedding and the output matrix decay, too.")
    moments: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="AdamW's two numbers for each weight; `bf16` takes 4 bytes a weight less, and is rounded at random "
        "(by seed, step and place), so that small changes add up.",
    )
    muon_lr: OwnRate = Field(
        "auto",
        description="Peak learning rate of Muon's matrices. `auto`: `lr`, with updates as large as AdamW's (0.2 x "
        "sqrt(the longer side)). A number is a rate of their own, with updates of sqrt(rows / columns), at least 1.",
    )
    muon_momentum: float = Field(0.95, ge=0, lt=1, description="Momentum of Muon (Nesterov).")
    muon_weight_decay: float | None = Field(
        None, ge=0, description="Decoupled decay of Muon's matrices; empty: `weight_decay`."
    )
