"""What the verbs of `shoal plan` ask of a command line, a run file and a machine, and how they say it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from shoal.decide.auto import MOST_CPU_PROCESSES
from shoal.decide.length import with_steps
from shoal.decide.load import load
from shoal.errors import SetupError, ShoalError, SpecError, UsageError
from shoal.journal.rundir import workspace
from shoal.plan.asked import Asked
from shoal.plan.calibrate import calibrated
from shoal.plan.catalogue import Device, Fabric, find, find_fabric, price
from shoal.plan.expect import this_device
from shoal.plan.explain import make_it_fit, no_layout
from shoal.plan.failures import DEFAULT, FailureRate, preset, stated
from shoal.plan.island_costs import shards
from shoal.plan.machine import Machine
from shoal.plan.restarts import Style, style
from shoal.plan.search import Found, search
from shoal.plan.verdict import Range, Verdict
from shoal.readable import duration
from shoal.spec.run import Run
from shoal.spec.shape import Shape, shape_of

Number = TypeVar("Number", int, float)
Found_ = TypeVar("Found_")


@dataclass(frozen=True)
class Target:
    device: Device
    fabric: Fabric | None  # None: what usually joins such nodes
    devices: int
    workspace: Path

    @property
    def folders(self) -> tuple[Path, ...]:
        """Of entries of one's own."""
        return (self.workspace / "hardware",)

    @property
    def machine(self) -> Machine:
        return Machine.of(self.device, self.fabric, self.folders)

    @property
    def joined_by(self) -> str:
        return self.device.scale_out.fabric if self.fabric is None else self.fabric.name

    @property
    def words(self) -> str:
        """What it is, and what joins its nodes."""
        if is_here(self.device):
            return f"{self.devices:,} process{'es' * (self.devices > 1)} of this {self.device.name}"
        inside = f"{self.device.per_node} a node, {self.joined_by} between nodes"
        return f"{self.devices:,} {self.device.name} ({inside})"

    def asked(self, run: Run, shape: Shape) -> Asked:
        from shoal.data.documents import documents_of

        machine = self.machine.divided(self.devices) if is_here(self.device) else self.machine
        documents = documents_of(run, shape, self.workspace)
        return Asked(run, shape, machine, self.devices, calibrated(self.device), documents)


def is_here(device: Device) -> bool:
    """Whether it is this machine's processor, of which there is one, shared by all processes."""
    return device.is_cpu and device.name == "CPU"


def wanted(args: argparse.Namespace) -> tuple[Run, Shape]:
    run = with_steps(load(args.file, args.overrides or ()).run, workspace(args.workspace))
    if run.unplanned is not None:
        native = ", or plan FSDP2 with engine.name=native" if run.foreign is None else ""
        raise SpecError(
            f"{run.unplanned}, so nothing can be planned: train it for some steps and look at `shoal report`{native}."
        )
    known = None if run.model.vocab_size != "auto" else _vocabulary(run, workspace(args.workspace))
    return run, shape_of(run.model, known)


def failing(args: argparse.Namespace, run: Run) -> FailureRate:
    """How often devices fail: by the option, else by the run file."""
    if args.rates is not None:
        try:
            told = float(args.rates)
        except ValueError:
            return preset(args.rates)
        if not 0 < told < math.inf:
            raise UsageError(f"--rates {args.rates}: give failures of hardware in 1,000 device-days, more than 0.")
        return stated(told)
    if isinstance(run.plan.rates, str):
        return _from_file("plan.rates", lambda: preset(str(run.plan.rates)))
    return DEFAULT if run.plan.rates is None else stated(run.plan.rates)


def coming_back(args: argparse.Namespace, run: Run) -> Style:
    """How the run comes back from failures: by the option, else by the run file, else as the trainer does."""
    islands = run.fleet.islands
    return style(args.style or run.plan.style or ("islands" if islands > 1 else "supervised"), islands)


