"""In which precision a run is evaluated."""

from __future__ import annotations


def evaluated_in(training: str, asked: str) -> str:
    """`eval.precision` with nothing left open: as training computes, and bf16 where that is fp8, as what was learned
    is used in 16 bits."""
    if asked != "auto":
        return asked
    return "bf16" if training == "fp8" else training


def problem(training: str, asked: str) -> str:
    """Why a run that trains in one precision cannot be evaluated in another; empty where it can."""
    can = ["bf16", "fp8"] if training == "fp8" else [training]
    if asked in ("auto", *can) or training == "auto":
        return ""
    return (
        f"eval.precision {asked} does not go with train.precision {training}, whose model computes in "
        f"{' or '.join(can)}; set eval.precision to {' or '.join(['auto', *can])}"
    )
