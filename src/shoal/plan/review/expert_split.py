"""Mixtures of experts: experts that cannot be shared out, thin products, traffic over slow links."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from shoal.plan.review.finding import Finding, Severity, costing, percent, traffic_costing
from shoal.plan.review.subject import Subject
from shoal.readable import size
from shoal.spec.mesh.rules import EXPERTS
from shoal.spec.shape import Shape

# Multiples that clusters come in.
USUAL = 8


def unsplit_experts(s: Subject) -> Iterator[Finding]:
    e, devices = s.shape.experts, s.asked.island
    if e is None or s.run.mesh.ep != "auto" or devices == 1 or math.gcd(e.count, devices) > 1:
        return
    near = max(USUAL, round(e.count / USUAL) * USUAL)
    shape = _with(s.shape, count=near, top_k=min(e.top_k, near))
    other = s.best(shape=shape)
    gain = max(0.0, s.gain_of_shape(shape, other)) if other else 0.0
    gathered = 2 * 3 * s.shape.dim * e.ffn_dim * e.count
    instead = f" With {near} the run would compute {percent(gain)} more per second." if gain > 0 else ""
    yield Finding(
        costing(gain) or Severity.NOTE,
        "unsplit-experts",
        ("model.experts.count", "mesh.ep"),
        f"model.experts.count {e.count} and {devices:,} devices have no common divisor, so mesh.ep is 1: every device "
        f"gathers all experts of a layer ({size(gathered)}) for every micro-batch.{instead}",
        f"model.experts.count {near}, or a number of devices that shares a divisor with {e.count}.",
        gain,
    )


def expert_traffic(s: Subject) -> Iterator[Finding]:
    e, ep, domain = s.shape.experts, s.sizes.ep, s.asked.machine.domain
    share, named = s.part("experts"), s.run.mesh.ep != "auto"
    severity = traffic_costing(share, named)
    if e is None or ep == 1 or severity is None:
        return
    near = f"A mesh.ep of {domain} or less stays on fast links" if ep > domain else "A smaller mesh.ep sends less"
    first = near if named else "No mesh.ep is faster"
    where = f"over the network (fast links join {domain})" if ep > domain else "inside a node"
    yield Finding(
        severity,
        "expert-traffic",
        ("mesh.ep", "model.experts.top_k"),
        f"mesh.ep {ep} sends every token to its {e.top_k} experts and back {where}, forwards and backwards in every "
        f"layer, which takes {percent(share)} of a step.",
        f"{first}; model.experts.top_k {max(1, e.top_k // 2)} would send half.",
        share,
    )


def thin_experts(s: Subject) -> Iterator[Finding]:
    """The same parameters and the same work in half as many experts of twice the width."""
    e = s.shape.experts
    if e is None or e.count % 2 or e.top_k % 2 or e.count < 4:
        return
    shape = _with(s.shape, count=e.count // 2, top_k=e.top_k // 2, ffn_dim=2 * e.ffn_dim)
    if any(True for rule in EXPERTS for _ in rule(s.layout, replace(s.asked.work, shape=shape))):
        return
    # Half the top_k also sends half; that is told by the rule above.
    share = s.part("products") - s.repriced(shape=shape).parts["products"] / s.found.seconds
    severity = costing(share)
    if severity is None:
        return
    tokens = s.layout.micro_batch * s.run.data.seq_len // (s.sizes.cp * s.sizes.tp)
    rows = tokens * e.top_k * s.sizes.ep / e.count
    yield Finding(
        severity,
        "thin-experts",
        ("model.experts.count", "model.experts.ffn_dim", "model.experts.top_k", "mesh.micro_batch"),
        f"An expert gets about {rows:,.0f} tokens at once ({tokens:,} of a process's micro-batch x top_k {e.top_k} "
        f"over {e.count} experts, mesh.ep {s.sizes.ep}), and its products are thin: the same parameters and work as "
        f"{e.count // 2} experts of width {2 * e.ffn_dim:,} with top_k {e.top_k // 2} would take {percent(share)} of "
        "a step less (on mixtures a plan is off by a fifth).",
        "More tokens at once (mesh.micro_batch, mesh.ep), or fewer and wider experts.",
        share,
    )


def dense_in_disguise(s: Subject) -> Iterator[Finding]:
    e = s.shape.experts
    if e is None or 2 * e.top_k < e.count:
        return
    yield Finding(
        Severity.NOTE,
        "many-of-the-experts",
        ("model.experts.top_k", "model.experts.count"),
        f"model.experts.top_k {e.top_k} of {e.count} experts see each token: "
        f"{s.shape.active_params / s.shape.params:.0%} of the parameters are computed for every one, and the router, "
        "its balance and its traffic come on top.",
        "More experts of a smaller width, a smaller model.experts.top_k, or a dense model.",
    )


def _with(shape: Shape, **experts: int) -> Shape:
    assert shape.experts is not None
    return replace(shape, experts=shape.experts.model_copy(update=experts))
