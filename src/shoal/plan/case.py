"""What is predicted: one training run, or a whole column of them at once.

The cost model is written over columns: each name below is an array with a number for every case, so that a search of a
hundred thousand layouts and a fit on hundreds of published runs are a few array operations each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.plan.machine import Machine
from shoal.plan.net import Net
from shoal.plan.software import Software

Column = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

PRECISIONS = ("bf16", "fp8", "mxfp8", "fp4")
WIDE = "fp32"


@dataclass(frozen=True)
class Plan:
    """How a model is laid over devices. Data parallelism is what the other axes leave."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    chunks: int = 1  # pieces of the model that a pipeline's device holds
    zero: int = 1  # 0: copies; 1: the optimizer is sharded; 2: gradients too; 3: weights too (FSDP)
    shard: int = 0  # devices that share a copy where it is sharded; 0: all of data parallelism
    micro_batch: int = 1
    recompute: float | None = 0.0  # of a layer's forward work, what is done again; None: as little as fits
    dropped: float | None = None  # of a layer's activations, what is not kept; None: as much as is done again
    under_way: float | None = None  # micro-batches whose activations the first stage holds; None: as 1F1B
    hidden_ep: bool = False  # expert traffic goes on beside other work
    scatters: bool = False  # FSDP that keeps gradients whole sends them to their shards with each micro-batch instead
    all_to_all: bool = False  # context parallelism exchanges heads for tokens; else keys and values go around a ring


@dataclass(frozen=True)
class Case:
    net: Net
    machine: Machine
    software: Software
    plan: Plan
    devices: int
    batch: int  # windows of a step
    seq: int
    precision: str = "bf16"
    seen: float | None = None  # tokens that attention computes for each, on average; None: half a window


