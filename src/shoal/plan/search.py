"""Every legal layout of a run on so many devices, by predicted speed.

All of them are priced at once, as columns. Those that come out best are looked at again one by one: their memory is
counted by the exact formula of Shoal's own trainer, and a pipeline's schedule is played instead of estimated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.plan.activations import block
from shoal.plan.case import Case, Cases, Plan
from shoal.plan.constants import Constants, fitted
from shoal.plan.footprint import footprint
from shoal.plan.machine import Machine
from shoal.plan.memory import MODES, Memory, memory
from shoal.plan.net import Net
from shoal.plan.schedule import play
from shoal.plan.software import Attention, Software
from shoal.plan.step import step
from shoal.spec.mesh import Layout, Sizes, divisors
from shoal.spec.mesh_rules import CONTEXT, EXPERTS, FIXED, Work
from shoal.spec.run import Run
from shoal.spec.shape import Shape
from shoal.spec.stages import layer_costs, micro_batches_fit, stage_count, stretches

# Of a device's memory, what a plan may fill: the rest is lost to fragments, contexts and libraries.
USABLE = 0.92
# What Shoal's trainer does: SDPA's kernels, FSDP2 or DDP, stages cut by cost, a loss that holds no logits.
TRAINER = Software(
    None,
    Attention.NATIVE,
    hides_tp=False,
    fused=False,
    stream_bytes=4.0,
    host=0.2,  # the loop does not wait for the device but to read the loss (benchmarks/loop_overhead.py: 0.1%)
    logit_bytes=0.0,
    balances=True,
    gathers_once=True,
)
# Passes over the stream of an eager block against a compiled one: each product makes its own copy in 16 bits.
EAGER_PASSES = 3.0
# Layouts that are looked at again one by one.
LOOKED_AT = 400
# Of these, so many that fit: the estimate puts the best of them among the first.
ENOUGH = 40
# What a pipeline waits, in the estimate, is divided by this: pieces a device, or as zbv's split backward passes do.
PIECES = {"auto": 1.0, "gpipe": 1.0, "1f1b": 1.0, "interleaved": 2.0, "zbv": 6.0}
# Of a layer's forward work, what is done again; selective: norms, activations and the last product.
AGAIN = {"none": 0.0, "selective": 0.2, "full": 1.0}


@dataclass(frozen=True)
class Found:
    """A layout with what it is predicted to take."""

    layout: Layout
    recompute: str
    parts: dict[str, float]  # seconds of a step
    memory: Memory
    budget: float  # bytes that may be filled

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.budget


@dataclass(frozen=True)
class Asked:
    """What is to be laid out, and on what."""

    run: Run
    shape: Shape
    machine: Machine
    devices: int
    constants: Constants = field(default_factory=fitted)  # of this machine where it was measured, else as fitted

    @property
    def case(self) -> Case:
        compiled = self.run.train.compile
        software = replace(TRAINER, fused=compiled, passes=1.0 if compiled else EAGER_PASSES)
        net = Net.of(self.shape)
        return Case(net, self.machine, software, Plan(), self.devices, self.run.train.batch, self.run.data.seq_len)

    @property
    def work(self) -> Work:
        return replace(Work.of(self.run), shape=self.shape, vocab_size=self.shape.vocab_size, processes=self.devices)


def search(asked: Asked, most: int = 5, c: Constants | None = None) -> list[Found]:
    """The fastest that fit, each another mesh; where none does, those that need the least memory."""
    c = c or asked.constants
    layouts, recomputes, cases = _columns(asked)
    if not layouts:
        return []
    parts = step(cases, c)
    seconds, needed = parts.total, footprint(cases).total
    budget = USABLE * asked.machine.memory
    # The estimate of memory is off by a tenth often and by a quarter now and then: what is beyond the one comes after
    # the fastest, and where none of those fits at all, the smallest may.
    beyond, smallest = needed > budget * 1.1, np.argsort(needed, kind="stable")
    found: list[Found] = []
    for order in (np.lexsort((np.where(beyond, needed, seconds), beyond)), smallest):
        for i in order[:LOOKED_AT]:
            found.append(_look_at(asked, layouts[i], recomputes[i], parts.of(i), budget))
            if sum(one.fits for one in found) >= ENOUGH:
                break
        if any(one.fits for one in found):
            break
    found.sort(key=lambda one: (not one.fits, one.seconds * _simpler(one) if one.fits else one.memory.total))
    return _different(found)[:most]


def _simpler(one: Found) -> float:
    """Of two that are predicted to be about as fast, the one with fewer axes is easier to live with."""
    s = one.layout.sizes
    return 1 + 0.005 * sum(size > 1 for size in (s.pp, s.cp, s.tp, s.dp_replicate * (s.dp_shard > 1)))


def _different(found: list[Found]) -> list[Found]:
    """The best of each mesh: one that differs in nothing but the micro-batch tells nobody anything."""
    seen: dict[Any, Found] = {}
    for one in found:
        seen.setdefault(one.layout.sizes, one)
    return list(seen.values())


def priced(asked: Asked, layout: Layout, recompute: str, c: Constants | None = None) -> Found:
    """One layout that somebody else has chosen."""
    parts = step(_cases(asked, [layout], [recompute]), c or asked.constants)
    return _look_at(asked, layout, recompute, parts.of(0), USABLE * asked.machine.memory)


def _columns(asked: Asked) -> tuple[list[Layout], list[str], Cases]:
    layouts: list[Layout] = []
    recomputes: list[str] = []
    modes = MODES if asked.run.mesh.recompute == "auto" else (asked.run.mesh.recompute,)
    for layout in _layouts(asked):
        layouts += [layout] * len(modes)
        recomputes += modes
    return layouts, recomputes, _cases(asked, layouts, recomputes) if layouts else Cases.of([asked.case])


def _cases(asked: Asked, layouts: list[Layout], recomputes: list[str]) -> Cases:
    sizes = [layout.sizes for layout in layouts]
    batch, experts = asked.work.batch, asked.shape.experts is not None
    # Experts are shared by all that hold other tokens, tensor parallelism's devices too.
    sharded = np.array([s.dp_shard * s.cp > 1 or 1 < s.dp * s.cp < s.world or (s.span > 1 and experts) for s in sizes])
    columns: dict[str, npt.NDArray[Any]] = {
        **{name: np.array([getattr(s, name) for s in sizes], dtype=float) for name in ("tp", "pp", "cp", "ep")},
        "chunks": np.array([PIECES[layout.schedule] for layout in layouts]),
        "zero": np.where(sharded, 3.0, 0.0),
        "shard": np.array([s.dp_shard * s.cp for s in sizes], dtype=float),
        "micro_batch": np.array([layout.micro_batch for layout in layouts], dtype=float),
        "under_way": np.array([_under_way(layout, batch) for layout in layouts]),
        "recompute": np.array([AGAIN[mode] for mode in recomputes]),
        "dropped": np.array([AGAIN[mode] for mode in recomputes]),
        "kept": _kept(asked, layouts, recomputes),
    }
    return Cases.spread(asked.case, columns)


def _under_way(layout: Layout, batch: int) -> float:
    """Micro-batches that a device holds at most, in whole stages: as shoal.plan.schedule plays them."""
    pp, rounds = layout.sizes.pp, batch // (layout.sizes.dp * layout.micro_batch)
    most = {"gpipe": rounds, "interleaved": (3 * pp - 1) / 2}.get(layout.schedule, pp)
    return float(min(rounds, most))


def _kept(asked: Asked, layouts: list[Layout], recomputes: list[str]) -> npt.NDArray[np.float64]:
    """Bytes a token and layer, on average over the layers, by the trainer's own formula: it knows few kinds."""

    @cache
    def of(tp: int, cp: int, method: str, sharded: bool, mode: str) -> float:
        sizes = Sizes(dp_shard=2 if sharded else 1, cp=cp, tp=tp)
        run = _run(asked, Layout(sizes, 1, "auto", method), mode)
        layers = asked.shape.layers
        tokens = asked.run.data.seq_len / cp
        sparse = sum(asked.shape.sparse(layer) for layer in range(layers))
        ends = block(run, asked.shape, 0).of(mode), block(run, asked.shape, layers - 1).of(mode)
        return (ends[0] * (layers - sparse) + ends[1] * sparse) / layers / tokens if sparse else ends[1] / tokens

    def one(layout: Layout, mode: str) -> float:
        s = layout.sizes
        return of(s.tp, s.cp, layout.cp_method, s.dp_shard > 1, mode)

    return np.array([one(layout, mode) for layout, mode in zip(layouts, recomputes, strict=True)])


