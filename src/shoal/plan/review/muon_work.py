"""Muon: who orthogonalises which matrix, and how long the slowest takes.

As `shoal.train.muon` does it: matrices whose rows FSDP has cut are dealt out, as many at a time as there are processes;
those that tensor parallelism has cut, and those of copies, are computed by everybody. A step as the planner prices it
has AdamW's bytes and not these products.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.plan.review.finding import Finding, costing, percent
from shoal.plan.review.subject import Subject
from shoal.plan.stage_parts import held
from shoal.readable import short

ITERATIONS = 5  # of shoal.train.muon


def muon_work(s: Subject) -> Iterator[Finding]:
    if s.run.train.optimizer.name != "muon":
        return
    group, tp = s.sizes.dp_shard * s.sizes.cp, s.sizes.tp
    costs = sorted(_dense(s), reverse=True)
    dealt = group > 1 and tp == 1
    rounds = costs[::group] if dealt else costs
    flops = sum(rounds) + _experts(s)
    m = s.asked.machine
    seconds = flops / ((m.matmul32 if m.cpu else m.matmul) * s.asked.constants.sustained)
    share = seconds / (s.found.seconds + seconds)
    severity = costing(share)
    if severity is None:
        return
    if dealt:
        busy = len(costs) / (len(rounds) * group)
        who = (
            f"deals the {len(costs):,} matrices of a stage out to {group:,} processes in {len(rounds):,} "
            f"round{'s' * (len(rounds) > 1)}, in which {busy:.0%} of them have one"
        )
    else:
        why = (
            f", as mesh.tp {tp} cuts them" if tp > 1 else ", as copies do not share them out" if s.sizes.dp > 1 else ""
        )
        who = f"orthogonalises all {len(costs):,} matrices of a stage on every process{why}"
    yield Finding(
        severity,
        "muon-work",
        ("train.optimizer.name", "mesh.tp", "mesh.dp_shard"),
        f"Muon {who}: about {short(seconds)} per step, {percent(share)} of it, which the planned step does not count.",
        "A larger train.batch spreads it over more work; "
        + (
            "mesh.tp 1 shares matrices out."
            if tp > 1
            else "mesh.dp_shard shares them out."
            if not dealt
            else "a larger mesh.pp leaves fewer matrices per stage."
        ),
        share,
    )


def _dense(s: Subject) -> Iterator[float]:
    """FLOPs of each matrix of the stage with the most layers."""
    shape = s.shape
    stages = [held(s.closed, shape, rank).layers for rank in range(s.sizes.pp)]
    for layer in max(stages, key=len):
        yield from (_flops(*weight.dims) for weight in shape.mixer_weights(layer) if weight.product)
        if not shape.sparse(layer):
            yield from [_flops(shape.dim, shape.ffn_dim)] * 3
        elif shape.experts is not None and shape.experts.shared:
            yield from [_flops(shape.dim, shape.experts.ffn_dim * shape.experts.shared)] * 3


def _experts(s: Subject) -> float:
    """Of the stacks of a stage: a process computes those that it holds."""
    e = s.shape.experts
    if e is None:
        return 0.0
    layers = sum(s.shape.sparse(layer) for layer in range(s.shape.layers)) / s.sizes.pp
    own = max(1.0, e.count / s.sizes.ep / max(1, s.sizes.span // s.sizes.ep))
    return layers * own * 3 * _flops(s.shape.dim, e.ffn_dim)


def _flops(a: int, b: int) -> float:
    """An iteration multiplies the matrix with itself, the small result with itself, and that with the matrix."""
    small, large = min(a, b), max(a, b)
    return ITERATIONS * (4.0 * small**2 * large + 2.0 * small**3)
