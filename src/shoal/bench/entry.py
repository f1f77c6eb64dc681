"""From measurements to an entry of the hardware catalogue, which then prefers them to what is printed elsewhere.

A machine that the catalogue knows keeps its name, and the entry changes what was measured; under a name of its own it
is `like` the known one; one that nobody knows is described by what was measured alone.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.bench import publish
from shoal.bench.clock import digits
from shoal.bench.collectives import link_gbs
from shoal.bench.machine import Machine
from shoal.bench.products import best
from shoal.errors import SpecError
from shoal.plan import catalogue
from shoal.plan.hardware_names import key
from shoal.plan.hardware_types import PRECISIONS, Device, Measured

Table = dict[str, Any]

# A device of the same name with other silicon is another product: laptops, slices, cut-down boards. Memory may be less
# than printed, as error correction takes some of it (a "48 GB" L40S has 44.5).
_UNITS_OFF, _MEMORY_OFF = 0.03, 0.15
_FASTER = 1.05  # than fp32, for a precision to be worth computing in where nobody says that the device has it


def known_as(machine: Machine, name: str | None, folders: Sequence[Path]) -> Device | None:
    """The entry for this machine, or for `name` if there is one, as it is without what a bench has written."""
    catalogue.devices(folders)  # a file with a mistake is told by its own name
    with _unmeasured(folders) as others:
        for device in catalogue.devices(others):
            if name is not None and key(device.name) == key(name):
                return device
        try:
            found = catalogue.find(machine.name if machine.cuda else "cpu", others)
        except SpecError:
            return None
    return found if not machine.cuda or _same(machine, found) else None


def entry(machine: Machine, measured: Measured, known: Device | None, name: str | None, host_gbs: float) -> Table:
    """`host_gbs`: from the host to a device that nobody knows; else it is not looked at."""
    called = name or (known.name if known else machine.name.replace("MIG", "slice"))  # whole devices have no "MIG"
    another = known is not None and key(called) != key(known.name)
    ceilings = _ceilings(measured, known)
    peak = _peak(ceilings, known, whole=another)
    table: Table = {"name": called}
    if known is not None and another:
        table["like"] = known.name
    if key(machine.name) != key(called) and (another or not machine.cuda):
        table["aliases"] = [machine.name]
    if known is None:
        table["vendor"] = machine.vendor
    if peak:
        table["peak"] = peak
    table["matmul"] = {**known.matmul, **ceilings} if known is not None and another else ceilings
    table["memory_gb"] = round(machine.memory_gb, 1)
    if measured.memory:
        table["bandwidth_tbs"] = digits(max(measured.memory)[1] / 1e3)
    table["units"] = machine.units
    link = _link(machine, measured, known, host_gbs)
    if link:
        table["link"] = link
    figures = [figure for figure in table if figure not in ("name", "like", "aliases", "vendor")]
    table["sources"] = {f"{measured.when}, shoal bench on {machine.name}": " ".join(figures)}
    table["measured"] = measured
    return {figure: value for figure, value in table.items() if value}


def _same(machine: Machine, found: Device) -> bool:
    units = found.units or machine.units
    return (
        abs(machine.units - units) <= _UNITS_OFF * units
        and abs(machine.memory_gb - found.memory_gb) <= _MEMORY_OFF * found.memory_gb
    )


def _ceilings(measured: Measured, known: Device | None) -> dict[str, float]:
    """Where 16 bits go no faster than 32 they are emulated: a run computes in 32 bits there, and so does the plan."""
    rates = {precision: row[4] for precision, row in best(measured.matmul).items() if precision in PRECISIONS}
    least = _FASTER * rates.get("fp32", 0.0)
    printed = known.peak if known else {}
    return {p: rate for p, rate in rates.items() if p == "fp32" or p in printed or rate > least}


def _peak(ceilings: dict[str, float], known: Device | None, whole: bool) -> dict[str, float]:
    """No product is faster than the peak: where one is, or where nobody prints any, it is the best product."""
    printed = known.peak if known else {}
    higher = {p: rate for p, rate in ceilings.items() if rate > printed.get(p, 0.0)}
    return {**printed, **higher} if whole and higher else higher


def _link(machine: Machine, measured: Measured, known: Device | None, host_gbs: float) -> Table:
    gbs = link_gbs(measured.collectives) if machine.cuda else None
    if known is None:
        return {"gbs": digits(gbs or host_gbs), "domain": machine.count}
    return {"achievable": digits(gbs / known.link.gbs)} if gbs else {}


@contextmanager
def _unmeasured(folders: Sequence[Path]) -> Iterator[list[Path]]:
    """The same folders without files of earlier benches, which are to be replaced: what was measured then must not pass
    for what is printed."""
    named = os.environ.pop("SHOAL_HARDWARE", None)  # a layer like the others, before them
    try:
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as place:
            layers = [Path(folder) for folder in ([named] if named else []) + list(map(str, folders))]
            for number, layer in enumerate(layers):
                links = Path(place) / str(number)
                links.mkdir()
                for file in layer.glob("*.toml"):
                    if not publish.is_ours(file):
                        (links / file.name).symlink_to(file.resolve())
            yield [Path(place) / str(number) for number in range(len(layers))]
    finally:
        if named is not None:
            os.environ["SHOAL_HARDWARE"] = named
