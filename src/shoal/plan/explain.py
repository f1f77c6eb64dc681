"""Says why: what the winner does better than the next one, what would change the answer, what would make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shoal.plan.asked import Asked
from shoal.plan.island_costs import shards
from shoal.plan.search import Found, search
from shoal.spec import eight_bits
from shoal.spec.mesh import ONLY_FSDP_SCATTERS, Layout
from shoal.spec.mesh.refusal import refusal
from shoal.spec.run import Run

# Of a parameter, however it is laid out: float32 weights and two moments, spread over all devices.
LEAST_BYTES = 12
# What a part of a step is called in a sentence.
CALLED = {
    "products": "matrix products",
    "attention": "attention",
    "elementwise": "norms and activations",
    "loss": "the head and the loss",
    "recompute": "recomputing",
    "tensor": "tensor-parallel traffic",
    "context": "context-parallel traffic",
    "experts": "expert traffic",
    "pipeline": "waiting in the pipeline",
    "handover": "handing on in the pipeline",
    "data": "data-parallel traffic",
    "islands": "trading with other islands",
    "update": "the optimizer",
    "host": "launching a step",
    "waiting": "waiting for the slowest",
}


def words(layout: Layout, recompute: str) -> str:
    """A layout as a run file would name it."""
    s = layout.sizes
    axes = [(name, getattr(s, name)) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")]
    named = [f"{name} {size}" for name, size in axes if size > 1] or ["one device"]
    named.append(f"micro_batch {layout.micro_batch}")
    if s.pp > 1:
        named.append(layout.schedule)
    if s.cp > 1:
        named.append(layout.cp_method)
    if layout.reduce == "micro_batch":
        named.append("reduce micro_batch")
    return ", ".join([*named, f"recompute {recompute}"])


def against(best: Found, other: Found) -> str:
    """Why the first is faster than the second: the parts that differ most, as shares of a step."""
    gain = other.seconds / best.seconds - 1
    differ = {name: (other.parts.get(name, 0.0) - part) / best.seconds for name, part in best.parts.items()}
    for_it = sorted((item for item in differ.items() if item[1] > 0.002), key=lambda item: -item[1])[:2]
    on_it = sorted((item for item in differ.items() if item[1] < -0.002), key=lambda item: item[1])[:2]
    how = f"{gain:.1%} faster than" if gain > 0 else f"simpler, at {-gain:.1%} less speed, than"
    text = f"{'as fast as' if abs(gain) < 0.0005 else how} {words(other.layout, other.recompute)}"
    if for_it:
        text += ": " + " and ".join(f"{share:.1%} of a step less {CALLED[name]}" for name, share in for_it)
    if on_it:
        text += (", against " if for_it else ": in spite of ") + " and ".join(
            f"{-share:.1%} more {CALLED[name]}" for name, share in on_it
        )
    return text + "."


def changes(asked: Asked, best: Found) -> Iterator[str]:
    """What would change the answer: the same search with one thing other than it is."""
    m = asked.machine
    tried = [("twice the memory", replace(asked, machine=replace(m, memory=2 * m.memory)))]
    if asked.devices > m.domain:
        tried += [
            ("twice the network between nodes", replace(asked, machine=replace(m, nic=2 * m.nic))),
            ("half the network between nodes", replace(asked, machine=replace(m, nic=m.nic / 2))),
        ]
    tried.append(("twice the batch", replace(asked, run=_with(asked, batch=2 * asked.run.train.batch))))
    if not asked.compiled and not m.cpu:  # a processor gains nothing by it (shoal.decide.auto)
        tried.append(("train.compile", replace(asked, run=_with(asked, compile=True))))
    if asked.run.fleet.islands > 1:
        alone = asked.run.fleet.model_copy(update={"islands": 1, "shards": "auto", "deterministic": False})
        tried.append(("fleet.islands 1", replace(asked, run=asked.run.model_copy(update={"fleet": alone}))))
    for what, other in tried:
        found = search(other, 1)
        if not found or not found[0].fits:
            continue
        scale = other.run.train.batch / asked.run.train.batch
        gain = best.seconds * scale / found[0].seconds - 1
        same = found[0].layout.sizes == best.layout.sizes and found[0].recompute == best.recompute
        then = "the same layout" if same else words(found[0].layout, found[0].recompute)
        yield f"{what}: {gain:+.1%} tokens/s with {then}"


def no_layout(asked: Asked) -> str:
    """Why none is legal, by the rules that refuse it: of 8 bits, of the mesh, of the batch's shards."""
    run, mesh = asked.run, asked.run.mesh
    if asked.precision == "fp8" and (wrong := eight_bits.problem(asked.shape, mesh.tp not in ("auto", 1))):
        return wrong
    if mesh.reduce == "micro_batch":
        free = mesh.model_copy(update={"reduce": "auto"})
        if search(replace(asked, run=run.model_copy(update={"mesh": free})), 1):
            return ONLY_FSDP_SCATTERS
    head = f"no layout of {asked.island:,} devices{' an island' * (run.fleet.islands > 1)} can train this run"
    batch, islands = run.train.batch, run.fleet.islands
    if shards(run) is None:
        return (
            f"{head}: train.batch {batch} cannot be cut into shards for {islands} islands; make it a multiple of them."
        )
    if found := refusal(mesh, replace(asked.work, processes_name="--devices")):
        return f"{head} ({asked.machine.name}): {found[1]}."
    return (
        f"{head} ({asked.machine.name}): train.batch {batch} cannot be shared out to them; take another number of "
        "devices (--devices), another machine (--on) or another batch, or leave values of the mesh open."
    )


def make_it_fit(asked: Asked, least: Found) -> str:
    """The cheapest change that fits: named values of the run file set free, then more devices."""
    need, have = least.memory.total / 1e9, least.budget / 1e9
    head = (
        f"no layout fits: the smallest ({words(least.layout, least.recompute)}) needs {need:,.0f} GB a device at "
        f"{least.memory.moment}, and {have:,.0f} GB can be filled"
    )
    free = asked.run.mesh.model_copy(update=dict.fromkeys(type(asked.run.mesh).model_fields, "auto"))
    for times in (1, 2, 4, 8, 16, 32, 64):
        other = replace(asked, devices=asked.devices * times, run=asked.run.model_copy(update={"mesh": free}))
        if LEAST_BYTES * asked.shape.params > other.island * least.budget:
            continue
        found = search(other, 1)
        if found and found[0].fits:
            who = "with the mesh left open," if times == 1 else f"{other.devices:,} devices do, with"
            return f"{head}; {who} {words(found[0].layout, found[0].recompute)}{' does' * (times == 1)}."
    return f"{head}; take a device with more memory, or a smaller model."


def _with(asked: Asked, **train: object) -> Run:
    return asked.run.model_copy(update={"train": asked.run.train.model_copy(update=train)})
