"""The mesh that a run file names, beside the best that the planner knows."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.plan.explain import against, words
from shoal.plan.review.finding import Finding, costing, faster
from shoal.plan.review.subject import Subject
from shoal.spec.mesh.rules import AXES

NAMES = (*AXES, "ep", "micro_batch", "schedule", "cp_method", "recompute", "reduce")


def slower_mesh(s: Subject) -> Iterator[Finding]:
    mesh = s.run.mesh
    named = [name for name in NAMES if getattr(mesh, name) != "auto"]
    best = s.opened(*NAMES)
    if best is None:
        return
    gain = s.gain(best)
    severity = costing(gain)
    if severity is None:
        return
    kept = ", ".join(f"{name} {getattr(mesh, name)}" for name in named)
    why = against(best, s.found).partition(": ")[2].rstrip(".") if gain < 1 else ""
    yield Finding(
        severity,
        "slower-mesh",
        tuple(f"mesh.{name}" for name in named),
        f"The mesh that is named ({kept}) is not the fastest: left open, {words(best.layout, best.recompute)} is "
        f"{faster(gain)}" + (f" ({why})." if why else "."),
        "Leave values of the mesh open (`auto`), or take those.",
        gain / (1 + gain),
    )
