"""The numbers of a machine that costs are computed with: an accelerator of the catalogue and what joins its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.plan.catalogue import Device, Fabric, find_fabric

# Where a precision has no product of its own, the next wider one computes it.
WIDER = {"fp4": "fp8", "fp8": "bf16", "bf16": "fp16", "fp16": "fp32"}


@dataclass(frozen=True)
class Machine:
    name: str
    matmul: float  # FLOP/s of the best product in 16 bits
    matmul32: float
    matmul8: float
    matmul4: float
    peak: float  # FLOP/s on paper, 16 bits dense: what MFU is a share of
    peak32: float
    bandwidth: float  # bytes/s of memory
    memory: float  # bytes
    link: float  # bytes/s that a large collective sees, one way, to the others of the domain
    per_peer: float  # to one of them alone
    link_latency: float  # seconds of one hop of a ring
    in_switch: bool  # the switch adds up
    domain: int
    node: int  # devices that share a host
    nic: float  # bytes/s a device, one way, to other domains
    nic_latency: float
    units: int
    sends_by_units: bool  # collectives run on the units that compute (GPUs), not on engines of their own
    architecture: float  # year of the first product of its architecture
    watts: float
    cpu: bool = False  # a processor: what `train.precision: auto` computes with in 32 bits
    processes: int = 1  # that share this device

    @staticmethod
    def of(device: Device, fabric: Fabric | None = None, folders: Sequence[Path] = ()) -> Machine:
        """`fabric`: what joins the nodes; empty: what usually does, which `folders` may describe."""
        joins = find_fabric(device.scale_out.fabric, device, folders) if fabric is None else fabric
        nic = device.scale_out.gbs if fabric is None else fabric.device_gbs(device.per_node)
        link = device.link
        return Machine(
            name=device.name,
            matmul=_best(device, "bf16"),
            matmul32=_best(device, "fp32"),
            matmul8=_best(device, "fp8"),
            matmul4=_best(device, "fp4"),
            peak=device.peak[_computed_in(device, "bf16")] * 1e12,
            peak32=device.peak[_computed_in(device, "fp32")] * 1e12,
            bandwidth=device.bandwidth_tbs * 1e12,
            memory=device.memory_bytes,
            link=link.gbs * link.achievable * 1e9,
            per_peer=(link.per_peer_gbs or link.gbs) * link.achievable * 1e9,
            link_latency=link.latency_us * 1e-6,
            in_switch=link.in_switch,
            domain=link.domain,
            node=device.per_node,
            nic=nic * joins.achievable * 1e9,
            nic_latency=joins.latency_us * 1e-6,
            units=device.units or 100,
            sends_by_units=device.vendor in ("nvidia", "amd"),
            architecture=device.architecture,
            watts=device.watts or 0.0,
            cpu=device.is_cpu,
        )

    def divided(self, processes: int) -> Machine:
        """What each of so many processes has of one processor; they talk through its memory."""
        return replace(
            self,
            matmul=self.matmul / processes,
            matmul32=self.matmul32 / processes,
            peak=self.peak / processes,
            peak32=self.peak32 / processes,
            bandwidth=self.bandwidth / processes,
            memory=self.memory / processes,
            link=self.link / processes,
            per_peer=self.per_peer / processes,
            domain=max(self.domain, processes),
            node=max(self.node, processes),
            units=1,
            processes=processes,
        )


def _computed_in(device: Device, precision: str) -> str:
    """A device that states no product in 32 bits (some TPUs) has at least those in 16."""
    if precision == "fp32" and precision not in device.peak:
        precision = "bf16"
    while precision not in device.peak:
        precision = WIDER[precision]
    return precision


def _best(device: Device, precision: str) -> float:
    found = device.ceiling(_computed_in(device, precision))
    assert found is not None
    return found * 1e12
