"""From a trace to what it says: one process's steps, by kind, by kernel, with what is not explained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.errors import DataError
from shoal.profile import on_cpu, on_gpu
from shoal.profile.kernels import Kernel, kernels
from shoal.profile.kinds import COMMUNICATION, KINDS, UNACCOUNTED
from shoal.profile.machine import Roof, roof_of
from shoal.profile.trace import Trace, read


@dataclass(frozen=True)
class Part:
    kind: str
    seconds: float  # a step
    share: float
    phases: dict[str, float]  # seconds a step


@dataclass(frozen=True)
class Analysis:
    file: Path
    about: dict[str, Any]
    device: str
    steps: int
    step_s: float  # a step, under the profiler
    untraced_step_s: float | None
    parts: tuple[Part, ...]  # they add up to step_s
    hidden_s: float  # communication while something computed, a step
    idle: dict[str, float]  # by why, seconds a step
    unknown: dict[str, float]  # what is unaccounted, seconds a step
    waits: dict[str, float]  # times a step that the host waited for the GPU
    kernels: tuple[Kernel, ...]  # all of them, the one that loses most first
    roof: Roof

    @property
    def rank(self) -> int:
        return int(self.about.get("rank", 0))

    @property
    def cuda(self) -> bool:
        return self.device != "cpu"

    def part(self, kind: str) -> Part:
        return next(part for part in self.parts if part.kind == kind)

    @property
    def accounted(self) -> float:
        return 1.0 - self.part(UNACCOUNTED).share

    @property
    def waited_s(self) -> float:
        """For others: the rank that waits least is the one that the others wait for."""
        return self.part(COMMUNICATION).seconds

    @property
    def tokens_per_s(self) -> float | None:
        tokens = self.about.get("tokens_per_step")
        return float(tokens) / (self.untraced_step_s or self.step_s) if tokens else None

    def as_json(self) -> dict[str, Any]:
        worst = [{**asdict(kernel), "lost_s": kernel.lost_s} for kernel in self.kernels]
        return {
            "trace": str(self.file),
            "about": self.about,
            "device": self.device,
            "steps": self.steps,
            "step_s": self.step_s,
            "untraced_step_s": self.untraced_step_s,
            "tokens_per_s": self.tokens_per_s,
            "accounted": self.accounted,
            "kinds": {part.kind: asdict(part) for part in self.parts},
            "hidden_communication_s": self.hidden_s,
            "idle": self.idle,
            "unaccounted": self.unknown,
            "host_waits_per_step": self.waits,
            "roof": asdict(self.roof),
            "kernels": worst,
        }


def analyse(file: Path, folders: Sequence[Path] = ()) -> Analysis:
    return analysis_of(read(file), file, folders)


def analysis_of(trace: Trace, file: Path, folders: Sequence[Path] = ()) -> Analysis:
    steps = trace.about.get("steps")
    timeline = on_gpu.timeline if trace.gpu else on_cpu.timeline
    tally = timeline(trace, int(steps) if steps else None)
    # The loop's clock is a second witness: what it saw and the trace did not is not accounted for.
    seen_ns = tally.end - tally.begin
    clock_ns = 1e9 * sum(trace.about.get("step_s") or [])
    if clock_ns > seen_ns:
        tally.spend(UNACCOUNTED, None, clock_ns - seen_ns, "in the loop's clock, not in the trace")
    step_s = max(seen_ns, clock_ns) / tally.steps / 1e9
    if step_s <= 0:
        raise DataError(f"{file}: its steps take no time, so there is nothing to tell; profile again.")

    def a_step(of: dict[str, float]) -> dict[str, float]:
        return {name: ns / tally.steps / 1e9 for name, ns in sorted(of.items(), key=lambda item: -item[1])}

    parts = []
    for kind in KINDS:
        phases = a_step(tally.spent[kind])
        parts.append(Part(kind, sum(phases.values()), sum(phases.values()) / step_s, phases))
    return Analysis(
        file=file,
        about=trace.about,
        device=trace.device,
        steps=tally.steps,
        step_s=step_s,
        untraced_step_s=trace.about.get("untraced_step_s"),
        parts=tuple(parts),
        hidden_s=tally.hidden_communication / tally.steps / 1e9,
        idle=a_step(tally.idle),
        unknown=a_step(tally.unknown),
        waits={name: n / tally.steps for name, n in sorted(tally.waits.items(), key=lambda item: -item[1])},
        kernels=tuple(kernels(tally, roof := roof_of(trace, folders), trace.about.get("attended"))),
        roof=roof,
    )


def slowest(ranks: Sequence[Analysis]) -> Analysis:
    """The one that the others wait for: with collectives all steps are equally long, and it waits least."""
    return min(ranks, key=lambda one: (one.waited_s, -one.step_s))
