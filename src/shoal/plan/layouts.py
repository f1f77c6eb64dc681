"""Every layout of a run on so many devices that can be trained, and that keeps what the run file names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from shoal.plan.asked import Asked
from shoal.plan.island_costs import shards
from shoal.spec import eight_bits
from shoal.spec.mesh import Layout, Sizes, divisors
from shoal.spec.mesh.rules import CONTEXT, EXPERTS, FIXED, Work
from shoal.spec.mixers import widest_tp
from shoal.spec.run import Mesh
from shoal.spec.stages import micro_batches_fit, stage_count


def layouts(asked: Asked) -> Iterator[Layout]:
    """All that the named values of the run file allow, and the rules of a mesh."""
    mesh, shape, devices, islands = asked.run.mesh, asked.shape, asked.island, asked.run.fleet.islands
    batch, seq = asked.work.batch, asked.run.data.seq_len
    if asked.devices % islands or shards(asked.run) is None:
        return

    def allowed(name: str, values: list[int]) -> list[int]:
        named = getattr(mesh, name)
        return values if named == "auto" else [v for v in values if v == named]

    # Beyond a domain of fast links tensor parallelism is looked at only where somebody asks for it.
    widest = asked.machine.domain if mesh.tp == "auto" else devices
    if asked.precision == "fp8":
        if eight_bits.problem(shape, tensor_parallel=False):
            return
        widest = 1  # what is split over several is not computed in 8 bits yet
    tps = allowed("tp", [t for t in divisors(widest_tp(shape)) if devices % t == 0 and t <= widest])
    work = asked.work
    for tp, pp in itertools.product(tps, allowed("pp", [p for p in divisors(devices) if p <= shape.layers])):
        if devices % (tp * pp):
            continue
        for cp in allowed("cp", [n for n in divisors(devices // (tp * pp)) if seq % (n * tp) == 0]):
            dp = devices // (tp * pp * cp)
            if batch % dp:
                continue
            for shard in allowed("dp_shard", divisors(dp)):
                if mesh.dp_replicate not in ("auto", dp // shard) or (islands > 1 and shard < dp):
                    continue  # islands are copies already
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
        schedules = tuple(name for name in ("1f1b", "interleaved", "zbv") if name not in asked.without)
    micros = divisors(each) if mesh.micro_batch == "auto" else [mesh.micro_batch]
    for micro, schedule in itertools.product(micros, schedules):
        if each % micro or (sizes.pp > 1 and not micro_batches_fit(each // micro, sizes.pp, schedule)):
            continue
        if stage_count(sizes.pp, schedule) <= layers:
            for layout, reduce in itertools.product(legal, reduces(mesh, sizes, each // micro)):
                yield Layout(sizes, micro, schedule, layout.cp_method, reduce)


def reduces(mesh: Mesh, sizes: Sizes, micro_batches: int) -> tuple[str, ...]:
    """When gradients are summed up: once a step, and where memory is scarce with each of several micro-batches."""
    if not sizes.reduces_by_micro_batch:
        return ("auto",) if mesh.reduce != "micro_batch" else ()
    if mesh.reduce != "auto":
        return (mesh.reduce,)
    return ("step", "micro_batch") if micro_batches > 1 else ("step",)