@dataclass(frozen=True)
class Cases:
    # The model.
    layers: Column
    dim: Column
    heads: Column
    q_dim: Column
    kv_dim: Column
    mixer_share: Column  # of the matrices that these widths would have, what there is
    mixing_bytes: Column  # of mixers that do not attend: through memory, a token
    ffn_dim: Column
    matrices: Column
    vocab: Column
    tied: Flags
    experts: Column
    top_k: Column
    expert_dim: Column
    shared: Column
    sparse_layers: Column
    params: Column
    # The work and how it is laid out.
    devices: Column
    batch: Column
    seq: Column
    seen: Column
    tp: Column
    pp: Column
    cp: Column
    ep: Column
    chunks: Column
    zero: Column
    shard: Column
    micro_batch: Column
    recompute: Column  # not a number: as little as fits
    attention_again: Column  # the same of attention alone; not a number: as of the rest
    dropped: Column
    under_way: Column
    kept: Column  # bytes a token and layer, where the trainer's own formula knows them; else not a number
    hidden_ep: Flags
    scatters: Flags
    all_to_all: Flags
    low: Column  # 0: 16 bits, or 32; else the place in PRECISIONS
    wide: Column  # bytes of a number that goes through memory, or to another device: 2, or 4 in 32 bits
    # The machine.
    matmul: Column
    matmul_low: Column
    bandwidth: Column
    memory: Column
    link: Column
    per_peer: Column
    link_latency: Column
    in_switch: Flags
    domain: Column
    nic: Column
    nic_latency: Column
    units: Column
    sends_by_units: Flags
    age: Column  # years between the architecture and the software
    # The software.
    fused_attention: Flags
    native_attention: Flags
    hides_tp: Flags
    hides_dp: Flags
    fused: Flags
    stream_bytes: Column
    passes: Column
    host: Column
    sends_once: Flags
    narrow_gradients: Flags
    logit_bytes: Column
    logit_moved: Column  # not a number: as fitted
    param_moved: Column
    cast_moved: Column
    narrow_head: Flags
    balances: Flags
    gathers_once: Flags
    ring_gradient_bytes: Column
    merges: Flags

    @staticmethod
    def of(cases: Sequence[Case]) -> Cases:
        rows = [_row(case) for case in cases]
        return Cases(**{f.name: np.array([row[f.name] for row in rows]) for f in fields(Cases)})

    @staticmethod
    def spread(case: Case, columns: Mapping[str, npt.NDArray[Any]]) -> Cases:
        """One case many times over, with these columns of its own."""
        size = len(next(iter(columns.values())))
        row = _row(case)
        return Cases(**{f.name: columns.get(f.name, np.full(size, row[f.name])) for f in fields(Cases)})

    @property
    def dp(self) -> Column:
        return self.devices / (self.tp * self.pp * self.cp)

    @property
    def micro_batches(self) -> Column:
        """That each device computes one after the other in a step."""
        return np.maximum(1.0, np.round(self.batch / (self.dp * self.micro_batch)))

    @property
    def tokens(self) -> Column:
        """Of a micro-batch on a device."""
        return self.micro_batch * self.seq / self.cp

    def take(self, which: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> Cases:
        return Cases(**{f.name: getattr(self, f.name)[which] for f in fields(Cases)})


def _row(case: Case) -> dict[str, float | bool]:
    net, machine, software, plan = case.net, case.machine, case.software, case.plan
    year = machine.architecture + 2.5 if software.year is None else software.year
    wide = case.precision == WIDE
    low = 0 if wide else PRECISIONS.index(case.precision)
    matmul = machine.matmul32 if wide else machine.matmul
    # Kernels that use what all GPUs have fit those of their own time: FlashAttention 2 was made for Ampere.
    native = software.attention == 2 or (software.attention == 1 and machine.architecture < 2022)
    dp = case.devices // (plan.tp * plan.pp * plan.cp)
    return {
        "layers": net.layers,
        "dim": net.dim,
        "heads": net.heads,
        "q_dim": net.q_dim,
        "kv_dim": net.kv_dim,
        "mixer_share": net.mixer_share,
        "ffn_dim": net.ffn_dim,
        "matrices": net.matrices,
        "vocab": net.vocab,
        "tied": net.tied,
        "experts": net.experts,
        "top_k": net.top_k,
        "expert_dim": net.expert_dim,
        "shared": net.shared,
        "sparse_layers": net.sparse_layers,
        "params": net.params,
        "devices": case.devices,
        "batch": case.batch,
        "seq": case.seq,
        "mixing_bytes": net.mixing_bytes,
        "seen": (case.seq / 2 * net.attention_share if case.seen is None else case.seen) * net.attended,
        "tp": plan.tp,
        "pp": plan.pp,
        "cp": plan.cp,
        "ep": plan.ep,
        "chunks": plan.chunks,
        "zero": plan.zero,
        "shard": plan.shard or max(1, dp * plan.cp),
        "micro_batch": plan.micro_batch,
        "recompute": float("nan") if plan.recompute is None else plan.recompute,
        "attention_again": float("nan"),
        "dropped": next((x for x in (plan.dropped, plan.recompute) if x is not None), float("nan")),
        "under_way": float("nan") if plan.under_way is None else plan.under_way,
        "kept": float("nan"),
        "hidden_ep": plan.hidden_ep,
        "scatters": plan.scatters,
        "all_to_all": plan.all_to_all,
        "low": low,
        "wide": 4.0 if wide else 2.0,
        "matmul": matmul,
        "matmul_low": (matmul, machine.matmul8, machine.matmul8, machine.matmul4)[low],
        "bandwidth": machine.bandwidth,
        "memory": machine.memory,
        "link": machine.link,
        "per_peer": machine.per_peer,
        "link_latency": machine.link_latency,
        "in_switch": machine.in_switch,
        "domain": machine.domain,
        "nic": machine.nic,
        "nic_latency": machine.nic_latency,
        "units": machine.units,
        "sends_by_units": machine.sends_by_units,
        "age": max(0.0, year - machine.architecture),
        "fused_attention": software.attention != 0,
        "native_attention": native,
        "hides_tp": software.hides_tp,
        "hides_dp": software.hides_dp,
        "fused": software.fused,
        "stream_bytes": software.stream_bytes,
        "passes": software.passes,
        "host": software.host,
        "sends_once": software.sends_once,
        "narrow_gradients": software.narrow_gradients,
        "logit_bytes": software.logit_bytes,
        **{name: _or_nan(getattr(software, name)) for name in ("logit_moved", "param_moved", "cast_moved")},
        "narrow_head": software.narrow_head,
        "balances": software.balances,
        "gathers_once": software.gathers_once,
        "ring_gradient_bytes": software.ring_gradient_bytes,
        "merges": software.merges,
    }


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value
