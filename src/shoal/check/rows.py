"""What a check compares, each as one row: how far apart two ways are, whether that is near enough, else likely why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shoal.check.jobs import ROWS, WHOLE
from shoal.check.trained import Trained
from shoal.spec.run import Run


@dataclass(frozen=True)
class Bars:
    """The largest relative difference that rounding makes: on the first step, whose weights are the same, and on later
    ones, where an optimizer may have made more of it (of a sign, say)."""

    loss: float
    norm: float
    moved: float  # how far the weights went, which a low rate hides from the loss
    later: float  # times as much, of loss and norm


FLOAT32 = Bars(2e-5, 1e-4, 1e-2, 10.0)
SIXTEEN_BITS = Bars(2e-2, 1e-1, 1e-1, 2.0)
COMPARED = {
    "repeat": "two runs of the same file",
    "resume": "stopped half-way and resumed",
    "dp_shard": "one process and two, mesh.dp_shard=2",
    "dp_replicate": "one process and two, mesh.dp_replicate=2",
    "accumulation": "the batch at once, and mesh.micro_batch=1",
    "gradients": "every parameter learns",
}
MOST_NAMED = 3


@dataclass(frozen=True)
class Row:
    name: str
    compared: str
    passed: bool
    found: str
    why: str = ""  # of one that failed; or what should be known of one that passed
    loss: float | None = None  # the largest relative differences
    norm: float | None = None
    moved: float | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Apart:
    loss: float
    norm: float
    moved: float
    first: int  # the first step that is not bitwise the same; 0: all are
    ratio: float  # of the losses of the first step
    within: bool

    @classmethod
    def of(cls, a: Trained, b: Trained, bars: Bars) -> _Apart:
        steps = sorted({*a.losses} & {*b.losses})
        pairs = {s: (_apart(a.losses[s], b.losses[s]), _apart(a.norms[s], b.norms[s])) for s in steps}
        moved = _moved_apart(a, b)
        wider = {s: 1.0 if s == steps[0] else bars.later for s in steps}
        return cls(
            max(loss for loss, _ in pairs.values()),
            max(norm for _, norm in pairs.values()),
            moved,
            next((s for s in steps if (a.losses[s], a.norms[s]) != (b.losses[s], b.norms[s])), 0),
            b.losses[steps[0]] / a.losses[steps[0]] if a.losses[steps[0]] else 1.0,
            moved <= bars.moved
            and all(x <= bars.loss * wider[s] and y <= bars.norm * wider[s] for s, (x, y) in pairs.items()),
        )


def bars_of(run: Run) -> Bars:
    return FLOAT32 if run.train.precision == "fp32" else SIXTEEN_BITS


def rows(run: Run, trained: Mapping[str, Trained], wanted: Iterable[str] = tuple(ROWS)) -> list[Row]:
    """`run`: as the check trains it (`shoal.check.jobs`); those of its ways that `wanted` needs were trained, and the
    first of them to its end."""
    found: list[Row] = []
    for name in wanted:
        found.append(_row(name, run, trained, {row.name for row in found if not row.passed}))
    return found


def _row(name: str, run: Run, trained: Mapping[str, Trained], failed: set[str]) -> Row:
    whole, compared = trained[WHOLE], COMPARED[name]
    if name == "gradients":
        return _gradients(whole)
    other = trained[ROWS[name][1]]
    if not other.done:
        said = other.words.removeprefix("shoal: ") or f"exit code {other.code}."
        if whole.learning is not None and whole.learning.without:
            said = f"{said.rstrip('.')}; parameters without a gradient are a likely cause: see the last line."
        return Row(name, compared, False, "the second run failed", said)
    if name == "resume" and not 0 < other.resumed_from < max(whole.losses):
        return Row(
            name, compared, False, "it was not stopped", "the run ended without being resumed; try more --steps."
        )
    apart = _Apart.of(whole, other, bars_of(run))
    exact = name in ("repeat", "resume")
    same = exact and not apart.first and whole.digest == other.digest
    # Some kernels of a GPU add up in an order of their own.
    passed = same or (apart.within and (not exact or run.resources.device != "cpu"))
    text = f"loss {apart.loss:.0e}, norm {apart.norm:.0e}"
    text += "" if name == "resume" else f", weights {apart.moved:.0e}"
    text = "equal bits" if same else text
    why = "" if passed else _why(name, run, trained, apart, failed)
    return Row(name, compared, passed, text, why, apart.loss, apart.norm, apart.moved)


def _why(name: str, run: Run, trained: Mapping[str, Trained], apart: _Apart, failed: set[str]) -> str:
    if name == "repeat":
        return (
            "something random is not drawn by torch's generator, which every step seeds (Python's `random`, numpy, the "
            "time, the order of a set?), or is kept outside the run: draw it with torch."
        )
    if "repeat" in failed:
        return "this follows from the first line: what is not the same twice cannot be compared; mend that first."
    if name == "resume":
        step = f"from step {apart.first} on" if apart.first else "in the last weights"
        return (
            f"the runs differ {step}, after the resume at step {trained['resumed'].resumed_from}: something is kept "
            "where no checkpoint finds it; keep it in state() and load() of a hook, in `self.state[parameter]` of an "
            "optimizer, in a buffer of the block, or make it a function of the step."
        )
    parts = {"accumulation": run.train.batch}.get(name, 2)
    if 0.75 * parts < apart.ratio < 1.33 * parts:
        return (
            f"in {parts} parts the loss is {apart.ratio:.2f} times as large: the objective gives a mean of each part "
            'where the sum over its targets is asked for; use reduction="sum", and let `count` say what divides it.'
        )
    if (told := trained[WHOLE].learning) is not None and told.draws:
        return (
            "the steps draw random numbers (dropout?), and other processes and micro-batches draw others: set that to "
            "0 for the check, for instance by own.settings."
        )
    if name == "accumulation":
        return (
            "the loss of some windows depends on which others are computed with them: the objective or the block "
            "couples the rows of a micro-batch (a mean, a maximum or a normalisation over the batch?); a sum over "
            "targets adds up for any split."
        )
    if "accumulation" in failed or _differs(trained, "accumulated", run):
        return (
            "this follows from the line on accumulation: what depends on the split cannot be the same on two processes."
        )
    if name == "dp_shard" and not _differs(trained, "dp_replicate", run):
        return (
            "with dp_replicate it is the same, so own code takes a part of a parameter or gradient for the whole: a "
            "norm or a mean of a shared tensor needs `.full_tensor()`, or its own collective."
        )
    return (
        "own code does something on one process alone, or other things on each: a hook, an optimizer or a loop must "
        "do the same on all of them, and sum what it measures over them."
    )


def _differs(trained: Mapping[str, Trained], name: str, run: Run) -> bool:
    """Also where that row comes later, or is not asked for."""
    other = trained.get(name)
    return other is not None and (not other.done or not _Apart.of(trained[WHOLE], other, bars_of(run)).within)


def _gradients(whole: Trained) -> Row:
    told, steps = whole.learning, len(whole.losses)
    assert told is not None  # asked for, of a run that got to its end
    without, same, frozen, count = told.without, told.same, told.frozen, len(told.moved)
    text = f"{count - len(without) - len(frozen)} of {count} parameters have a gradient"
    text += f", {len(frozen)} frozen by requires_grad=False" if frozen else ""
    why = ""
    if without:
        why = (
            f"{_named(without)} had no gradient, or zeros, in all {steps} steps: `forward` does not use it, or its "
            "result is detached; use it, or freeze it with requires_grad=False."
        )
    elif same:
        why = f"{_named(same)} had a gradient and did not change: the optimizer leaves it out, or its rate is too low."
    return Row("gradients", COMPARED["gradients"], not without, text, why)


def _named(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def _apart(a: float, b: float) -> float:
    most = max(abs(a), abs(b))
    return abs(a - b) / most if most else 0.0


def _moved_apart(a: Trained, b: Trained) -> float:
    """How far apart the lengths of the ways are that the parameters went, relative to all of them. (Not the ways: the
    smallest numbers, which are all rounding, may go anywhere.)"""
    if a.learning is None or b.learning is None:
        return 0.0
    one, two = a.learning.moved, b.learning.moved
    length = math.hypot(*one.values())
    return math.hypot(*(one[name] - two.get(name, 0.0) for name in one)) / length if length else 0.0
