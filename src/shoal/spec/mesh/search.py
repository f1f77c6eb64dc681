"""Closes what a run file leaves open about its mesh, and finds the nearest mesh that works when there is no way to.

Both are one search. A mesh is what the user named, each a number or `auto`; a candidate is a layout with its cost. Kept
names leave few candidates; free ones cost what they are changed by, |log2 of the ratio|, so that 3 is nearer to 4 than
to 2. Values that add no processes (micro_batch, schedule, cp_method, ep) are cheaper to change than axes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.spec.mesh import Layout, Sizes, divisors
from shoal.spec.mesh.rules import AXES, BATCH, CONTEXT, EXPERTS, FIXED, Broken, Rule, Work
from shoal.spec.mixers import widest_tp
from shoal.spec.run import Mesh
from shoal.spec.stages import micro_batches_fit

# What it costs to double or halve an axis that was named. Copies change nothing but the speed, so they go first; the
# axes inside a layer and between layers were chosen for the model, so they go last.
NAMED = {"dp_replicate": 1.0, "dp_shard": 1.1, "cp": 1.2, "tp": 1.3, "pp": 1.4}
# What it costs to use an axis that nobody named, and each doubling of it.
UNNAMED_START, UNNAMED = 1.0, 1.5
# Below this size a copy of the model is kept whole; above it sharding is worth its communication.
SHARD_ABOVE_PARAMS = 1_000_000_000
# A longer pipeline is not suggested, nor more processes for a layer of a model whose widths are not known.
MOST_STAGES = 256
MOST_TP = 64
# So many numbers of processes are tried one by one when the given one has no mesh.
MOST_WORLDS = 32
# Micro-batches a stage that keep most of a pipeline busy: of 4 pp + pp - 1 slots all but pp - 1 are used.
MICRO_BATCHES_A_STAGE = 4


@dataclass(frozen=True)
class Fitted:
    """The best that can be made of some sizes: what is still wrong with it, and what it changed."""

    layout: Layout
    faults: tuple[Broken, ...]
    cost: float


def closed(mesh: Mesh, work: Work) -> Layout | None:
    """The mesh with every `auto` closed and every name kept, or None when there is no such layout that works.

    pp, cp and tp stay 1 unless the other names leave no way around them.
    """
    best = tried(mesh, work)
    return None if best.faults else best.layout


def tried(mesh: Mesh, work: Work) -> Fitted:
    """The closing of the mesh that breaks the fewest rules, names kept."""
    fitted = (_fit(sizes, cost, mesh, work, keep=True) for cost, sizes in _closings(mesh, work))
    return min(fitted, key=lambda f: (len(f.faults), f.cost))


def nearest(mesh: Mesh, work: Work) -> Layout:
    """The layout nearest to the mesh that breaks no rule, on as many processes where those are given.

    When no mesh of so many works, fewer processes are taken; one always works.
    """
    as_it_is = closed(mesh, work)
    if as_it_is is not None:
        return as_it_is
    if work.processes is None:
        found = _cheapest(_around(mesh, work), mesh, work)
    else:
        found = _cheapest(_of_world(work.processes, mesh, work), mesh, work) or _smaller(mesh, work, work.processes)
    assert found is not None  # one process is among the candidates, and works
    return found.layout


def _smaller(mesh: Mesh, work: Work, given: int) -> Fitted | None:
    """Fewer processes than were given: a few idle ones against a mesh that is nearer to what was asked for."""
    widest = {name: [d for d in _sizes(name, work) if d < given] for name in ("pp", "dp_shard", "cp", "tp")}
    worlds = {1}
    for sizes in widest.values():  # dp_replicate and dp_shard together have one size that divides the batch
        worlds = {world * size for world in worlds for size in sizes if world * size < given}
    best: tuple[float, Fitted] | None = None
    for world in _thinned(sorted(worlds, reverse=True)):
        idle = UNNAMED * _ratio(given, world)
        if best and idle >= best[0]:
            break
        found = _cheapest(_of_world(world, mesh, work), mesh, replace(work, processes=world))
        if found and (best is None or idle + found.cost < best[0]):
            best = idle + found.cost, found
    return best[1] if best else None


def _thinned(worlds: list[int]) -> Iterator[int]:
    """The largest numbers one by one, then ever fewer down to 1: a large cluster has thousands."""
    last = 0
    for i, world in enumerate(worlds):
        if i < MOST_WORLDS or world <= 0.8 * last or world == 1:
            last = world
            yield world


def _cheapest(candidates: Iterator[tuple[float, Sizes]], mesh: Mesh, work: Work) -> Fitted | None:
    best: Fitted | None = None
    for cost, sizes in candidates:  # in the order of their cost
        if best and cost >= best.cost:
            break
        fitted = _fit(sizes, cost, mesh, work, keep=False)
        if not fitted.faults and (best is None or fitted.cost < best.cost):
            best = fitted
    return best


def _fit(sizes: Sizes, cost: float, mesh: Mesh, work: Work, keep: bool) -> Fitted:
    """Settles ep, cp_method, and schedule with micro_batch, which do not meddle with each other."""
    at_once = 1 if mesh.micro_batch == "auto" else mesh.micro_batch
    layout = Layout(sizes, at_once, mesh.schedule, mesh.cp_method, mesh.reduce)
    faults = [found for rule in FIXED for found in rule(layout, work)]
    if faults and not keep:
        return Fitted(layout, tuple(faults), cost)
    for options, rules in ((_eps, EXPERTS), (_methods, CONTEXT), (_orders, BATCH)):
        wrong, extra, layout = _best(options(layout, mesh, work, keep), rules, work)
        faults += wrong
        cost += extra
    return Fitted(layout, tuple(faults), cost)


def _best(
    options: Iterator[tuple[float, Layout]], rules: Sequence[Rule], work: Work
) -> tuple[list[Broken], float, Layout]:
    judged = [([found for rule in rules for found in rule(layout, work)], cost, layout) for cost, layout in options]
    return min(judged, key=lambda j: (len(j[0]), j[1]))


def _eps(layout: Layout, mesh: Mesh, work: Work, keep: bool) -> Iterator[tuple[float, Layout]]:
    named = None if mesh.ep == "auto" else mesh.ep
    if named and keep:
        sizes = [named]
    elif work.shape.experts is None:
        sizes = [1]
    else:
        sizes = [ep for ep in divisors(layout.sizes.span) if work.shape.experts.count % ep == 0]
    for ep in sizes:
        # Left open, the more processes share the experts the fewer of them each must hold and gather.
        cost = 0.6 * _ratio(ep, named) if named else 1e-3 * _ratio(ep, max(sizes))
        yield cost, replace(layout, sizes=replace(layout.sizes, ep=ep))


def _methods(layout: Layout, mesh: Mesh, work: Work, keep: bool) -> Iterator[tuple[float, Layout]]:
    if layout.sizes.cp == 1 or (keep and mesh.cp_method != "auto"):
        yield 0.0, layout
        return
    # all_to_all sends less and computes on whole sequences; it is first wherever the heads divide.
    for order, method in enumerate(("all_to_all", "ring")):
        changed = mesh.cp_method not in ("auto", method)
        yield 0.3 * changed + 1e-3 * order, replace(layout, cp_method=method)


def _orders(layout: Layout, mesh: Mesh, work: Work, keep: bool) -> Iterator[tuple[float, Layout]]:
    pp, each = layout.sizes.pp, work.batch // layout.sizes.dp
    named, asked = mesh.schedule, mesh.micro_batch
    schedules = ["auto"] if pp == 1 else ["1f1b", "gpipe", "interleaved", "zbv"] if not keep else ["1f1b", "gpipe"]
    if named != "auto":
        schedules = [named] if keep else [named, *schedules]
    for order, schedule in enumerate(dict.fromkeys(schedules)):
        cost = 0.3 * (named not in ("auto", schedule)) + 1e-3 * order
        if asked == "auto" and work.batch % layout.sizes.dp:
            sizes = [1]  # the batch is at fault, whatever is computed at once
        elif asked == "auto":
            sizes = [micro_batch(each, pp, schedule, work.micro_tokens * layout.sizes.cp // work.seq_len)]
        else:
            sizes = [asked] if keep else [asked, *divisors(max(each, 1))]
        for micro in sizes:
            change = 0.0 if asked in ("auto", micro) else 0.1 + 0.1 * _ratio(micro, int(asked))
            yield cost + change, replace(layout, schedule=schedule, micro_batch=micro)


def micro_batch(windows: int, pp: int, schedule: str, most: int) -> int:
    """How many of a process's windows to compute at once: `most` at most, and in a pipeline few enough to fill it."""
    fits = [d for d in divisors(max(windows, 1)) if pp == 1 or micro_batches_fit(windows // d, pp, schedule)]
    small = [d for d in fits if d <= most] or fits[:1] or [1]
    full = [d for d in small if pp == 1 or windows // d >= MICRO_BATCHES_A_STAGE * pp]
    return max(full) if full else min(small)


def _closings(mesh: Mesh, work: Work) -> Iterator[tuple[float, Sizes]]:
    """Sizes that keep every name. A product that is not the given number of processes is left for the rules to say."""
    if work.processes is not None:
        # Data parallelism takes what the others leave; other axes are used only when it may not.
        fill = mesh.dp_replicate != "auto" and mesh.dp_shard != "auto"
        values = {name: _kept(name, mesh, fill) for name in AXES}
        found = list(_factored(work.processes, values, mesh, work))
        if found:
            yield from found
            return
    yield from _sums(mesh, work, {name: _open(name, mesh) for name in AXES})


def _kept(name: str, mesh: Mesh, fill: bool) -> Sequence[int] | None:
    """The sizes that an axis may have in a closing; None is any."""
    if getattr(mesh, name) != "auto":
        return [int(getattr(mesh, name))]
    if fill or name.startswith("dp_") or (name == "pp" and mesh.schedule != "auto"):
        return None
    return [1]


def _open(name: str, mesh: Mesh) -> Sequence[int]:
    """The same where the number of processes is open too: no more of them than the names ask for."""
    if getattr(mesh, name) != "auto":
        return [int(getattr(mesh, name))]
    if name == "pp" and mesh.schedule != "auto":
        return [1, 2]
    if name == "dp_shard" and mesh.ep != "auto":
        return divisors(mesh.ep)
    return [1]


def _of_world(world: int, mesh: Mesh, work: Work) -> Iterator[tuple[float, Sizes]]:
    values = {name: [size for size in _sizes(name, work) if world % size == 0] for name in AXES}
    return iter(_factored(world, values, mesh, work))


def _around(mesh: Mesh, work: Work) -> Iterator[tuple[float, Sizes]]:
    """Any number of processes: each name may become anything up to its double."""
    values: dict[str, Sequence[int]] = {}
    for name in AXES:
        asked = getattr(mesh, name)
        if name == "dp_shard" and asked == "auto":
            asked = mesh.ep  # processes to share the experts over
        values[name] = _open(name, mesh) if asked == "auto" else [d for d in _sizes(name, work) if d <= 2 * asked]
    return _sums(mesh, work, values)


def _sizes(name: str, work: Work) -> Sequence[int]:
    """The sizes that an axis could have by the rules about it alone."""
    if name == "pp":
        return range(1, min(work.shape.layers, MOST_STAGES) + 1)
    if name == "tp":
        # Of a model that is not Shoal's the widths are not known yet.
        return divisors(work.processes or MOST_TP) if work.foreign else divisors(widest_tp(work.shape))
    return divisors(work.seq_len if name == "cp" else work.batch)


def _factored(
    world: int, values: Mapping[str, Sequence[int] | None], mesh: Mesh, work: Work
) -> list[tuple[float, Sizes]]:
    """The ways to write `world` as a product of one value an axis, the cheapest first."""
    axes = [divisors(world) if values[name] is None else values[name] or [1] for name in AXES]
    reach = [math.prod(max(axis) for axis in axes[i:]) for i in range(len(axes) + 1)]  # of the axes from i on
    found: list[tuple[float, Sizes]] = []

    def take(rest: int, chosen: tuple[int, ...], cost: float) -> None:
        i = len(chosen)
        if i == len(AXES):
            found.append((cost, Sizes(*chosen)))
            return
        for size in axes[i]:
            if rest % size == 0 and rest // size <= reach[i + 1]:
                take(rest // size, (*chosen, size), cost + _axis_cost(AXES[i], size, mesh, work))

    take(world, (), 0.0)
    return sorted(found, key=lambda item: item[0])


def _sums(mesh: Mesh, work: Work, values: dict[str, Sequence[int]]) -> Iterator[tuple[float, Sizes]]:
    """Every choice of one value an axis, the cheapest first, without making them all: costs of axes add up."""
    ranked = [sorted((_axis_cost(name, size, mesh, work), size) for size in values[name]) for name in AXES]
    start = (0,) * len(AXES)
    queue, seen = [(sum(axis[0][0] for axis in ranked), start)], {start}
    while queue:
        cost, at = heapq.heappop(queue)
        yield cost, Sizes(*(axis[i][1] for axis, i in zip(ranked, at, strict=True)))
        for k, axis in enumerate(ranked):
            after = (*at[:k], at[k] + 1, *at[k + 1 :])
            if after[k] < len(axis) and after not in seen:
                seen.add(after)
                heapq.heappush(queue, (cost + axis[after[k]][0] - axis[at[k]][0], after))


def _axis_cost(name: str, size: int, mesh: Mesh, work: Work) -> float:
    asked = getattr(mesh, name)
    if asked != "auto":
        return NAMED[name] * _ratio(size, asked)
    if name.startswith("dp_"):
        # Free, with a lean to what suits the size of the model.
        lean = "dp_shard" if work.shape.params > SHARD_ABOVE_PARAMS else "dp_replicate"
        return (1e-3 if name == lean else 2e-3) * _ratio(size, 1)
    return UNNAMED_START + UNNAMED * _ratio(size, 1) if size > 1 else 0.0


def _ratio(a: int, b: int) -> float:
    return abs(math.log2(a) - math.log2(b))
