"""What a device costs for an hour: as the run file says, else as the catalogue does.

The run file is read for those values alone, without its types: half a second that `shoal ps NAME` need not wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError
from shoal.spec.yaml_text import parse, read_text


@dataclass(frozen=True)
class Stated:
    """What a run file says about its price; as in the file, which somebody may have changed by hand."""

    usd_per_hour: float | None = None  # plan.price
    device: str | None = None  # launch.gpu_type, else plan.on


def stated(file: Path) -> Stated:
    """SpecError where the file is no YAML; a value of another kind counts as not said."""
    values = parse(read_text(file), str(file)).values
    sections = values if isinstance(values, dict) else {}
    plan, launch = (part if isinstance(part, dict) else {} for part in (sections.get("plan"), sections.get("launch")))
    names = (launch.get("gpu_type"), plan.get("on"))
    return Stated(_dollars(plan.get("price")), next((n for n in names if isinstance(n, str) and n), None))


def _dollars(value: Any) -> float | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and 0 <= value < 1e9 else None


def price(said: Stated, device_seen: str) -> tuple[float | None, str | None]:
    """Of one device and hour, and whose word that is."""
    if said.usd_per_hour is not None:
        return said.usd_per_hour, f"${said.usd_per_hour:.2f} a device and hour (plan.price)"
    from shoal.plan import catalogue

    try:
        device = catalogue.find(said.device or device_seen)
        known = catalogue.price(device)
    except ShoalError:  # a label of the cluster that no catalogue knows
        return None, None
    if known is None:
        return None, None
    return known.usd_per_hour, f"${known.usd_per_hour:.2f} a {device.name} and hour ({known.basis}, {known.date})"
