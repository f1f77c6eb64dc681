"""Pipelines: stages that are not alike, the bubble, and an embedding that lies on two stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from shoal.plan.collectives import hand_over
from shoal.plan.review.finding import Finding, Severity, costing, percent, traffic_costing
from shoal.plan.review.subject import Subject
from shoal.plan.search import cases_of, priced, waited
from shoal.plan.traffic import Step, step_of, traffic
from shoal.plan.verdict import SAVED_BYTES
from shoal.readable import short, size
from shoal.spec.mesh.rules import broken
from shoal.spec.stages import layer_costs, stage_count, stages_of, stretches

# Layers more or fewer that are tried for stages that are alike.
LAYERS_TRIED = 4


def uneven_stages(s: Subject) -> Iterator[Finding]:
    if s.sizes.pp == 1:
        return
    share = s.part("pipeline") * (1 - _bubble(s))
    severity = costing(share)
    if severity is None:
        return
    pp, schedule = s.sizes.pp, s.layout.schedule
    costs = layer_costs(s.shape, s.run.data.seq_len)
    cut = stretches(s.shape, pp, schedule, s.run.data.seq_len)
    of_process = [sum(costs[n] for stage in stages_of(rank, pp, schedule) for n in cut[stage]) for rank in range(pp)]
    slowest = max(range(pp), key=lambda rank: of_process[rank])
    more = of_process[slowest] * pp / sum(of_process) - 1
    held = [_held(cut[stage], s.shape.layers) for stage in stages_of(slowest, pp, schedule)]
    better, named = _better_layers(s, share), s.run.mesh.pp != "auto"
    yield Finding(
        severity,
        "uneven-stages",
        ("model.layers", "mesh.pp", "model.vocab_size"),
        f"The {s.shape.layers} layers, embedding and head do not make {stage_count(pp, schedule)} equal stages: place "
        f"{slowest + 1} of {pp} in the pipeline ({' and '.join(held)}) computes {percent(more)} more than the mean, "
        f"and the others wait for it {percent(share)} of a step.",
        f"model.layers {better[0]} would make it {percent(better[1])}{'; or take another mesh.pp' * named}."
        if better
        else f"{'Take another mesh.pp' if named else 'No mesh.pp is faster'}; other numbers of layers are no better.",
        share,
    )


def bubble(s: Subject) -> Iterator[Finding]:
    if s.sizes.pp == 1:
        return
    share = s.part("pipeline") * _bubble(s)
    severity = traffic_costing(share, s.run.mesh.pp != "auto")
    if severity is None:
        return
    pp, rounds = s.sizes.pp, s.micro_batches
    fewer = ", fewer than it has processes" if rounds < pp else ""
    twice = replace(s.asked, run=s.with_batch(2 * s.run.train.batch))
    now, then = (waited(asked, s.layout, s.found.recompute, even=True) for asked in (s.asked, twice))
    half = share * (then / (2 * rounds + then)) / (now / (rounds + now)) if now > 0 else 0.0
    change = f"train.batch {2 * s.run.train.batch:,} would make it {percent(half)}"
    if other := _other_schedule(s):
        change += f"; mesh.schedule {other[0]} is {percent(other[1])} faster"
    yield Finding(
        severity,
        "bubble",
        ("train.batch", "mesh.pp", "mesh.micro_batch", "mesh.schedule"),
        f"A pipeline of {pp} processes gets {rounds:,} micro-batch{'es' * (rounds > 1)} per step{fewer} (train.batch "
        f"{s.run.train.batch:,} over {s.sizes.dp:,} data-parallel processes, micro_batch {s.layout.micro_batch}), so "
        f"its processes stand idle for {percent(share)} of a step while it fills and empties ({s.layout.schedule}).",
        f"{change}{'; a smaller mesh.pp has less of it' * (s.run.mesh.pp != 'auto')}.",
        share,
    )


def tied_over_stages(s: Subject) -> Iterator[Finding]:
    """In a "V" (zbv) both ends are on one process."""
    if s.sizes.pp == 1 or not s.shape.tie_embeddings or s.layout.schedule == "zbv":
        return
    step = step_of(s.closed, s.shape)
    apart = Step(**{**vars(step), "shape": replace(s.shape, tie_embeddings=False)})
    sent = sum(row[1] for row in traffic(step).values()) - sum(row[1] for row in traffic(apart).values())
    enders = 2 * step.peers  # processes that hold one of the two ends
    cases = cases_of(s.asked, [s.layout], [s.found.recompute])
    seconds = float(hand_over(cases, s.asked.constants, np.array([sent / enders]))[0])
    share = seconds / s.found.seconds
    numbers = s.shape.vocab_size * s.shape.dim
    own = SAVED_BYTES * numbers / s.sizes.tp / (s.sizes.dp_shard * s.sizes.cp)
    yield Finding(
        costing(share) or Severity.NOTE,
        "tied-over-stages",
        ("model.tie_embeddings", "mesh.pp", "mesh.schedule"),
        f"model.tie_embeddings shares a matrix of {numbers / 1e6:,.0f}M numbers that the pipeline needs at both ends: "
        f"first and last stage each hold it with its optimizer ({size(own)} per process), and their {enders:,} "
        f"processes send each other {size(sent / enders)} of its gradient in every step ({short(seconds)} of "
        f"{short(s.found.seconds)}).",
        "mesh.schedule zbv puts both ends on one process; without a pipeline there is one matrix.",
        share,
    )


def _bubble(s: Subject) -> float:
    """Of what a pipeline waits, the share that equal stages would wait too."""
    whole = waited(s.asked, s.layout, s.found.recompute)
    even = waited(s.asked, s.layout, s.found.recompute, even=True)
    return min(1.0, even / whole) if whole > 0 else 1.0


def _held(layers: range, of: int) -> str:
    some = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
    ends = ["the embedding"] * (layers[0] == 0) + ["the head"] * (layers[-1] == of - 1)
    return ", ".join([some, *ends])


def _better_layers(s: Subject, share: float) -> tuple[int, float] | None:
    """The nearest number of layers that leaves less than half of the waiting, and how much it leaves."""
    if s.run.model.weights is not None:
        return None

    def lost(layers: int) -> float:
        asked = replace(s.asked, shape=replace(s.shape, layers=layers))
        whole, even = (waited(asked, s.layout, s.found.recompute, even=way) for way in (False, True))
        return (whole - even) / (s.micro_batches + whole)

    now = lost(s.shape.layers)
    least = max(
        stage_count(s.sizes.pp, s.layout.schedule), 1 + (s.shape.experts.dense_layers if s.shape.experts else 0)
    )
    for away in range(1, LAYERS_TRIED + 1):
        for layers in (s.shape.layers - away, s.shape.layers + away):
            if layers >= least and (then := lost(layers)) < now / 2:
                return layers, max(0.0, share * then / now)
    return None


def _other_schedule(s: Subject) -> tuple[str, float] | None:
    """The best of the other orders that are legal and fit, and how much faster it is."""
    found = []
    for name in ("1f1b", "interleaved", "zbv"):
        layout = replace(s.layout, schedule=name)
        if name != s.layout.schedule and name not in s.asked.without and not broken(layout, s.asked.work):
            other = priced(s.asked, layout, s.found.recompute)
            if other.fits:
                found.append((name, s.gain(other)))
    best = max(found, key=lambda one: one[1], default=None)
    return best if best and costing(best[1]) is not None else None