def _layouts(asked: Asked) -> Iterator[Layout]:
    """All that the named values of the run file allow, and the rules of a mesh."""
    mesh, shape, devices = asked.run.mesh, asked.shape, asked.devices
    batch, seq = asked.work.batch, asked.run.data.seq_len

    def allowed(name: str, values: list[int]) -> list[int]:
        named = getattr(mesh, name)
        return values if named == "auto" else [v for v in values if v == named]

    heads = math.gcd(shape.heads, shape.kv_heads)
    # Beyond a domain of fast links tensor parallelism is looked at only where somebody asks for it.
    widest = asked.machine.domain if mesh.tp == "auto" else devices
    tps = allowed("tp", [t for t in divisors(heads) if devices % t == 0 and t <= widest])
    work = asked.work
    for tp, pp in itertools.product(tps, allowed("pp", [p for p in divisors(devices) if p <= shape.layers])):
        if devices % (tp * pp):
            continue
        for cp in allowed("cp", [n for n in divisors(devices // (tp * pp)) if seq % (n * tp) == 0]):
            dp = devices // (tp * pp * cp)
            if batch % dp:
                continue
            for shard in allowed("dp_shard", divisors(dp)):
                if mesh.dp_replicate not in ("auto", dp // shard):
                    continue
                for ep in _expert_groups(asked, shard * cp * tp):
                    sizes = Sizes(pp, dp // shard, shard, cp, tp, ep)
                    yield from _orders(asked, work, sizes, batch // dp)


def _expert_groups(asked: Asked, span: int) -> list[int]:
    experts, named = asked.shape.experts, asked.run.mesh.ep
    if experts is None:
        return [1]
    groups = [n for n in divisors(experts.count) if span % n == 0]
    return groups if named == "auto" else [n for n in groups if n == named]


def _orders(asked: Asked, work: Work, sizes: Sizes, each: int) -> Iterator[Layout]:
    """Micro-batches, schedules and ways of context parallelism, `each` being the windows of a data-parallel process."""
    mesh, layers = asked.run.mesh, asked.shape.layers
    ways = ("all_to_all", "ring") if mesh.cp_method == "auto" else (mesh.cp_method,)
    bare = [Layout(sizes, 1, "auto", way) for way in (ways if sizes.cp > 1 else (mesh.cp_method,))]
    rules = (*FIXED, *CONTEXT, *EXPERTS)  # those of the batch and the pipeline are kept below
    legal = [layout for layout in bare if not any(found for rule in rules for found in rule(layout, work))]
    schedules: tuple[str, ...] = (mesh.schedule,)
    if sizes.pp == 1 and mesh.schedule != "auto":  # who names one wants a pipeline
        schedules = ()
    elif sizes.pp > 1 and mesh.schedule == "auto":
        schedules = ("1f1b", "interleaved", "zbv")
    micros = divisors(each) if mesh.micro_batch == "auto" else [mesh.micro_batch]
    for micro, schedule in itertools.product(micros, schedules):
        if each % micro or (sizes.pp > 1 and not micro_batches_fit(each // micro, sizes.pp, schedule)):
            continue
        if stage_count(sizes.pp, schedule) <= layers:
            yield from (replace(layout, micro_batch=micro, schedule=schedule) for layout in legal)


def _look_at(asked: Asked, layout: Layout, recompute: str, parts: dict[str, float], budget: float) -> Found:
    if layout.sizes.pp > 1:
        parts["pipeline"] = _played(asked, layout, recompute, parts)
    return Found(layout, recompute, parts, memory(_run(asked, layout, recompute), asked.shape), budget)


def _played(asked: Asked, layout: Layout, recompute: str, parts: dict[str, float]) -> float:
    """Seconds that the pipeline adds to what devices compute: the schedule is played, with stages as they are cut."""
    rounds, pp = asked.work.batch // (layout.sizes.dp * layout.micro_batch), layout.sizes.pp
    busy = ("products", "attention", "elementwise", "loss", "recompute", "tensor", "context", "experts")
    a_round = sum(parts[name] for name in busy) / rounds  # of one device, on average
    seq = asked.run.data.seq_len
    costs = layer_costs(asked.shape, seq)
    stages = [sum(costs[layer] for layer in stretch) for stretch in stretches(asked.shape, pp, layout.schedule, seq)]
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
    return (played.seconds + (rounds - short) * slowest - rounds) * a_round


def _run(asked: Asked, layout: Layout, recompute: str) -> Run:
    """The run with this layout and nothing left open."""
    run, sizes = asked.run, layout.sizes
    mesh = run.mesh.model_copy(
        update={
            **{name: getattr(sizes, name) for name in Sizes.__dataclass_fields__},
            "micro_batch": layout.micro_batch,
            "schedule": layout.schedule,
            "cp_method": layout.cp_method,
            "recompute": recompute,
        }
    )
    resources = run.resources.model_copy(update={"device": "cuda", "processes": asked.devices})
    train = run.train.model_copy(update={"precision": "bf16"})
    return run.model_copy(update={"mesh": mesh, "resources": resources, "train": train})
