"""Memory: what recomputing costs and why it is needed, and activations that nothing can make smaller."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shoal.plan.memory import MODES
from shoal.plan.review.finding import HURTS, Finding, Severity, costing, percent
from shoal.plan.review.own_mesh import NAMES
from shoal.plan.review.subject import Subject
from shoal.plan.search import priced
from shoal.readable import size
from shoal.spec.mesh import Layout, Sizes
from shoal.spec.mesh.rules import CONTEXT, FIXED

# Of the memory that may be filled: above the one activations dominate it, above the other nothing more fits in.
DOMINATES, FULL = 0.5, 0.9


def needless_recompute(s: Subject) -> Iterator[Finding]:
    """A way of recomputing that the run file names, where a lesser one fits."""
    named = s.run.mesh.recompute
    if named in ("auto", "none"):
        return
    for mode in MODES[: MODES.index(named)]:
        other = priced(s.asked, s.layout, mode)
        if other.fits:
            gain = s.gain(other)
            if severity := costing(gain):
                yield Finding(
                    severity,
                    "needless-recompute",
                    ("mesh.recompute",),
                    f"mesh.recompute {named} computes again what there is room to keep: with {mode} a device needs "
                    f"{size(other.memory.total)} of the {size(other.budget)} that may be filled, and a step is "
                    f"{percent(gain)} faster.",
                    f"mesh.recompute {mode}, or leave it auto.",
                    gain,
                )
            return


def dear_recompute(s: Subject) -> Iterator[Finding]:
    share, mode = s.part("recompute"), s.found.recompute
    if share < HURTS:
        return
    less = [priced(s.asked, s.layout, other) for other in MODES[: MODES.index(mode)]]
    if s.run.mesh.recompute != "auto" and any(found.fits for found in less):
        return  # `needless_recompute` has said it
    whole = less[0]
    yield Finding(
        Severity.HURTS,
        "dear-recompute",
        ("mesh.recompute", "data.seq_len", "mesh.micro_batch"),
        f"Recomputing ({mode}) takes {percent(share)} of a step, as keeping all activations would need "
        f"{size(whole.memory.total)} per device, of {size(whole.budget)} that may be filled.",
        _more_room(s),
        share,
    )


def nothing_left_to_drop(s: Subject) -> Iterator[Finding]:
    m, mode = s.found.memory, s.found.recompute
    if s.layout.micro_batch > 1 or MODES.index(mode) < MODES.index("attention"):
        return
    least = min((priced(s.asked, s.layout, other) for other in MODES), key=lambda found: found.memory.total)
    kept = least.memory.activations + least.memory.working
    if not s.found.fits or kept < DOMINATES * least.memory.total or m.total < FULL * s.found.budget:
        return
    yield Finding(
        Severity.HURTS,
        "nothing-left-to-drop",
        ("data.seq_len", "mesh.cp", "mesh.recompute"),
        f"One window of data.seq_len {s.run.data.seq_len:,} fills {percent(m.total / s.found.budget)} of a device "
        f"with micro_batch 1 and recompute {mode}; {size(kept)} of it is what no recomputing can drop (the inputs of "
        "blocks, the block under way, a chunk of logits), so nothing longer or wider fits.",
        _more_room(s),
    )


def _more_room(s: Subject) -> str:
    """The axes that divide activations, as far as they can go; a mesh that is open has them already."""
    shorter = f"data.seq_len {s.run.data.seq_len // 2:,}"
    if all(getattr(s.run.mesh, name) == "auto" for name in NAMES):
        return f"No mesh is faster here: more devices, devices with more memory, or {shorter} leave more room."
    sizes, work = s.sizes, replace(s.asked.work, processes=None)

    def legal(**axis: int) -> bool:
        layout = Layout(replace(Sizes(tp=sizes.tp, cp=sizes.cp), **axis), 1, "auto", "ring")
        return not any(True for rule in (*FIXED, *CONTEXT) for _ in rule(layout, work))

    ways = [f"mesh.cp {2 * sizes.cp}"] * legal(cp=2 * sizes.cp)
    inside = 2 * sizes.tp <= s.asked.machine.domain and s.asked.precision != "fp8"
    ways += [f"mesh.tp {2 * sizes.tp}"] * (inside and legal(tp=2 * sizes.tp))
    ways += ["mesh.micro_batch 1"] * (s.layout.micro_batch > 1)
    return (
        f"{', '.join(ways) + ' or ' if ways else ''}{shorter} halves them; a device with more memory would hold them."
    )
