"""Every legal layout of a run on so many devices, by predicted speed.

All of them are priced at once, as columns. Those that come out best are looked at again one by one: their memory is
counted by the exact formula of Shoal's own trainer, and a pipeline's schedule is played instead of estimated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.plan.activations import block
from shoal.plan.asked import Asked
from shoal.plan.case import Cases
from shoal.plan.constants import Constants
from shoal.plan.footprint import footprint
from shoal.plan.island_costs import share, trade
from shoal.plan.layouts import layouts
from shoal.plan.memory import MODES, Memory, memory
from shoal.plan.pipeline_schedule import play
from shoal.plan.step import LATE, Parts, step
from shoal.spec.mesh import Layout, Sizes
from shoal.spec.run import Run
from shoal.spec.shape import Shape
from shoal.spec.stages import layer_costs, stretches

# Of a device's memory, what a plan may fill: the rest is lost to fragments, contexts and libraries.
USABLE = 0.92
# Layouts that are looked at again one by one.
LOOKED_AT = 400
SMALLEST = 100
# Of these, so many that fit: the estimate puts the best of them among the first.
ENOUGH = 40
# What a pipeline waits, in the estimate, is divided by this: pieces a device, or as zbv's split backward passes do.
PIECES = {"auto": 1.0, "gpipe": 1.0, "1f1b": 1.0, "interleaved": 2.0, "zbv": 6.0}
ORDERS = tuple(PIECES)
GPIPE, INTERLEAVED = ORDERS.index("gpipe"), ORDERS.index("interleaved")
# Parts that a step has once, into however many shards an island's batch is cut.
ONCE = ("update", "host")
# Of a layer's forward work, what is done again: recomputation ends before the product with `down`, a quarter of the
# products, as nothing needs its result (shoal.parallel.recompute). Selective: norms and activations. Attention
# itself is done again by `full` alone.
AGAIN = {"none": 0.0, "selective": 0.08, "attention": 0.8, "full": 0.8}


@dataclass(frozen=True)
class Found:
    """A layout with what it is predicted to take."""

    layout: Layout
    recompute: str
    parts: dict[str, float]  # seconds of a step
    memory: Memory
    budget: float  # bytes that may be filled
    traded_bytes: float = 0.0  # that a device sends to other islands in a step

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.budget


def search(asked: Asked, most: int = 5, c: Constants | None = None) -> list[Found]:
    """The fastest that fit, each another mesh; where none does, those that need the least memory."""
    c = c or asked.constants
    every, modes = list(layouts(asked)), _modes(asked)
    if not every:
        return []
    cases = cases_of(asked, every, modes)
    parts = _parts(cases, c)
    seconds, needed = _estimate(asked, parts, cases), footprint(cases).total
    budget = USABLE * asked.machine.memory
    # The estimate of memory is off by a tenth often and by a quarter now and then: what is beyond the one comes after
    # the fastest, what is beyond the other is looked at where none of those fits, the smallest first.
    beyond, smallest = needed > budget * 1.1, np.argsort(needed, kind="stable")[:SMALLEST]
    fastest = np.lexsort((np.where(beyond, needed, seconds), beyond))
    found: list[Found] = []
    for order in (fastest[: min(LOOKED_AT, int(np.sum(needed <= budget * 1.5)))], smallest):
        for i in order:
            layout, mode = divmod(int(i), len(modes))
            found.append(_look_at(asked, every[layout], modes[mode], parts.of(int(i)), budget))
            if sum(one.fits for one in found) >= ENOUGH:
                break
        if any(one.fits for one in found):
            break
    found.sort(key=lambda one: (not one.fits, one.seconds * _simpler(one) if one.fits else one.memory.total))
    return _different(found)[:most]


def _simpler(one: Found) -> float:
    """Of two that are predicted to be about as fast, the one with fewer axes is easier to live with, and one that sends
    less is surer."""
    s = one.layout.sizes
    axes = sum(size > 1 for size in (s.pp, s.cp, s.tp, s.dp_replicate * (s.dp_shard > 1)))
    return 1 + 0.005 * (axes + (one.layout.reduce == "micro_batch"))


def _different(found: list[Found]) -> list[Found]:
    """The best of each mesh: one that differs in nothing but the micro-batch tells nobody anything."""
    seen: dict[Any, Found] = {}
    for one in found:
        seen.setdefault(one.layout.sizes, one)
    return list(seen.values())


def priced(asked: Asked, layout: Layout, recompute: str, c: Constants | None = None) -> Found:
    """One layout that somebody else has chosen."""
    return next(all_priced(asked, [layout], [recompute], c))


def all_priced(
    asked: Asked, every: Sequence[Layout], modes: Sequence[str], c: Constants | None = None
) -> Iterator[Found]:
    """Each layout with each way of recomputing."""
    parts = _parts(cases_of(asked, every, modes), c or asked.constants)
    for i, (layout, mode) in enumerate(itertools.product(every, modes)):
        yield _look_at(asked, layout, mode, parts.of(i), USABLE * asked.machine.memory)


def _estimate(asked: Asked, parts: Parts, cases: Cases) -> npt.NDArray[np.float64]:
    """Seconds of a step, but for what islands trade: that is about as much whatever the layout."""
    passes = np.where(cases.pp > 1, share(asked.run, True).passes, share(asked.run, False).passes)
    once = parts.update + parts.host
    return (parts.total - once) * passes + once


def _parts(cases: Cases, c: Constants) -> Parts:
    """That zbv waits less is written as more pieces a device, but it hands over what two stages do."""
    parts = step(cases, c)
    return replace(parts, handover=parts.handover * np.minimum(cases.chunks, 2) / cases.chunks)


def _modes(asked: Asked) -> tuple[str, ...]:
    named = str(asked.run.mesh.recompute)
    return MODES if named == "auto" else (named,)


def cases_of(asked: Asked, every: Sequence[Layout], modes: Sequence[str]) -> Cases:
    """Each layout with each way of recomputing, one after the other."""
    experts = asked.shape.experts is not None
    axes = np.array([(s.pp, s.dp_replicate, s.dp_shard, s.cp, s.tp, s.ep) for s in (one.sizes for one in every)])
    pp, copies, shard, cp, tp, ep = axes.astype(float).T
    orders = np.array([(one.micro_batch, ORDERS.index(one.schedule)) for one in every])
    windows = np.where(pp > 1, share(asked.run, True).windows, share(asked.run, False).windows)
    micro, rounds = orders[:, 0], windows // (copies * shard * orders[:, 0])
    # Experts are shared by all that hold other tokens, tensor parallelism's devices too.
    spread = copies * shard * cp
    sharded = (shard * cp > 1) | ((spread > 1) & (pp * tp > 1)) | (experts & (shard * cp * tp > 1))
    # Micro-batches that a device holds at most, in whole stages: as shoal.plan.pipeline_schedule plays them.
    most = np.select([orders[:, 1] == GPIPE, orders[:, 1] == INTERLEAVED], [rounds, (3 * pp - 1) / 2], pp)
    columns = {
        "pp": pp,
        "cp": cp,
        "tp": tp,
        "ep": ep,
        "batch": windows.astype(float),
        "micro_batch": micro.astype(float),
        # Where a sequence is shared, documents are told apart by masks, which skip nothing.
        "seen": np.where(cp > 1, asked.run.data.seq_len / 2, asked.case.seen or asked.run.data.seq_len / 2),
        "all_to_all": np.array([one.cp_method == "all_to_all" for one in every]),
        "scatters": np.array([one.reduce == "micro_batch" for one in every]),
        "shard": shard * cp,
        "chunks": np.array([PIECES[name] for name in ORDERS])[orders[:, 1]],
        "zero": np.where(sharded, 3.0, 0.0),
        "under_way": np.minimum(rounds, most),
    }
    again = np.tile([AGAIN[mode] for mode in modes], len(every))
    mixed: dict[str, npt.NDArray[Any]] = {name: np.repeat(column, len(modes)) for name, column in columns.items()}
    mixed |= {"recompute": again, "dropped": again, "kept": _kept(asked, every, modes)}
    mixed["attention_again"] = np.tile([float(mode == "full") for mode in modes], len(every))
    return Cases.spread(asked.case, mixed)


def _kept(asked: Asked, every: Sequence[Layout], modes: Sequence[str]) -> npt.NDArray[np.float64]:
    """Bytes a token and layer, on average over the layers, by the trainer's own formula: it knows few kinds."""

    def of(tp: int, cp: int, method: str, sharded: bool, mode: str) -> float:
        sizes = Sizes(dp_shard=2 if sharded else 1, cp=cp, tp=tp)
        run = with_layout(asked, Layout(sizes, 1, "auto", method), mode)
        layers = asked.shape.layers
        tokens = asked.run.data.seq_len / cp
        sparse = sum(asked.shape.sparse(layer) for layer in range(layers))
        ends = block(run, asked.shape, 0).of(mode), block(run, asked.shape, layers - 1).of(mode)
        return (ends[0] * (layers - sparse) + ends[1] * sparse) / layers / tokens if sparse else ends[1] / tokens

    kinds = [(one.sizes.tp, one.sizes.cp, one.cp_method, one.sizes.dp_shard > 1) for one in every]
    known = {kind: [of(*kind, mode) for mode in modes] for kind in set(kinds)}
    return np.array([known[kind] for kind in kinds]).reshape(-1)


