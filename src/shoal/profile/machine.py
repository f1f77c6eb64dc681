"""What the machine could do: the roof over each kernel. From `shoal bench`, or else the catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import SpecError
from shoal.plan.catalogue import Device, find
from shoal.plan.machine import WIDER
from shoal.profile.least_work import Work
from shoal.profile.trace import Trace


@dataclass(frozen=True)
class Roof:
    name: str
    whence: str
    flops: dict[str, float] = field(default_factory=dict)  # FLOP/s of the best product, by precision
    bandwidth: float = 0.0  # bytes/s

    def least_s(self, work: Work) -> float | None:
        """Nothing does it faster; None where the machine is not known."""
        if not self.bandwidth:
            return None
        return max(self._computing_s(work), work.bytes / self.bandwidth)

    def bound(self, work: Work) -> str:
        return "compute" if self._computing_s(work) > work.bytes / (self.bandwidth or 1.0) else "memory"

    def rate(self, precision: str) -> float:
        """FLOP/s; where a precision has no units of its own, those of the next wider one."""
        while precision not in self.flops and precision in WIDER:
            precision = WIDER[precision]
        return self.flops.get(precision, 0.0)

    def _computing_s(self, work: Work) -> float:
        rate = self.rate(work.precision)
        return work.flops / rate if rate and work.flops else 0.0


def roof_of(trace: Trace, folders: Sequence[Path]) -> Roof:
    """Of one process: on a processor it has its threads' share of the cores, and with others on it of the memory."""
    try:
        device = find(trace.device, folders)
    except SpecError:
        return Roof(trace.device, f"'{trace.device}' is not in the catalogue: `shoal bench` measures it")
    flops = {p: rate * 1e12 for p in device.peak if (rate := device.ceiling(p)) is not None}
    if trace.about.get("tf32") and "tf32" in flops:
        flops["fp32"] = flops["tf32"]
    bandwidth = device.bandwidth_tbs * 1e12
    if trace.device == "cpu":
        cores = int(trace.about.get("cores", 1))
        share = min(1.0, int(trace.about.get("threads", cores)) / max(1, cores))
        flops = {p: rate * share for p, rate in flops.items()}
        bandwidth /= max(1, int(trace.about.get("processes_here", 1)))
    return Roof(device.name, _whence(device), flops, bandwidth)


def _whence(device: Device) -> str:
    if device.measured:
        return f"'{device.name}', measured by `shoal bench` on {device.measured.when or 'this machine'}"
    return f"'{device.name}' in the catalogue"
