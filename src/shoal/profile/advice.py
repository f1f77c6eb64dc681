"""One sentence: what to fix next, and what it would save at best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shoal.profile.analyse import Analysis
from shoal.profile.kernels import Kernel, short_name
from shoal.profile.kinds import ATTENTION, COMMUNICATION, COPY, DATA, ELEMENTWISE, IDLE, LOSS, MATMUL, NORM, OPTIMIZER
from shoal.profile.on_gpu import BETWEEN
from shoal.readable import percent

WORTH = 0.01  # of a step; less is no advice
FUSABLE = 0.5  # of what unfused kernels spend at the roof: their neighbours read what they wrote
_FUSED = ("triton_", "cpp_fused", "graph_")


@dataclass(frozen=True)
class Advice:
    kind: str
    saves_s: float  # a step, at best
    sentence: str


def advice(a: Analysis) -> Advice | None:
    """None where nothing would save a hundredth of a step."""
    best = max(_candidates(a), key=lambda one: one.saves_s, default=None)
    if best is None or best.saves_s < WORTH * a.step_s:
        return None
    at_best = f"at best that saves {ms(best.saves_s)} a step ({percent(best.saves_s / a.step_s, 0)})."
    return Advice(best.kind, best.saves_s, f"{best.sentence}; {at_best}")


def _candidates(a: Analysis) -> Iterator[Advice]:
    yield from (Advice(*found(a)) for found in (_idle, _data, _sent, _copied))
    for kind in (MATMUL, ATTENTION, NORM, LOSS, OPTIMIZER, ELEMENTWISE):
        if mine := [k for k in a.kernels if k.kind == kind]:
            yield _computed(a, kind, mine)


def _idle(a: Analysis) -> tuple[str, float, str]:
    seconds = a.part(IDLE).seconds
    why = next(iter(a.idle), "")
    share = percent(a.part(IDLE).share, 0)
    if not a.cuda:
        how = "a larger mesh.micro_batch makes fewer, larger operators"
        return IDLE, seconds, f"{share} of a step is {why}, where nothing computes: {how}"
    if why == BETWEEN:
        return IDLE, seconds, f"the GPU pauses for {share} of a step between kernels: CUDA graphs, or fewer kernels"
    waits = next(iter(a.waits), None)
    cause = f" (it waits for the GPU itself {a.waits[waits]:.3g} times a step, first in {waits})" if waits else ""
    how = "compiled blocks, CUDA graphs, a larger mesh.micro_batch or fewer synchronisations keep it ahead"
    return IDLE, seconds, f"the GPU idles for {share} of a step, mostly {why}{cause}: {how}"


def _data(a: Analysis) -> tuple[str, float, str]:
    how = "put the shards on a disk of this machine (data.cache_dir for remote ones)"
    return (
        DATA,
        a.part(DATA).seconds,
        f"a step waits for its batch for {percent(a.part(DATA).share, 0)} of its time: {how}",
    )


def _sent(a: Analysis) -> tuple[str, float, str]:
    part = a.part(COMMUNICATION)
    exposed, phase = part.seconds, next(iter(part.phases), "no phase")
    all_of_it = exposed + a.hidden_s
    hidden = percent(a.hidden_s / all_of_it, 0) if all_of_it else "none"
    how = "more micro-batches a step, or a mesh that sends less (`shoal plan`)"
    what = f"nothing computes while {percent(part.share, 0)} of a step is communication, mostly in {phase}"
    return COMMUNICATION, exposed, f"{what} ({hidden} of it is hidden): {how}"


def _copied(a: Analysis) -> tuple[str, float, str]:
    part = a.part(COPY)
    phase = next(iter(part.phases), "no phase")
    return (
        COPY,
        part.seconds,
        f"copies take {percent(part.share, 0)} of a step, mostly in {phase}: pin them or do without",
    )


_HOW = {
    MATMUL: "larger or rounder shapes (mesh.micro_batch), or a narrower train.precision",
    ATTENTION: "another attention kernel for this shape",
    NORM: "fuse it with what is around it",
    LOSS: "fuse it with the head, over chunks of tokens",
    OPTIMIZER: "one fused pass over parameters and gradients",
    ELEMENTWISE: "fuse them with what is around them",
}


def _computed(a: Analysis, kind: str, mine: list[Kernel]) -> Advice:
    saves = sum(k.lost_s for k in mine)
    if kind in (NORM, LOSS, ELEMENTWISE):
        saves += FUSABLE * sum(k.seconds - k.lost_s for k in mine if not k.name.startswith(_FUSED))
    saves = min(saves, a.part(kind).seconds)  # on several streams kernels overlap
    seconds = sum(k.seconds for k in mine)
    known = [k for k in mine if k.share is not None]
    at = sum(k.seconds * min(1.0, k.share or 0.0) for k in known) / (sum(k.seconds for k in known) or 1.0)
    roof = f" at {percent(at, 0)} of the roofline" if known else ""
    worst = mine[0]
    where = f"{short_name(worst.name)}{f' ({worst.shapes})' if worst.shapes else ''}"
    what = f"{kind} takes {percent(seconds / a.step_s, 0)} of a step{roof} and loses most in {where}"
    compiling = kind in (NORM, ELEMENTWISE) and a.cuda and not a.about.get("compiled")
    return Advice(kind, saves, f"{what}: {_HOW[kind]}{' (train.compile)' if compiling else ''}")


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