def target(
    args: argparse.Namespace, run: Run, name: str | None, fabric: str | None, devices: int | None = None
) -> Target:
    """What the options leave open is as the run file says, then as is usual."""
    folders, plan = (workspace(args.workspace) / "hardware",), run.plan
    if name is None and plan.on is not None:
        device = _from_file("plan.on", lambda: find(str(plan.on), folders))
    else:
        device = find(name or this_device(), folders)
    joined = None if fabric is None else find_fabric(fabric, device, folders)
    if joined is None and plan.fabric is not None:
        joined = _from_file("plan.fabric", lambda: find_fabric(str(plan.fabric), device, folders))
    islands = run.fleet.islands
    devices = devices or plan.devices or _usual(run, device)
    if devices % islands:
        near = dict.fromkeys(max(1, n) * islands for n in (devices // islands, devices // islands + 1))
        raise UsageError(
            f"{devices:,} devices cannot be shared out to the {islands} islands of fleet.islands; take "
            f"{' or '.join(f'{n:,}' for n in near)}."
        )
    return Target(device, joined, devices, workspace(args.workspace))


def _usual(run: Run, device: Device) -> int:
    """As the run file says, else a node for each island; on this processor as many processes as training would take."""
    islands = run.fleet.islands
    if run.resources.processes != "auto":
        return int(run.resources.processes) * islands
    if not is_here(device):
        return device.per_node * islands
    room = max(1, min(device.units or 1, MOST_CPU_PROCESSES) // islands)
    each = run.train.batch // (shards(run) or 1)
    return islands * next(n for n in range(room, 0, -1) if each % n == 0)


def _from_file(key: str, look: Callable[[], Found_]) -> Found_:
    try:
        return look()
    except SpecError as e:
        raise SpecError(f"{key} of the run file: {e}") from e


def names(text: str | None) -> list[str]:
    """Of a list on the command line, `h100,b200`."""
    return list(dict.fromkeys(word.strip() for word in (text or "").split(",") if word.strip()))


def counts(text: str | None) -> list[int]:
    return _numbers(text, "--devices", int, "a whole number of devices, 1 or more")


def prices(text: str | None) -> list[float]:
    return _numbers(text, "--price", float, "dollars for one device and hour, more than 0")


def one(given: Sequence[Any], option: str) -> Any:
    """What a verb takes one of; None where nothing is given."""
    if len(given) > 1:
        several = ",".join(str(value) for value in given)
        raise UsageError(f"{option} {several}: a plan is for one of them; `shoal plan compare` takes several.")
    return given[0] if given else None


def layouts(asked: Asked, most: int) -> list[Found]:
    """The best ones that fit; where there are none, an error that says why and what to change."""
    found = search(asked, most)
    if not found:
        raise SpecError(no_layout(asked))
    if not found[0].fits:
        raise SetupError(make_it_fit(asked, found[0]))
    return [layout for layout in found if layout.fits]


def priced(device: Device, given: float | None) -> str:
    """What an hour costs, and who says so."""
    if given is not None:
        return f"${given:g} for one {device.name} and hour, as given"
    known = price(device)
    if known is None:
        return f"the catalogue knows none of {device.name}; give one with --price"
    return f"${known.usd_per_hour:g} for one {device.name} and hour ({known.basis}, {known.where}, {known.date})"


def ranged(r: Range) -> str:
    return f"{figure(r.expected)} ({figure(r.low)} to {figure(r.high)})"


def lasting(days: Range) -> str:
    """In days where it takes some; a short run in minutes or seconds."""
    if days.expected >= 1:
        return f"{ranged(days)} days"
    expected, low, high = (duration(part * 86400) for part in (days.expected, days.low, days.high))
    return f"{expected} ({low} to {high})"


def figure(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def as_json(one: Verdict) -> dict[str, Any]:
    """A layout with all that is predicted of it."""
    layout = one.found.layout
    return {
        "mesh": {
            **asdict(layout.sizes),
            "micro_batch": layout.micro_batch,
            "schedule": layout.schedule,
            "cp_method": layout.cp_method,
            "reduce": layout.reduce,
            "recompute": one.found.recompute,
        },
        "step_s": one.found.seconds,
        "sent_between_islands_bytes_a_device": one.found.traded_bytes,
        "parts_s": one.found.parts,
        "tokens_s": asdict(one.tokens_s),
        "mfu_causal": one.mfu,
        "mfu_whole": one.mfu_whole,
        "memory_bytes": {**asdict(one.found.memory), "total": one.found.memory.total},
        "goodput": {"expected": one.goodput.expected, "low": one.goodput.low, "high": one.goodput.high},
        "checkpoint_interval_s": one.goodput.interval_s,
        "days": asdict(one.days),
        "usd": None if one.usd is None else asdict(one.usd),
        "usd_per_billion_tokens": None if one.usd_per_billion is None else asdict(one.usd_per_billion),
        "kwh_per_billion_tokens": None if one.kwh_per_billion is None else asdict(one.kwh_per_billion),
    }


def _numbers(text: str | None, option: str, kind: Callable[[str], Number], what: str) -> list[Number]:
    found: list[Number] = []
    for word in names(text):
        try:
            value = kind(word)
        except ValueError:
            value = kind("0")
        if not 0 < value < math.inf:
            raise UsageError(f"{option} {text}: {word} is not {what}.")
        found.append(value)
    if text is not None and not found:
        raise UsageError(f"{option} '{text}' names nothing; give {what}.")
    return found


def _vocabulary(run: Run, folder: Path) -> int:
    from shoal.data.sources import open_sources

    try:
        return open_sources(run.data.train, run.data, folder, look=False)[0].vocab_size
    except ShoalError as e:
        raise SpecError(
            f"model.vocab_size is auto, and the data that would say it cannot be opened: {str(e).rstrip('.')}; "
            "set model.vocab_size, as in `shoal plan RUN.yaml model.vocab_size=128256`."
        ) from e
