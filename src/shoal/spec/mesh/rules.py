"""What an impossible mesh is: every rule that a layout breaks, each in a sentence that names the values it is about."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shoal.spec.mesh import Layout, Sizes
from shoal.spec.mixers import KINDS
from shoal.spec.run import Run
from shoal.spec.shape import Shape, shape_of
from shoal.spec.stages import micro_batches_fit, stage_count

# The dotted names that a problem is about, and a sentence without its full stop.
Broken = tuple[tuple[str, ...], str]
Rule = Callable[[Layout, "Work"], Iterator[Broken]]

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Work:
    """What a mesh is to carry."""

    shape: Shape
    seq_len: int
    batch: int
    vocab_size: int | None = None  # None until the data says it
    processes: int | None = None  # None: as many as the mesh asks for
    processes_name: str = "resources.processes"
    micro_tokens: int = 4096  # tokens that a process should compute at once, at most
    foreign: bool = False  # of its widths and layers nothing is known here, and rows of it are whole under tp

    @staticmethod
    def of(run: Run) -> Work:
        processes, fleet = run.resources.processes, run.fleet
        shards = 1 if fleet.islands == 1 or fleet.shards == "auto" else fleet.shards
        vocab = run.model.vocab_size
        return Work(
            shape=shape_of(run.model, tokenizer_vocab=64),
            seq_len=run.data.seq_len,
            batch=max(1, run.train.batch // shards),
            vocab_size=None if vocab == "auto" else vocab,
            processes=None if processes == "auto" else processes,
            foreign=run.foreign is not None,
        )


def broken(layout: Layout, work: Work) -> list[Broken]:
    """Every rule that the layout breaks; none when it can be trained."""
    return [found for rules in (FIXED, BATCH, CONTEXT, EXPERTS) for rule in rules for found in rule(layout, work)]


def _processes(layout: Layout, work: Work) -> Iterator[Broken]:
    world, given = layout.sizes.world, work.processes
    if given is not None and given != world:
        yield (
            (work.processes_name, *_said(*(name for name in AXES if getattr(layout.sizes, name) > 1))),
            f"{factors(layout.sizes)} is {world} process{'es' * (world > 1)}, but {work.processes_name} is {given}",
        )


def _tensor(layout: Layout, work: Work) -> Iterator[Broken]:
    if work.foreign:
        return  # its widths are looked at when it is laid out
    tp, shape, experts = layout.sizes.tp, work.shape, work.shape.experts
    widths = {name: width for kind in shape.mixers for name, width in KINDS[kind].widths(shape).items()}
    if experts is None or experts.dense_layers:
        widths["model.ffn_dim"] = shape.ffn_dim
    if experts is not None and experts.shared:
        # Shared experts are one wide MLP and are split as such; routed ones are dealt out whole.
        widths["model.experts.ffn_dim x shared"] = experts.ffn_dim * experts.shared
    if work.vocab_size is not None:
        widths["model.vocab_size"] = work.vocab_size
    uneven = [name for name, width in widths.items() if width % tp]
    if uneven:
        yield (
            ("mesh.tp", *(name.split(" ")[0] for name in uneven)),
            f"{_and([f'{name} {widths[name]}' for name in uneven])} cannot be split over mesh.tp {tp}",
        )


def _rotary(layout: Layout, work: Work) -> Iterator[Broken]:
    scaling = work.shape.rope_scaling
    if scaling is not None and scaling.kind == "dynamic" and layout.sizes.cp > 1:
        yield (
            ("mesh.cp", "model.rope_scaling.kind"),
            f"model.rope_scaling of kind dynamic needs the whole sequence, which mesh.cp {layout.sizes.cp} cuts",
        )


def _sequences(layout: Layout, work: Work) -> Iterator[Broken]:
    kinds = [kind for kind in work.shape.mixers if not KINDS[kind].SHARES_SEQUENCES]
    if kinds and layout.sizes.cp > 1:
        yield (
            ("mesh.cp", f"model.{kinds[0]}"),
            f"mesh.cp {layout.sizes.cp} cuts sequences, and a layer of model.{kinds[0]} needs each of them whole",
        )


def _batch(layout: Layout, work: Work) -> Iterator[Broken]:
    dp, micro = layout.sizes.dp, layout.micro_batch
    if work.batch % (dp * micro):
        what = "processes" if dp == layout.sizes.world else "data-parallel processes"
        parts = [f"{dp} {what}"] * (dp > 1) + [f"mesh.micro_batch {micro}"] * (micro > 1)
        names = ("train.batch", "mesh.micro_batch", "mesh.dp_shard", "mesh.dp_replicate", work.processes_name)
        yield names, f"train.batch {work.batch} cannot be split over {' x '.join(parts)}"


def _pipeline(layout: Layout, work: Work) -> Iterator[Broken]:
    pp, schedule = layout.sizes.pp, layout.schedule
    if pp == 1:
        if schedule != "auto":
            yield ("mesh.schedule", "mesh.pp"), f"mesh.schedule {schedule} orders a pipeline, and mesh.pp is 1"
        return
    stages = stage_count(pp, schedule)
    if work.shape.layers < stages:
        yield (
            ("mesh.pp", "mesh.schedule", "model.layers"),
            f"model.layers {work.shape.layers} are fewer than the {stages} stages of mesh.pp {pp}"
            + (f" with mesh.schedule {schedule}" if stages > pp else ""),
        )
    each, rest = divmod(work.batch, layout.sizes.dp * layout.micro_batch)
    if rest == 0 and not micro_batches_fit(each, pp, schedule):
        readers, micro = layout.sizes.dp, layout.micro_batch
        split = [f"{readers} data-parallel processes"] * (readers > 1) + [f"mesh.micro_batch {micro}"] * (micro > 1)
        yield (
            ("mesh.schedule", "mesh.pp", "mesh.micro_batch", "train.batch"),
            f"mesh.schedule {schedule} with mesh.pp {pp} needs {_needed(schedule, pp)}, and train.batch {work.batch}"
            f"{' over ' * bool(split)}{' x '.join(split)} gives {each}",
        )


def _context(layout: Layout, work: Work) -> Iterator[Broken]:
    if work.foreign:
        return
    cp, tp, ring = layout.sizes.cp, layout.sizes.tp, layout.cp_method == "ring" and layout.sizes.cp > 1
    # A ring is balanced by giving each process an early and a late piece of the sequence.
    pieces = cp * tp * (2 if ring else 1)
    if work.seq_len % pieces:
        axes = " x ".join([f"mesh.cp {cp}"] * (cp > 1) + [f"mesh.tp {tp}"] * (tp > 1) + ["2 for the ring"] * ring)
        yield (
            ("data.seq_len", "mesh.cp", "mesh.tp", "mesh.cp_method"),
            f"data.seq_len {work.seq_len} cannot be cut into {pieces} equal pieces ({axes})",
        )
    heads, kv_heads = work.shape.heads // tp, work.shape.kv_heads // tp
    if cp > 1 and layout.cp_method == "all_to_all" and (heads % cp or kv_heads % cp):
        a_process = f" that mesh.tp {tp} leaves a process" if tp > 1 else ""
        yield (
            ("mesh.cp_method", "mesh.cp", "mesh.tp", "model.kv_heads", "model.heads"),
            f"mesh.cp_method all_to_all cannot share the {heads} heads and {kv_heads} kv_heads{a_process} "
            f"over mesh.cp {cp}",
        )


def _experts(layout: Layout, work: Work) -> Iterator[Broken]:
    ep, span, experts = layout.sizes.ep, layout.sizes.span, work.shape.experts
    if experts is None:
        if ep > 1:
            yield ("mesh.ep",), f"mesh.ep {ep} shares out experts, and the model has none"
        return
    if experts.count % ep:
        yield (
            ("mesh.ep", "model.experts.count"),
            f"model.experts.count {experts.count} cannot be split over mesh.ep {ep}",
        )
        return
    if span % ep:
        over = factors(layout.sizes, ("dp_shard", "cp", "tp"))
        product = f" = {span}" if " x " in over else ""
        yield ("mesh.ep", *_said("dp_shard", "cp", "tp")), f"mesh.ep {ep} does not divide {over}{product}"
        return
    sharers, held = span // ep, experts.count // ep
    if held % sharers and experts.ffn_dim % sharers and work.shape.dim % sharers:
        yield (
            ("mesh.ep", "mesh.dp_shard", "model.experts.count"),
            f"the {sharers} processes that mesh.ep {ep} leaves to share {held} experts divide neither their number "
            f"nor model.experts.ffn_dim {experts.ffn_dim} nor model.dim {work.shape.dim}",
        )


# Each group is decided by the sizes and by values of its own, so that a search can settle them one after another.
FIXED: tuple[Rule, ...] = (_processes, _tensor, _rotary, _sequences)
BATCH: tuple[Rule, ...] = (_batch, _pipeline)  # micro_batch, schedule
CONTEXT: tuple[Rule, ...] = (_context,)  # cp_method
EXPERTS: tuple[Rule, ...] = (_experts,)  # ep


def factors(sizes: Sizes, axes: tuple[str, ...] = AXES) -> str:
    """`mesh.pp 2 x mesh.tp 4`; axes of size 1 say nothing, unless there are no others."""
    above = [f"mesh.{name} {getattr(sizes, name)}" for name in axes if getattr(sizes, name) > 1]
    return " x ".join(above) or f"mesh.{axes[0]} 1"


def _needed(schedule: str, pp: int) -> str:
    if schedule == "interleaved":
        return f"micro-batches in equal rounds of at least {pp}"
    return f"at least {pp} micro-batches a step"


def _said(*axes: str) -> tuple[str, ...]:
    return tuple(f"mesh.{name}" for name in axes)


def _and(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
