"""The model of a run that is not Shoal's: somebody's own, or a class of transformers."""

from __future__ import annotations

from shoal.model.objective import Objective
from shoal.model.own_model import BySignature, OwnModel, maker
from shoal.own.code import Code
from shoal.spec.run import Run
from shoal.spec.shape import Shape


def made(run: Run, shape: Shape, code: Code, objective: Objective | None = None) -> OwnModel:
    """On the CPU, with its start values."""
    if code.model is not None:
        return OwnModel(maker(code.model, run, BySignature.called), shape, BySignature(), objective)
    from shoal.model.hf_any import model_of  # transformers: only who trains such a model waits for it

    return model_of(run, shape, objective)
