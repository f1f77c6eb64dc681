"""What was expected of a run (its plan.json) beside what it did, and which part is furthest off. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal import readable, values
from shoal.journal.rundir import RunDir
from shoal.observe import phases
from shoal.observe.steps import Steps, median, steps_of
from shoal.observe.throughput import FIRST
from shoal.plain_file import read_object

# Off by less than this of a step, a part is no news.
NEWS = 0.05
# Off by more than this factor a percentage says nothing: plan and machine are not about the same thing.
STRANGE = 2.0
# Programs that want a core, for each that there is, from which on a machine is said to be overloaded.
CROWDED = 1.5


@dataclass(frozen=True)
class Part:
    name: str
    planned_s: float
    measured_s: float

    @property
    def off_s(self) -> float:
        return self.measured_s - self.planned_s


@dataclass(frozen=True)
class Compared:
    plan: Mapping[str, Any]
    step_s: float  # median
    parts: tuple[Part, ...]

    @property
    def off(self) -> float:
        """Measured against planned, less one."""
        return self.step_s / float(self.plan["step_s"]) - 1

    @property
    def strange(self) -> bool:
        """So far off that plan and run were about different machines."""
        return not 1 / STRANGE <= self.off + 1 <= STRANGE

    @property
    def worst(self) -> Part | None:
        part = max(self.parts, key=lambda p: abs(p.off_s))
        return part if abs(part.off_s) > NEWS * self.step_s else None

    def as_json(self) -> dict[str, Any]:
        parts = {p.name: {"planned_s": p.planned_s, "measured_s": p.measured_s} for p in self.parts}
        worst = self.worst
        return {
            "device": self.plan["device"],
            "figures": self.plan["figures"],
            "step_s": {"planned": self.plan["step_s"], "measured": self.step_s},
            "overloaded": crowded(self.plan),
            "parts": parts,
            "furthest_off": None if worst is None else {"part": worst.name, "likely": likely(self, worst)},
        }


def compared(
    run_dir: RunDir, steps: Steps | Sequence[Mapping[str, Any]], starts: Sequence[Mapping[str, Any]]
) -> Compared | str | None:
    """Words where nothing could be planned; None where nobody planned, or too little has been done to tell."""
    try:
        plan = read_object(run_dir.plan_file)
        if "none" in plan:
            return f"none: {values.field(plan, 'none', values.short)}"
        _look_at(plan)
    except OSError:
        return None
    except values.BadValue as e:
        return f"none: plan.json is damaged ({e})"
    counted = steps_of(steps).settled(starts)
    if len(counted) < FIRST:
        return None
    measured = phases.parts(counted)
    planned = {"optimizer_s": float(plan["parts_s"].get("update", 0.0)), "data_s": 0.0}
    if "exchange_s" in measured:  # of islands: what they trade
        planned["exchange_s"] = float(plan["parts_s"].get("islands", 0.0))
    planned["compute_s"] = float(plan["step_s"]) - sum(planned.values())
    whole = median(counted.duration_s())
    parts = tuple(
        Part(_CALLED[name], planned[name], measured.get(name, 0.0))
        for name in ("data_s", "compute_s", "exchange_s", "optimizer_s")
        if name in planned
    )
    return Compared(plan, whole, parts)


def _look_at(plan: Mapping[str, Any]) -> None:
    """What is reckoned with below."""
    for name in ("step_s", "step_low_s", "step_high_s"):
        values.field(plan, name, lambda said: values.real(said, least=1e-12))
    for name in ("device", "figures"):
        values.field(plan, name, values.short)
    values.field(plan, "parts_s", values.by_name(values.real))
    for name in ("load", "cores"):
        if name in plan:
            values.field(plan, name, values.maybe(values.real))


_CALLED = {
    "data_s": "waiting for data",
    "compute_s": "forward and backward",
    "exchange_s": "trading with islands",
    "optimizer_s": "optimizer",
}


def likely(found: Compared, part: Part) -> str:
    """The likely cause, in words that say what to do."""
    if part.off_s > 0 and (busy := crowded(found.plan)):
        return f"{busy}: a plan is for a machine that does nothing else"
    if part.name == "waiting for data":
        return "data comes more slowly than the devices compute: a slow disk or bucket, or too few cores beside them"
    if part.name == "trading with islands":
        return "what islands wait for each other is in it: one is slower than the others, or so is the way between them"
    if found.plan["figures"] == "the catalogue":
        return "the plan knows this machine from the catalogue only: `shoal bench` measures it"
    if part.off_s < 0:
        return "the plan is too careful here"
    return "something else runs on these devices, their clocks sag, or steps are too small to fill them"


def crowded(plan: Mapping[str, Any]) -> str | None:
    """That other programs kept the machine busy when the run began, as the plan was told then."""
    load, cores = plan.get("load"), plan.get("cores")
    if not load or not cores or float(load) < CROWDED * int(cores):
        return None
    return f"this machine was overloaded when the run began ({float(load):.0f} programs on {int(cores)} cores)"


def _against(found: Compared) -> str:
    """Measured against planned, in words. Between a half and double a percentage is one; beyond, it is nonsense."""
    took = f"it took {readable.short(found.step_s)}"
    if not found.strange:
        return f"{took} ({found.off:+.0%})"
    ratio = found.off + 1
    if ratio < 1:
        return f"{took}, {ratio:.0%} of that"
    return f"{took}, {ratio:.1f} times as long" if ratio < 10 else f"{took}, {ratio:,.0f} times as long"


def lines(found: Compared | str) -> list[str]:
    if isinstance(found, str):
        return [f"plan        {found}"]
    plan = found.plan
    expected, low, high = (readable.short(float(plan[name])) for name in ("step_s", "step_low_s", "step_high_s"))
    told = [
        f"plan        a step of {expected} ({low} to {high}) by the figures of {plan['figures']} for {plan['device']}; "
        f"{_against(found)}"
    ]
    for part in found.parts:
        if max(part.planned_s, part.measured_s) > 0.001 * found.step_s:
            planned, measured = readable.short(part.planned_s), readable.short(part.measured_s)
            told.append(f"            {part.name:<21} {planned:>8} planned {measured:>8} measured")
    if (worst := found.worst) is not None:
        told.append(f"            furthest off: {worst.name}; {likely(found, worst)}")
    return told
