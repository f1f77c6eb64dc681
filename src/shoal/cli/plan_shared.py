"""What the verbs of `shoal plan` ask of a command line, a run file and a machine, and how they say it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from shoal.errors import SetupError, ShoalError, SpecError, UsageError
from shoal.observe.words import duration
from shoal.plan.asked import Asked
from shoal.plan.calibrate import calibrated
from shoal.plan.catalogue import Device, Fabric, find, find_fabric, price
from shoal.plan.expect import this_device
from shoal.plan.explain import make_it_fit
from shoal.plan.machine import Machine
from shoal.plan.search import Found, search
from shoal.plan.verdict import Range, Verdict
from shoal.spec.resolve import load
from shoal.spec.run import Run
from shoal.spec.shape import Shape, shape_of
from shoal.track.rundir import workspace

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Target:
    device: Device
    fabric: Fabric | None  # None: what usually joins such nodes
    devices: int
    folders: tuple[Path, ...]  # of entries of one's own

    @property
    def machine(self) -> Machine:
        return Machine.of(self.device, self.fabric, self.folders)

    @property
    def joined_by(self) -> str:
        return self.device.scale_out.fabric if self.fabric is None else self.fabric.name

    def asked(self, run: Run, shape: Shape) -> Asked:
        return Asked(run, shape, self.machine, self.devices, calibrated(self.device))


def wanted(args: argparse.Namespace) -> tuple[Run, Shape]:
    run = load(args.file, args.overrides or ()).run
    if run.fleet.islands != 1:
        raise SpecError(
            f"fleet.islands is {run.fleet.islands}, and a plan is of one island: set fleet.islands=1 and its share of "
            "train.batch."
        )
    known = None if run.model.vocab_size != "auto" else _vocabulary(run, workspace(args.workspace))
    return run, shape_of(run.model, known)


def target(
    args: argparse.Namespace, run: Run, name: str | None, fabric: str | None, devices: int | None = None
) -> Target:
    folders = (workspace(args.workspace) / "hardware",)
    device = find(name or this_device(), folders)
    if devices is None:
        devices = device.per_node if run.resources.processes == "auto" else int(run.resources.processes)
    return Target(device, None if fabric is None else find_fabric(fabric, device, folders), devices, folders)


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
        raise SpecError(
            f"no layout of {asked.devices:,} devices can train this run: train.batch {asked.run.train.batch} cannot be "
            "shared out to them; take another number of devices or another batch, or leave values of the mesh open."
        )
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
            "recompute": one.found.recompute,
        },
        "step_s": one.found.seconds,
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
        return open_sources(run.data.train, run.data, folder)[0].vocab_size
    except ShoalError as e:
        raise SpecError(
            f"model.vocab_size is auto, and the data that would say it cannot be opened: {str(e).rstrip('.')}; "
            "set model.vocab_size, as in `shoal plan RUN.yaml model.vocab_size=128256`."
        ) from e
