"""The hardware catalogue: `find("NVIDIA H100 80GB HBM3")`, fabrics, dated prices. No torch.

Files are read in layers: those of the package, then the folder that SHOAL_HARDWARE names, then the `folders` given (the
workspace's ./hardware). A later entry of the same name changes what it says and leaves the rest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path

from shoal.errors import SpecError
from shoal.plan import hardware_build, hardware_names, hardware_read
from shoal.plan.hardware_names import Spelling, key
from shoal.plan.hardware_read import Table
from shoal.plan.hardware_types import Device, Fabric, Link, Measured, Price, ScaleOut, Source

__all__ = [
    "Device",
    "Fabric",
    "Link",
    "Measured",
    "Price",
    "ScaleOut",
    "Source",
    "described_scale_out",
    "devices",
    "fabrics",
    "find",
    "find_fabric",
    "price",
    "scale_out",
]

Folders = Sequence[str | Path]
_FAMILY_YEAR = 2022  # "ib" alone means what is sold with an H100


def devices(folders: Folders = ()) -> list[Device]:
    return list(_catalogue(folders).devices)


def fabrics(folders: Folders = ()) -> list[Fabric]:
    return list(_catalogue(folders).fabrics)


def find(name: str, folders: Folders = ()) -> Device:
    """The device that `name` means. Of those that fit equally well, one of the user's files, then the first."""
    if re.search(r"\bmig\b", name, re.IGNORECASE):
        raise SpecError(
            f"'{name}' is a slice of a device, and the catalogue has whole ones; describe the slice "
            f"{hardware_names.OWN_ENTRY}."
        )
    catalogue = _catalogue(folders)
    for device in catalogue.devices:
        if key(device.name) == key(name):
            return device
    query = hardware_names.Query.of(name)
    best: tuple[float, bool] | None = None
    found: Device | None = None
    for device, spellings in zip(catalogue.devices, catalogue.spellings, strict=True):
        fit = query.fit(device, spellings)
        if fit is not None and (best is None or (fit, device.name in catalogue.own) > best):
            best, found = (fit, device.name in catalogue.own), device
    if found is None:
        raise SpecError(hardware_names.unknown("accelerator", name, catalogue.devices))
    return found


def find_fabric(name: str, device: Device | None = None, folders: Folders = ()) -> Fabric:
    """By its name, or by its family's ("ib"): then the generation that is sold with `device`."""
    known = _catalogue(folders).fabrics
    wanted = hardware_names.fabric_key(name)
    for fabric in reversed(known):
        if wanted in (key(fabric.name), *map(key, fabric.aliases)):
            return fabric
    family = sorted((f for f in known if key(f.family) == wanted), key=lambda f: f.since)
    if not family:
        raise SpecError(hardware_names.unknown("fabric", name, known))
    year = device.released if device else _FAMILY_YEAR
    return next((f for f in reversed(family) if f.since <= year), family[0])


def scale_out(device: Device, fabric: str | None = None, folders: Folders = ()) -> ScaleOut:
    """What joins nodes of `device`: what is usual, or the fabric that is named."""
    if fabric is None:
        return device.scale_out
    usual = find_fabric(device.scale_out.fabric, folders=folders)
    if hardware_names.fabric_key(fabric) in (key(usual.family), key(usual.name)):
        return device.scale_out
    chosen = find_fabric(fabric, device, folders)
    return ScaleOut(chosen.name, chosen.device_gbs(device.per_node))


def described_scale_out(device: Device, text: str, folders: Folders = ()) -> ScaleOut:
    """From the words of a publication ("HGX-8 + 8x400Gb IB", "RoCE 1600 Gbps/node"); what they leave open is usual."""
    known = _catalogue(folders).fabrics
    chosen = usual = find_fabric(device.scale_out.fabric, folders=folders)
    named, families = hardware_names.fabrics_in(text, known)
    if named:
        chosen = named[-1]
    elif families and usual.family not in families:
        chosen = find_fabric(families[0], device, folders)
    node_gbs = hardware_names.node_gbs_in(text)
    if node_gbs is not None:
        gbs = node_gbs / device.per_node
        family = [f for f in known if f.family == chosen.family]
        return ScaleOut(min(family, key=lambda f: abs(f.device_gbs(device.per_node) - gbs)).name, gbs)
    return device.scale_out if chosen is usual else ScaleOut(chosen.name, chosen.device_gbs(device.per_node))


