"""Axes that talk in every layer, and the links they talk over; and widths that keep tensor parallelism narrow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shoal.plan.explain import words
from shoal.plan.review.finding import Finding, Severity, costing, percent, traffic_costing
from shoal.plan.review.subject import Subject
from shoal.readable import size
from shoal.spec.mesh import Layout, Sizes
from shoal.spec.mesh.rules import FIXED, Broken
from shoal.spec.shape import Shape, round_up


def tensor_over_nodes(s: Subject) -> Iterator[Finding]:
    tp, domain, share = s.sizes.tp, s.asked.machine.domain, s.part("tensor")
    if tp == 1 or domain % tp == 0 or s.asked.island <= domain:
        return
    yield Finding(
        costing(share) or Severity.NOTE,
        "tensor-over-nodes",
        ("mesh.tp",),
        f"mesh.tp {tp} does not stay inside the {domain} devices that fast links join: its traffic, in every layer and "
        f"behind no other work, goes over the network and takes {percent(share)} of a step.",
        f"A mesh.tp that divides {domain}.",
        share,
    )


def sequence_traffic(s: Subject) -> Iterator[Finding]:
    share, cp, tp, named = s.part("context"), s.sizes.cp, s.sizes.tp, s.run.mesh.cp != "auto"
    severity = traffic_costing(share, named)
    if cp == 1 or severity is None:
        return
    where = "over the network" if cp * tp > s.asked.machine.domain else "inside a node"
    yield Finding(
        severity,
        "sequence-traffic",
        ("mesh.cp", "mesh.cp_method", "data.seq_len"),
        f"mesh.cp {cp} ({s.layout.cp_method}) leaves {s.run.data.seq_len // cp:,} tokens of data.seq_len "
        f"{s.run.data.seq_len:,} to a process; what its processes send each other {where} in every layer takes "
        f"{percent(share)} of a step.",
        f"{'A smaller mesh.cp where the memory allows it' if named else 'No mesh.cp is faster'}; longer sequences hide "
        "more of it.",
        share,
    )


def narrow_heads(s: Subject) -> Iterator[Finding]:
    """Where wider tensor parallelism would be faster, but a width does not divide. Heads are not copied here, as some
    trainers do with those of keys and values."""
    if s.run.mesh.tp != "auto" or s.asked.precision == "fp8":
        return
    room = min(s.asked.machine.domain, s.asked.island)
    wide = 1 << (room.bit_length() - 1)
    faults = _unsplit(s, wide)
    if wide == 1 or not faults:
        return
    legal = max(tp for tp in _powers(wide) if not _unsplit(s, tp))
    if s.sizes.tp < legal:
        return  # it has more room than it uses
    shape = _splittable(s.shape, wide)
    other = s.best(shape=shape)
    if other is None or other.layout.sizes.tp <= legal:
        return
    gain = s.gain_of_shape(shape, other)
    severity = costing(gain)
    if severity is not None:
        names = {name: value for name, value in _widths(shape).items() if value != _widths(s.shape)[name]}
        yield Finding(
            severity,
            "narrow-heads",
            tuple(f"model.{name}" for name in names),
            f"{faults[0][1]}, so mesh.tp ends at {legal} of the {room} devices that fast links join; a model that can "
            f"be split over {wide} would compute {percent(gain)} more per second "
            f"({words(other.layout, other.recompute)}).",
            f"{' and '.join(f'model.{name} {value:,}' for name, value in names.items())}.",
            gain,
        )


def islands_apart(s: Subject) -> Iterator[Finding]:
    share, islands = s.part("islands"), s.run.fleet.islands
    severity = costing(share)
    if islands > 1 and severity is not None:
        yield Finding(
            severity,
            "islands-traffic",
            ("fleet.islands",),
            f"{islands} islands trade {size(s.found.traded_bytes)} of gradients per device after every step; "
            f"nothing hides it, and it takes {percent(share)} of a step.",
            "Fewer islands of more devices each, or a larger train.batch; islands are worth it for what failures cost "
            "(`shoal plan goodput`).",
            share,
        )


def _unsplit(s: Subject, tp: int) -> list[Broken]:
    """What the mesh's own rules say of so wide a split."""
    work = replace(s.asked.work, processes=None)
    return [fault for rule in FIXED for fault in rule(Layout(Sizes(tp=tp)), work)]


def _powers(most: int) -> list[int]:
    return [1 << n for n in range(most.bit_length())]


def _widths(shape: Shape) -> dict[str, int]:
    return {name: getattr(shape, name) for name in ("heads", "kv_heads", "ffn_dim", "vocab_size")}


def _splittable(shape: Shape, tp: int) -> Shape:
    """The nearest shape above that divides."""
    up = {name: round_up(value, tp) for name, value in _widths(shape).items()}
    if up["heads"] % up["kv_heads"]:
        up["kv_heads"] = up["heads"]
    if shape.experts is not None and shape.experts.shared:
        experts = shape.experts.model_copy(update={"ffn_dim": round_up(shape.experts.ffn_dim, tp)})
        shape = replace(shape, experts=experts)
    return replace(
        shape, heads=up["heads"], kv_heads=up["kv_heads"], ffn_dim=up["ffn_dim"], vocab_size=up["vocab_size"]
    )