def _look_at(asked: Asked, layout: Layout, recompute: str, parts: dict[str, float], budget: float) -> Found:
    if layout.sizes.pp > 1:
        parts["pipeline"] = _played(asked, layout, recompute, parts)
    needs = memory(with_layout(asked, layout, recompute), asked.shape)
    if asked.run.fleet.islands == 1:
        return Found(layout, recompute, parts, needs, budget)
    traded = trade(asked.run, needs.weights, asked.machine, asked.devices)  # gradients are as large, in float32
    return Found(layout, recompute, _of_islands(asked, layout, parts, traded.seconds), needs, budget, traded.sent_bytes)


def _of_islands(asked: Asked, layout: Layout, parts: dict[str, float], traded_s: float) -> dict[str, float]:
    """A whole step of a shard's parts; the slowest of all islands sets the pace."""
    passes = share(asked.run, layout.sizes.pp > 1).passes
    whole = {name: part * (1 if name in ONCE else passes) for name, part in parts.items() if name != "waiting"}
    whole["islands"] = traded_s
    late = asked.constants.waiting * math.log2(max(asked.devices / LATE, 1.0))
    return {**whole, "waiting": sum(whole.values()) * late}


def _played(asked: Asked, layout: Layout, recompute: str, parts: dict[str, float]) -> float:
    """Seconds that the pipeline adds to what devices compute."""
    busy = ("products", "attention", "elementwise", "loss", "recompute", "tensor", "context", "experts")
    a_round = sum(parts[name] for name in busy) / _rounds(asked, layout)  # of one device, on average
    return waited(asked, layout, recompute) * a_round


