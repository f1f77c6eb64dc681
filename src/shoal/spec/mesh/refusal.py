"""Says in one sentence why a mesh cannot be, and the nearest one that can."""

from __future__ import annotations

from dataclasses import replace

from shoal.spec.mesh import Layout, divisors
from shoal.spec.mesh.rules import AXES, Broken, Work, broken, factors
from shoal.spec.mesh.search import closed, nearest, tried
from shoal.spec.run import Mesh

MOST_FAULTS = 2  # the nearest mesh cures them all; a list of more is read by nobody


def refusal(mesh: Mesh, work: Work) -> Broken | None:
    """The names it is about and the sentence without its full stop; None when every `auto` can be closed."""
    best = tried(mesh, work)
    if not best.faults:
        return None
    names = tuple(dict.fromkeys(name for about, _ in best.faults for name in about))
    faults = [_fault(fault, best.layout, mesh, work) for fault in best.faults[:MOST_FAULTS]]
    batch, worlds = _other_batch(best.layout, work), _other_worlds(best.layout, mesh, work)
    cures = [cure for cure in (batch, worlds) if cure]
    # After other numbers of processes it must be said that this is about the given one.
    of_these = f"of {work.processes} processes " if worlds and nearest(mesh, work).sizes.world == work.processes else ""
    cures.append(of_these + _nearest(mesh, work, others=bool(cures)))
    return names, "; ".join([", and ".join(faults), ", and ".join(cures)])


def words(layout: Layout, mesh: Mesh) -> str:
    """`is pp 2 x dp_shard 2 with micro_batch 1`: axes above 1, and what else differs from what was asked for."""
    sizes = layout.sizes
    changed = {name for name in AXES if getattr(mesh, name) not in ("auto", getattr(sizes, name))}
    shown = [f"{name} {getattr(sizes, name)}" for name in AXES if getattr(sizes, name) > 1]
    shown = shown or [f"{name} 1" for name in AXES if name in changed]
    beside = {"ep": sizes.ep, "micro_batch": layout.micro_batch, "schedule": layout.schedule}
    beside["cp_method"] = layout.cp_method
    extra = [f"{name} {value}" for name, value in beside.items() if getattr(mesh, name) not in ("auto", value)]
    if shown or not extra:
        return " with ".join([f"is {' x '.join(shown) or 'one process'}", *([" and ".join(extra)] if extra else [])])
    return f"has {' and '.join(extra)}"


def _nearest(mesh: Mesh, work: Work, others: bool) -> str:
    found = nearest(mesh, work)
    world, given = found.sizes.world, work.processes
    if given is None or world == given:
        return f"the nearest mesh that works {words(found, mesh)}"
    which = f"{words(found, mesh)}, on {world} processes" if world > 1 else "is one process"
    if others:
        return f"the nearest mesh that works {which}"
    return f"no mesh of {given} processes works, and the nearest that does {which}"


def _fault(fault: Broken, layout: Layout, mesh: Mesh, work: Work) -> str:
    names, text = fault
    open_axes = any(getattr(mesh, name) == "auto" for name in ("dp_replicate", "dp_shard"))
    if names[0] == work.processes_name and open_axes:
        # What is left open would take the rest, if there were a rest.
        return f"{work.processes_name} {work.processes} is not a multiple of {factors(layout.sizes)}"
    return text


def _other_batch(layout: Layout, work: Work) -> str | None:
    """The nearest batch that this layout can train; a smaller change than another mesh, so it is offered too."""
    unit = layout.sizes.dp * layout.micro_batch
    if work.batch % unit == 0:
        return None
    close = (work.batch + unit // 2) // unit
    for near in sorted(range(max(1, close - 64), close + 65), key=lambda k: abs(k * unit - work.batch)):
        if not broken(layout, replace(work, batch=near * unit)):
            return f"train.batch {near * unit} would do"
    return None


def _other_worlds(layout: Layout, mesh: Mesh, work: Work) -> str | None:
    """The numbers of processes next to the given one that would do, if that alone is the difference."""
    given, unit = work.processes, layout.sizes.world
    if given is None or given == unit:
        return None
    # What is left open takes the rest, and data parallelism can take what the batch can be divided by.
    named = all(getattr(mesh, name) != "auto" for name in ("dp_replicate", "dp_shard"))
    worlds = [unit] if named else [unit * d for d in divisors(work.batch)]
    below = next((w for w in reversed(worlds) if w < given and _closes(mesh, work, w)), None)
    above = next((w for w in worlds if w > given and _closes(mesh, work, w)), None)
    near = [str(world) for world in (below, above) if world]
    return f"{work.processes_name} {' or '.join(near)} would do" if near else None


def _closes(mesh: Mesh, work: Work, processes: int) -> bool:
    return closed(mesh, replace(work, processes=processes)) is not None
