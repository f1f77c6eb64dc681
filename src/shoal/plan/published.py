"""Runs that others have published, as cases: a table with the columns of `published_runs.csv`."""

from __future__ import annotations

import csv
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.errors import SpecError
from shoal.plan.case import Case, Plan
from shoal.plan.catalogue import Device, described_scale_out, find
from shoal.plan.machine import Machine
from shoal.plan.net import Net
from shoal.plan.software import software

NEEDED = ("gpu_type", "n_gpus", "layers", "hidden", "heads", "seq")


@dataclass(frozen=True)
class Published:
    row: str
    source: str
    model: str
    machine: str
    case: Case
    tokens_s: float | None  # a device
    memory_gb: float | None

    @property
    def dense(self) -> bool:
        return self.case.net.experts == 0


@dataclass(frozen=True)
class Refused:
    row: str
    source: str
    machine: str
    why: str


def read(path: Path, folders: Sequence[Path] = ()) -> Iterator[Published | Refused]:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:  # spreadsheets begin a file with a mark
            rows = csv.DictReader(file)
            missing = [name for name in NEEDED if name not in (rows.fieldnames or ())]
            if missing:
                raise SpecError(
                    f"{path}: the column {missing[0]} is missing; a table of runs has at least {', '.join(NEEDED)}."
                )
            for number, row in enumerate(rows, 1):
                yield _published({k: (v or "").strip() for k, v in row.items() if k}, str(number), folders)
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        why = e.strerror if isinstance(e, OSError) else f"it is no table in UTF-8 ({e})"
        raise SpecError(f"{path} cannot be read: {why}.") from e


class _Unclear(Exception):
    pass


def _published(row: dict[str, str], number: str, folders: Sequence[Path]) -> Published | Refused:
    name, source = row.get("row_id") or number, row.get("source", "")
    try:
        device = find(row["gpu_type"], folders)
        device = replace(device, scale_out=described_scale_out(device, row.get("fabric", ""), folders))
        net = _net(row)
        case = _case(row, net, device, Machine.of(device, folders=folders))
        speed = _speed(row, case)
        memory = _number(row, "mem_GB")
        if speed is None and memory is None:
            raise _Unclear("neither a speed nor a memory is stated")
        return Published(name, source, row.get("model", ""), row["gpu_type"], case, speed, memory)
    except (_Unclear, SpecError) as e:
        return Refused(name, source, row["gpu_type"], str(e))


def _case(row: dict[str, str], net: Net, device: Device, machine: Machine) -> Case:
    text = f"{row.get('software', '')} {row.get('source', '')}"
    program = software(text, machine.architecture)
    devices = _whole(row, "n_gpus")
    tp, pp, cp = (_whole(row, name, 1) for name in ("tp", "pp", "cp"))
    if devices % (tp * pp * cp):
        raise _Unclear(f"tp {tp} x pp {pp} x cp {cp} does not divide {devices} devices")
    dp = devices // (tp * pp * cp)
    sharding = row.get("sharding", "").lower()
    zero = _zero(sharding, device)
    micro = _whole(row, "microbatch", 1)
    batch = _number(row, "global_batch")
    if batch is None:
        seconds, speed = _number(row, "step_time_s"), _number(row, "tokens_s_gpu")
        batch = float(micro * dp)
        if seconds is not None and speed is not None:
            batch = seconds * speed * devices / _whole(row, "seq")
    again, dropped = _recompute(row.get("recompute", ""), program.hides_tp)
    plan = Plan(
        tp=tp,
        pp=pp,
        cp=cp,
        ep=_whole(row, "ep", 1) if net.experts else 1,
        chunks=_whole(row, "vpp", 1) if pp > 1 else 1,
        zero=zero,
        shard=_shard(sharding, dp * cp, device),
        micro_batch=min(micro, max(1, round(batch / dp))),
        recompute=again,
        dropped=dropped,
        hidden_ep="ep overlap on" in row.get("notes", "").lower(),
    )
    return Case(net, machine, program, plan, devices, round(batch), _whole(row, "seq"), _precision(row))


