"""What the planner knows of a machine: an accelerator, the links around it, what it costs, whence each figure is.

All rates are one way and in decimal GB/s, as benchmarks report them; vendors print both ways added up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "int8", "fp8", "fp4")

# Per kind of link: microseconds of one step of a collective (NCCL's tuning table: ring, LL128), and the share of the
# rate that a large ring reaches (measured on 8 H200: 361 to 367 of 450 GB/s; on 8 MI300X: 313 of 448; the others are
# from memory).
LINK_KINDS = {
    "nvlink": (1.9, 0.8),
    "nvswitch": (1.9, 0.81),
    "pcie": (2.5, 0.7),
    "xgmi": (2.5, 0.7),
    "ici": (1.0, 0.9),
    "neuronlink": (2.5, 0.7),
    "roce": (4.0, 0.85),
    "memory": (5.0, 0.5),
}

# Of the peak, what the best product reaches where nobody has measured one: systolic arrays keep their clocks, GPUs lose
# to power and to their schedulers (measured: A100 87%, H100 80%, B200 78%, MI300X 51%, MI355X 63%).
TYPICAL_MATMUL = {"google": 0.95, "amazon": 0.85, "intel": 0.8, "nvidia": 0.8, "amd": 0.62}
TYPICAL_MATMUL_ELSEWHERE = 0.75


@dataclass(frozen=True)
class Source:
    fields: tuple[str, ...]  # the entry's figures that it gave
    text: str
    date: str  # "2026", "2026-05" or "2026-05-20"


@dataclass(frozen=True)
class Price:
    usd_per_hour: float  # of one device
    date: str
    where: str
    basis: str  # list, spot or median


@dataclass(frozen=True)
class Link:
    """What joins devices inside a node, or inside a domain that is larger than a node (NVL72, a TPU pod)."""

    kind: str
    gbs: float  # to all peers together
    domain: int  # devices that it joins
    per_peer_gbs: float | None  # to one peer, where that is less: AMD's and Intel's meshes, one link of a torus
    in_switch: bool  # the switch adds up (NVLS): an all-reduce sends everything once, not twice
    latency_us: float
    achievable: float  # of gbs, by a large ring collective


@dataclass(frozen=True)
class ScaleOut:
    """What joins nodes, as one device sees it."""

    fabric: str
    gbs: float


@dataclass(frozen=True)
class Fabric:
    name: str
    aliases: tuple[str, ...]
    family: str
    gbs: float
    per: str  # device, or node when all devices of a node share it
    latency_us: float
    achievable: float
    since: int
    sources: tuple[Source, ...] = field(hash=False)

    def device_gbs(self, per_node: int) -> float:
        return self.gbs if self.per == "device" else self.gbs / per_node


Row = tuple[Any, ...]


@dataclass(frozen=True)
class Measured:
    """What `shoal bench` saw on a real machine; the planner prefers it to every figure above it."""

    matmul: tuple[Row, ...] = ()  # m, n, k, precision, TFLOP/s
    attention: tuple[Row, ...] = ()  # batch, heads, kv_heads, seq, head_dim, precision, forward and backward TFLOP/s
    memory: tuple[Row, ...] = ()  # bytes, GB/s
    collectives: tuple[Row, ...] = ()  # operation, devices, bytes, seconds
    disk: tuple[Row, ...] = ()  # read or write, GB/s
    norm: tuple[Row, ...] = ()  # of an RMSNorm: bytes, GB/s
    launch_us: float = 0.0  # of a kernel that does nothing, in a row of them; 0: not measured
    when: str = ""
    software: str = ""

    def __bool__(self) -> bool:
        return bool(self.matmul or self.attention or self.memory or self.collectives or self.disk)


@dataclass(frozen=True)
class Device:
    """One accelerator, as software counts it: a die of an MI250X, a chip of a TPU, a whole processor."""

    name: str
    aliases: tuple[str, ...]
    vendor: str
    released: int
    architecture: float  # when the first product with it was to be had, in years: how long software has known it
    peak: dict[str, float] = field(hash=False)  # dense TFLOP/s by precision
    matmul: dict[str, float] = field(hash=False)  # the best product that anybody measured, TFLOP/s
    memory_gb: float  # as vendors print it
    bandwidth_tbs: float
    units: int | None  # SMs, CUs, cores: what a product's tiles are dealt out to
    link: Link
    per_node: int
    scale_out: ScaleOut
    watts: float | None
    prices: tuple[Price, ...]
    sources: tuple[Source, ...] = field(hash=False)
    measured: Measured = field(hash=False)
    assumed: tuple[str, ...]  # figures that the entry leaves out

    @property
    def is_cpu(self) -> bool:
        """A processor, which the trainer computes with in float32."""
        return self.vendor == "any"

    @property
    def memory_bytes(self) -> int:
        """What vendors print as GB is 2**30 bytes: an "80 GB" H100 reports 79.6 of them, a "141 GB" H200 140.4."""
        return int(self.memory_gb * 2**30)

    def ceiling(self, precision: str) -> float | None:
        """TFLOP/s of a large, well-shaped product; None where the device does not compute in `precision`.

        One that nobody measured is as far from its peak as one that somebody did.
        """
        if precision not in self.peak:
            return None
        if precision in self.matmul:
            return self.matmul[precision]
        shares = [self.matmul[p] / self.peak[p] for p in ("bf16", "fp16", "fp8", "fp32") if p in self.matmul]
        typical = TYPICAL_MATMUL.get(self.vendor, TYPICAL_MATMUL_ELSEWHERE)
        return self.peak[precision] * (shares[0] if shares else typical)
