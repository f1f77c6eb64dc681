"""Closes the mesh: how many processes, and how the model is laid over them. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shoal import shared_gpu
from shoal.decide.decision import Choices
from shoal.decide.plan import Planned, planned
from shoal.errors import SetupError, SpecError
from shoal.spec.mesh import Layout, Sizes
from shoal.spec.mesh.refusal import refusal, words
from shoal.spec.mesh.rules import Work
from shoal.spec.mesh.search import SHARD_ABOVE_PARAMS, closed, nearest
from shoal.spec.run import Mesh, Run
from shoal.spec.shape import Shape

if TYPE_CHECKING:
    from shoal.plan.documents import Documents

# Tokens one process computes at once, by rule: enough to keep matmuls busy, small enough for the activations. On a GPU
# that the planner knows it decides, by memory and speed.
MICRO_TOKENS = {"cpu": 4096, "cuda": 16384}


def close_mesh(
    run: Run,
    shape: Shape,
    device: str,
    room: int,
    world: int | None,
    choices: Choices,
    folders: Sequence[Path] = (),
    documents: Callable[[], Documents | None] = lambda: None,
) -> Layout:
    """The layout of the run. `room` is how many processes suit this machine; `world` is set when they are started
    already. Refuses in a sentence what cannot be laid out. GPUs are laid out by the planner (`folders` describe those
    that the catalogue does not know, `documents` asks the data); rules decide on processors, and where it knows no
    answer."""
    work = replace(Work.of(run), shape=shape, vocab_size=shape.vocab_size, micro_tokens=MICRO_TOKENS[device])
    if world is not None:
        work = replace(work, processes=world, processes_name="WORLD_SIZE")
    elif work.processes is None:
        work = replace(work, processes=_processes(run, work, device, room, choices))
    best = None
    if device == "cuda" and work.processes is not None and run.unplanned is None:
        best = planned(run, shape, work.processes, folders, documents())
    layout = _layout(run.mesh, work) if best is None else best.layout
    if device == "cuda" and world is None and layout.sizes.world > room and not shared_gpu.sharing():
        fewer = nearest(run.mesh, replace(work, processes=room))
        raise SetupError(
            f"{layout.sizes.world} processes need a GPU each, and {room} are visible here: the nearest mesh that works "
            f"on them {words(fewer, run.mesh)}."
        )
    if best is None:
        _explain(run, work, layout, device, choices)
    else:
        _explain_planned(run.mesh, best, choices)
    return layout


def closed_mesh(mesh: Mesh, layout: Layout) -> Mesh:
    """What orders a pipeline or joins a shared sequence stays open where there is none."""
    sizes = {name: getattr(layout.sizes, name) for name in layout.sizes.__dataclass_fields__}
    beside = {name: getattr(layout, name) for name in ("micro_batch", "schedule", "cp_method", "reduce")}
    return mesh.model_copy(update={**sizes, **beside})


def _layout(mesh: Mesh, work: Work) -> Layout:
    layout = closed(mesh, work)
    if layout is None:
        found = refusal(mesh, work)
        assert found is not None  # what cannot be closed is refused
        raise SpecError(f"{found[1]}.")
    return layout


def _processes(run: Run, work: Work, device: str, room: int, choices: Choices) -> int:
    """As many as there is room for; more where the mesh asks for more."""
    least = _layout(run.mesh, work).sizes
    what = {"cpu": "core", "cuda": "GPU"}[device] + "s" * (room > 1)
    world, why = least.world, f"the mesh asks for {least.world}" + (f", on {room} {what}" if least.world > room else "")
    if "auto" in (run.mesh.dp_replicate, run.mesh.dp_shard):
        why = f"{room} {what}, batch {work.batch}"
        # More of them read data; nothing else is spread that nobody asked to spread.
        mesh = run.mesh.model_copy(update={name: getattr(least, name) for name in ("pp", "cp", "tp")})
        counts = range(room // least.world * least.world, 0, -least.world)
        world = next((n for n in counts if closed(mesh, replace(work, processes=n))), least.world)
        if world > room:
            why = f"the mesh asks for {world}, on {room} {what}"
    return choices.choose("resources.processes", "auto", world, why)


def _explain_planned(mesh: Mesh, best: Planned, choices: Choices) -> None:
    values = {name: getattr(best.layout.sizes, name) for name in Sizes.__dataclass_fields__}
    values |= {name: getattr(best.layout, name) for name in ("micro_batch", "schedule", "cp_method", "reduce")}
    for name, value in values.items():
        if value not in (1, "auto", "step") or name == "micro_batch":
            why = best.why_micro_batch if name == "micro_batch" else best.why
            choices.choose(f"mesh.{name}", getattr(mesh, name), value, why)


def _explain(run: Run, work: Work, layout: Layout, device: str, choices: Choices) -> None:
    """Records each value that was left open and now says something; axes of size 1 do not."""
    mesh, sizes, shape = run.mesh, layout.sizes, work.shape
    for name in ("pp", "cp", "tp"):
        if getattr(sizes, name) > 1:
            why = f"the other axes leave {getattr(sizes, name)} of {sizes.world} processes"
            if name == "pp" and mesh.schedule != "auto":
                why = f"mesh.schedule {mesh.schedule} asks for a pipeline"
            choices.choose(f"mesh.{name}", getattr(mesh, name), getattr(sizes, name), why)
    _explain_data_parallel(mesh, work, layout, choices)
    if shape.experts is not None:
        why = f"the most that divides {shape.experts.count} experts and dp_shard x cp x tp = {sizes.span}"
        choices.choose("mesh.ep", mesh.ep, sizes.ep, why)
    if sizes.cp > 1:
        heads = f"{shape.kv_heads // sizes.tp} kv_heads"
        why = f"its {heads} divide by cp {sizes.cp}, and what it sends does not grow with it"
        if layout.cp_method == "ring":
            why = f"{heads} do not divide by cp {sizes.cp}"
        choices.choose("mesh.cp_method", mesh.cp_method, layout.cp_method, why)
    each = work.batch // sizes.dp
    count = each // layout.micro_batch
    if sizes.pp > 1:
        why = f"{count} micro-batches fill {sizes.pp} stages, and it holds the fewest of them at a time"
        if layout.schedule == "gpipe":
            why = f"{count} micro-batches are too few for 1f1b on {sizes.pp} stages"
        choices.choose("mesh.schedule", mesh.schedule, layout.schedule, why)
    why = f"the most windows of a process's {each} that stay within {work.micro_tokens} tokens"
    if sizes.pp > 1:
        why = f"{count} micro-batches for a pipeline of {sizes.pp}, each within {work.micro_tokens} tokens"
    choices.choose("mesh.micro_batch", mesh.micro_batch, layout.micro_batch, why)


def _explain_data_parallel(mesh: Mesh, work: Work, layout: Layout, choices: Choices) -> None:
    sizes, big = layout.sizes, work.shape.params > SHARD_ABOVE_PARAMS
    by_replicate = f"{sizes.dp} data-parallel processes by dp_replicate {sizes.dp_replicate}"
    by_shard = f"{sizes.dp} data-parallel processes by dp_shard {sizes.dp_shard}"
    if sizes.dp == 1:
        by_replicate = by_shard = "one data-parallel process"
    elif mesh.dp_replicate == "auto" and mesh.dp_shard == "auto":
        why = "sharded to save memory (FSDP2)" if big else "small enough to replicate (DDP)"
        if not big and sizes.dp_shard > 1:
            why = f"mesh.ep {sizes.ep} needs processes that share a copy"
        by_replicate = f"{work.shape.params:,} parameters: {why}"
    choices.choose("mesh.dp_shard", mesh.dp_shard, sizes.dp_shard, by_replicate)
    choices.choose("mesh.dp_replicate", mesh.dp_replicate, sizes.dp_replicate, by_shard)
