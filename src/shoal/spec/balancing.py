"""How the experts of a mixture are evened out, where the run file leaves it open.

A bias on selection (`balance_rate`) pulls against no loss, but only a class with a place for it can compute what was
trained. Where the class has none, the routers learn to do without from the beginning, by a loss (`balance_loss`).
"""

from __future__ import annotations

from shoal.spec.families import FAMILIES
from shoal.spec.model import Experts, Model

RATE = 1e-3  # arXiv:2408.15664
LOSS = 1e-2  # arXiv:2101.03961


def holds_bias(family: str) -> bool:
    """Whether the family's class has a place for the bias that picks experts."""
    routed = FAMILIES[family].routed
    return routed is not None and routed.holds_bias


def loses_bias(family: str) -> bool:
    """Whether it has a class for mixtures, and that has none."""
    routed = FAMILIES[family].routed
    return routed is not None and not routed.holds_bias


def balancing(model: Model) -> tuple[float, float, str]:
    """`balance_rate`, `balance_loss`, and why."""
    e = model.experts
    assert e is not None
    loses = loses_bias(model.family)
    rate = (0.0 if loses else RATE) if e.balance_rate == "auto" else e.balance_rate
    loss = (LOSS if loses and e.balance_rate == "auto" else 0.0) if e.balance_loss == "auto" else e.balance_loss
    why = f"{model.family} has {'no' if loses else 'a'} place for a bias"
    return rate, loss, why


def with_balancing(model: Model) -> Model:
    """With numbers in the place of `auto`: a later Shoal may choose others."""
    return model if model.experts is None else model.model_copy(update={"experts": closed(model)})


def closed(model: Model) -> Experts | None:
    if model.experts is None:
        return None
    rate, loss, _ = balancing(model)
    return model.experts.model_copy(update={"balance_rate": rate, "balance_loss": loss})