def waited(asked: Asked, layout: Layout, recompute: str, even: bool = False) -> float:
    """Rounds that the pipeline adds to those that devices compute in a step, a round being a micro-batch of a device on
    average. The schedule is played, with stages as they are cut, or with `even` ones: then it is the bubble alone."""
    rounds, pp = _rounds(asked, layout), layout.sizes.pp
    stages = _stages(asked.shape, pp, layout.schedule, asked.run.data.seq_len)
    if even:
        stages = (1.0,) * len(stages)
    whole = pp / sum(stages)  # in rounds of a device, so that layouts which differ in their speed alone are played once
    forward_share = 1 / (3 + AGAIN[recompute])
    short = min(rounds, 4 * pp)  # beyond this every round adds as much as the slowest device takes
    played = play(
        layout.schedule,
        pp,
        short,
        [stage * whole * forward_share for stage in stages],
        [stage * whole * (1 - forward_share) for stage in stages],
    )
    slowest = max(played.busy) / short
    return played.seconds + (rounds - short) * slowest - rounds


def _rounds(asked: Asked, layout: Layout) -> int:
    """Micro-batches of a device in a step, or in a shard of it."""
    return asked.work.batch // (layout.sizes.dp * layout.micro_batch)


@lru_cache(maxsize=256)
def _stages(shape: Shape, pp: int, schedule: str, seq: int) -> tuple[float, ...]:
    """What each stage costs."""
    costs = layer_costs(shape, seq)
    return tuple(sum(costs[layer] for layer in stretch) for stretch in stretches(shape, pp, schedule, seq))


def with_layout(asked: Asked, layout: Layout, recompute: str) -> Run:
    """The run with this layout and nothing left open."""
    run, sizes = asked.run, layout.sizes
    mesh = run.mesh.model_copy(
        update={
            **{name: getattr(sizes, name) for name in Sizes.__dataclass_fields__},
            "micro_batch": layout.micro_batch,
            "schedule": layout.schedule,
            "cp_method": layout.cp_method,
            "reduce": layout.reduce,
            "recompute": recompute,
        }
    )
    device = "cpu" if asked.machine.cpu else "cuda"
    resources = run.resources.model_copy(update={"device": device, "processes": asked.island})
    windows = share(run, sizes.pp > 1).windows
    train = run.train.model_copy(update={"precision": asked.precision, "batch": windows})
    return run.model_copy(update={"mesh": mesh, "resources": resources, "train": train})