def price(device: Device, date: str | None = None) -> Price | None:
    """The newest list or median price, of those not after `date`, of one day the median; None where none is known."""
    asked = [p for p in device.prices if p.basis != "spot" and (date is None or p.date <= date)]
    return max(asked, key=lambda p: (p.date, p.basis == "median"), default=None)


@dataclass(frozen=True)
class _Catalogue:
    devices: tuple[Device, ...]
    spellings: tuple[tuple[Spelling, ...], ...]
    fabrics: tuple[Fabric, ...]
    own: frozenset[str]  # names that the user's files have


def _catalogue(folders: Folders) -> _Catalogue:
    return _load(tuple((str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in _user_files(folders)))


def _user_files(folders: Folders) -> Iterator[Path]:
    named = os.environ.get("SHOAL_HARDWARE")
    if named and not Path(named).is_dir():
        raise SpecError(f"SHOAL_HARDWARE names '{named}', which is no folder; correct it or unset it.")
    for folder in [*([named] if named else []), *folders]:
        yield from sorted(Path(folder).glob("*.toml"))


@cache
def _packaged() -> tuple[tuple[str, Table], ...]:
    folder = files("shoal.plan").joinpath("hardware")
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".toml"))
    return tuple((f"hardware/{n}", hardware_read.read(folder.joinpath(n).read_text("utf-8"), n)) for n in names)


@lru_cache(maxsize=16)
def _load(stamps: tuple[tuple[str, int, int], ...]) -> _Catalogue:
    """All layers, with the user's files as they are now: their times and sizes are part of the key."""
    users = [(path, hardware_read.read(Path(path).read_text("utf-8"), path)) for path, _, _ in stamps]
    layers = [*_packaged(), *users]
    sources: Table = {"memory": {"text": "from memory, not looked up", "date": "2026-11"}}
    for _, content in layers:
        sources.update(content.get("sources", {}))
    tables: dict[str, Table] = {}
    fabric_tables: dict[str, Table] = {}
    for where, content in layers:
        for entry in content.get("device", []):
            tables[key(entry["name"])] = _layered(tables, entry, where)
        for entry in content.get("fabric", []):
            earlier = fabric_tables.get(key(entry["name"]), {})
            fabric_tables[key(entry["name"])] = {**earlier, **entry, "where": where}
        if where == "hardware/cpu.toml":
            tables["cpu"] = _all_cores(tables["cpu"])
    joins = {name: hardware_build.fabric(table, sources, table["where"]) for name, table in fabric_tables.items()}
    found = tuple(hardware_build.device(table, sources, joins) for table in tables.values())
    return _Catalogue(
        devices=found,
        spellings=tuple(map(hardware_names.spellings, found)),
        fabrics=tuple(joins.values()),
        own=frozenset(entry["name"] for _, content in users for entry in content.get("device", [])),
    )


def _layered(tables: dict[str, Table], entry: Table, where: str) -> Table:
    like = entry.get("like")
    if like is None:
        return hardware_build.merged(tables.get(key(entry["name"]), {}), entry, where, inherit=False)
    if key(like) not in tables:
        known = ", ".join(table["name"] for table in tables.values())
        raise SpecError(f"{where}: device '{entry['name']}' is like '{like}', which is not known; there are {known}.")
    return hardware_build.merged(tables[key(like)], entry, where, inherit=True)


def _all_cores(core: Table) -> Table:
    """The entry "CPU" is this machine: its file gives one core's figures."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rates = {name: {p: rate * cores for p, rate in core[name].items()} for name in ("peak", "matmul")}
    return {**core, **rates, "units": cores, "memory_gb": memory_bytes / 2**30}