def _net(row: dict[str, str]) -> Net:
    for name in ("layers", "hidden", "heads", "seq"):
        if _number(row, name) is None:
            raise _Unclear(f"the model's {name} is not stated" if name != "seq" else "no sequence length is stated")
    layers, dim, heads = (_whole(row, name) for name in ("layers", "hidden", "heads"))
    kv_heads, vocab = _whole(row, "kv_heads", heads), _whole(row, "vocab", 50304)
    experts, top_k = _whole(row, "experts", 0), _whole(row, "topk", 0)
    width = _number(row, "ffn")
    stated = _number(row, "params_B")

    def built(matrices: int, tied: bool, head_dim: int) -> Net:
        ffn = round(width) if width else 4 * dim
        sparse = (experts, top_k, ffn) if experts else ()
        return Net(layers, dim, heads, kv_heads, head_dim, ffn, matrices, vocab, tied, *sparse)

    # A table says neither whether the feed-forward is gated nor how wide a head is: the parameters do.
    usual = max(1, dim // heads)
    ways = list(itertools.product((3, 2) if kv_heads < heads or experts else (2, 3), (False, True), (usual, 128, 64)))
    if stated is None or (width is None and not experts):
        return built(*ways[0])

    def off(way: tuple[int, bool, int]) -> float:
        error = abs(math.log(built(*way).params / (stated * 1e9)))
        return error + 0.02 * (way[2] != usual) + 0.001 * ways.index(way)

    return built(*min(ways, key=off))


def _speed(row: dict[str, str], case: Case) -> float | None:
    """Tokens a second and device: as stated, or from the step's time, or from FLOP/s by the source's own counting."""
    if (stated := _number(row, "tokens_s_gpu")) is not None:
        return stated
    if (step := _number(row, "step_time_s")) is not None:
        if _number(row, "global_batch") is None:
            return None
        return case.batch * case.seq / step / case.devices
    teraflops = _number(row, "tflops_gpu")
    if teraflops is None:
        if (mfu := _number(row, "mfu_pct")) is None:
            return None
        teraflops = mfu / 100 * case.machine.peak / 1e12
    counting = row.get("flops_convention", "").lower()
    halved = "halved" in counting and "not halved" not in counting
    flops = case.net.flops_per_token(case.seq, causal=halved)
    if "recompute" in counting:
        flops *= 4 / 3
    return teraflops * 1e12 / flops


def _recompute(text: str, vendor: bool) -> tuple[float | None, float | None]:
    """Of a layer's forward work what is done again, and of its activations what is not kept."""
    words = text.lower()
    if re.match(r"(full|yes|true|on)\b", words):
        return 1.0, 1.0
    if not words or re.search(r"not stated|unknown|n/a", words):
        return None, None
    if re.match(r"(none|no|off|false)\b", words):
        return 0.0, 0.0
    if vendor:  # single modules by name: attention's inside, norms, activations of experts
        return (0.5, 0.6) if re.search(r"\b(mlp|moe)\b", words) else (0.05, 0.1)
    return 0.12, 0.45  # selective: every other product, and all that is cheap


def _zero(sharding: str, device: Device) -> int:
    stage = re.search(r"zero[-_ ]*(?:stage)?[-_ ]*([0-3])", sharding)
    if stage is not None:
        return int(stage[1])
    if "grad_op" in sharding:
        return 2
    if re.search(r"fsdp|hsdp|full_shard|hybrid", sharding):
        return 3
    if "distributed optimizer" in sharding:
        return 1
    if re.search(r"ddp|none", sharding):
        return 0
    return 3 if device.vendor == "google" else 1


def _shard(sharding: str, group: int, device: Device) -> int:
    """Devices that share one copy: all, but where slices or nodes each have one."""
    if "hsdp" in sharding or "hybrid" in sharding:
        return min(group, device.per_node)
    if "within slice" in sharding:
        return min(group, device.link.domain)
    return 0


def _precision(row: dict[str, str]) -> str:
    words = row.get("precision", "").lower()
    if "bf16 or" in words:
        return "bf16"
    if "fp4" in words:
        return "fp4"
    if "mx" in words and "fp8" in words:
        return "mxfp8"
    return "fp8" if "fp8" in words or "float8" in words else "bf16"


def _number(row: dict[str, str], name: str) -> float | None:
    try:
        value = float(row.get(name, "").replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def _whole(row: dict[str, str], name: str, default: int | None = None) -> int:
    value = _number(row, name)
    if value is None:
        if default is None:
            raise _Unclear(f"{name} is not stated")
        return default
    return max(1, round(value))
