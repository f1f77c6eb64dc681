"""From tables of hardware files to devices and fabrics: what an entry takes over from another, and what is assumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.errors import SpecError
from shoal.plan.hardware_names import key, unknown
from shoal.plan.hardware_read import DATE, Table
from shoal.plan.hardware_types import LINK_KINDS, Device, Fabric, Link, Measured, Price, ScaleOut, Source

# An entry without these says too little; what else it leaves out is named in `Device.assumed`.
_NEEDED = ("peak", "memory_gb", "bandwidth_tbs", "link.gbs", "link.domain")
# A machine that nobody has described further gets the network that every machine room has.
_USUAL_FABRIC = "ethernet-100"
_NO_FIGURES = {"name", "like", "aliases", "vendor", "architecture", "prices", "sources", "measured"}
_OWN = {"aliases", "prices", "measured"}  # of one machine, not of one that is like it


def merged(base: Table, entry: Table, where: str, inherit: bool) -> Table:
    """`entry` on top of `base`: key by key inside tables, lists replaced, aliases added.

    With `inherit` (the entry says `like`) it is another machine: rates by precision are then replaced as a whole, and
    names, prices and measurements stay behind.
    """
    result = {name: value for name, value in base.items() if not (inherit and name in _OWN)}
    for name, value in entry.items():
        if name == "aliases":
            result[name] = [*result.get(name, []), *value]
        elif _other_kind(result.get(name), value):
            result[name] = value  # another kind of link, another fabric: no figure in common
        elif name in ("link", "scale_out") or (name in ("peak", "matmul", "measured") and not inherit):
            result[name] = {**result.get(name, {}), **value}
        elif name not in ("sources", "like"):
            result[name] = value
    result["sources"] = _told(base.get("sources", {}), entry, where)
    result["where"] = where
    return result


def _other_kind(before: Any, now: Any) -> bool:
    if not isinstance(before, dict) or not isinstance(now, dict):
        return False
    return any(name in now and now[name] != before.get(name) for name in ("kind", "fabric"))


def _told(base: dict[str, str], entry: Table, where: str) -> dict[str, str]:
    """Which source gave which figures. A figure that the entry changes without a word is the file's own."""
    own = {source: fields.split() for source, fields in entry.get("sources", {}).items()}
    named = {name for fields in own.values() for name in fields}
    silent = [name for name in entry if name not in named | _NO_FIGURES]
    if silent:
        own.setdefault(where, []).extend(silent)
    changed = named | set(silent)
    result = {source: [name for name in fields.split() if name not in changed] for source, fields in base.items()}
    for source, fields in own.items():
        result.setdefault(source, []).extend(fields)
    return {source: " ".join(fields) for source, fields in result.items() if fields}


def device(table: Table, sources: Table, fabrics: Mapping[str, Fabric]) -> Device:
    where, name = table["where"], table["name"]
    missing = [dotted for dotted in _NEEDED if not _at(table, dotted)]
    if missing:
        raise SpecError(
            f"{where}: device '{name}' lacks {', '.join(missing)}; add it, or start from a known one "
            '(like = "H100 SXM").'
        )
    assumed = [
        d for d in ("matmul", "units", "link.kind", "per_node", "scale_out", "watts", "released") if not _at(table, d)
    ]
    link = _link(table["link"])
    per_node = table.get("per_node", min(link.domain, 8))
    released = int(table.get("released", 2024))
    return Device(
        name=name,
        aliases=tuple(dict.fromkeys(table.get("aliases", []))),
        vendor=table.get("vendor", "unknown"),
        released=released,
        architecture=float(table.get("architecture", released)),
        peak={precision: float(rate) for precision, rate in table["peak"].items()},
        matmul={precision: float(rate) for precision, rate in table.get("matmul", {}).items()},
        memory_gb=float(table["memory_gb"]),
        bandwidth_tbs=float(table["bandwidth_tbs"]),
        units=table.get("units"),
        link=link,
        per_node=per_node,
        scale_out=_scale_out(table.get("scale_out", {}), per_node, fabrics, f"{where}: device '{name}'"),
        watts=table.get("watts"),
        prices=tuple(Price(**{"where": where, "basis": "list", **price}) for price in table.get("prices", [])),
        sources=_sources(table["sources"], sources),
        measured=_measured(table.get("measured", {})),
        assumed=tuple(assumed),
    )


def fabric(table: Table, sources: Table, where: str) -> Fabric:
    missing = [name for name in ("gbs", "per") if name not in table]
    if missing:
        raise SpecError(f"{where}: fabric '{table['name']}' lacks {', '.join(missing)}; add it.")
    return Fabric(
        name=table["name"],
        aliases=tuple(table.get("aliases", [])),
        family=str(table.get("family", table["name"])),
        gbs=float(table["gbs"]),
        per=table["per"],
        latency_us=float(table.get("latency_us", 10.0)),
        achievable=float(table.get("achievable", 0.8)),
        since=table.get("since", 2020),
        sources=_sources(table.get("sources", {where: "gbs"}), sources),
    )


def _link(table: Table) -> Link:
    kind = table.get("kind", "pcie" if table["gbs"] <= 64 else "nvswitch")
    latency_us, achievable = LINK_KINDS[kind]
    return Link(
        kind=kind,
        gbs=float(table["gbs"]),
        domain=table["domain"],
        per_peer_gbs=table.get("per_peer_gbs"),
        in_switch=table.get("in_switch", False),
        latency_us=float(table.get("latency_us", latency_us)),
        achievable=float(table.get("achievable", achievable)),
    )


def _scale_out(table: Table, per_node: int, fabrics: Mapping[str, Fabric], where: str) -> ScaleOut:
    name = table.get("fabric", _USUAL_FABRIC)
    if key(name) not in fabrics:
        raise SpecError(f"{where}: {unknown('fabric', name, list(fabrics.values()))}")
    chosen = fabrics[key(name)]
    return ScaleOut(chosen.name, float(table.get("gbs", chosen.device_gbs(per_node))))


def _sources(table: dict[str, str], known: Table) -> tuple[Source, ...]:
    """A source that no [sources] table has speaks for itself, with the date that stands in its words."""
    found = []
    for name, fields in table.items():
        date = DATE.search(name)
        said = known.get(name, {"text": name, "date": date.group() if date else ""})
        found.append(Source(tuple(fields.split()), said["text"], said["date"]))
    return tuple(found)


def _measured(table: Table) -> Measured:
    carried: Table = {name: tuple(map(tuple, v)) if isinstance(v, list) else v for name, v in table.items()}
    return Measured(**carried)


def _at(table: Table, dotted: str) -> Any:
    value: Any = table
    for name in dotted.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value
