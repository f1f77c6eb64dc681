"""AMD's GPUs, by the kernel's topology of compute devices (KFD), and their names by amd-smi or rocm-smi.

The topology is the kernel's own (`/sys/class/kfd/kfd/topology/nodes/N`): which GPUs there are, their architecture,
memory, place on the bus and render node. A container sees the topology of the whole machine; what it was given is what
has a render node in its /dev/dri. The tools are asked for names alone, and matched by bus.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.devices.gpu import LARGEST_MEMORY, Gpu, Unanswered, ask, bus_id, whole_in
from shoal.values import BadValue, read_json

NODES = "sys/class/kfd/kfd/topology/nodes"
AMD_SMI = ["amd-smi", "static", "--asic", "--bus", "--vram", "--json"]
ROCM_SMI = ["rocm-smi", "--showproductname", "--showbus", "--showmeminfo", "vram", "--json"]
# Architectures by the 8-bit format that they multiply; those before have none.
E4M3FN, E4M3FNUZ = ("gfx95", "gfx12"), ("gfx94",)
DEVICE_MEMORY = ("1", "2")  # heap_type of banks that are the GPU's own, seen by the host or not
_IN_BRACKETS = re.compile(r"\[(.+)\]")


def listed(root: Path = Path("/"), limit_s: float = 20.0) -> list[Gpu]:
    """Those that this process was given, named where a tool or the kernel names them."""
    found = list(_nodes(root))
    if not found:
        return []
    named = _named(limit_s) if root == Path("/") else []
    return [_with_name(gpu, i, named, root) for i, gpu in enumerate(found)]


def nameless(root: Path = Path("/")) -> list[Gpu]:
    """The same without a tool."""
    return list(_nodes(root))


def _nodes(root: Path) -> Iterator[Gpu]:
    if not (root / "dev/kfd").exists():
        return
    folders = [f for f in (root / NODES).glob("*") if f.name.isdecimal()]
    for folder in sorted(folders, key=lambda f: int(f.name)):
        about = _properties(folder / "properties")
        if not int(about.get("simd_count", "0")):
            continue  # a processor's node, or a GPU that the container's cgroup keeps from us
        if not (root / "dev/dri" / f"renderD{about.get('drm_render_minor', '')}").exists():
            continue
        arch = architecture(int(about.get("gfx_target_version", "0")))
        yield Gpu("amd", f"AMD {arch}", _memory(folder), _bus(about), arch)


def architecture(version: int) -> str:
    """90402 is gfx942, 90010 gfx90a, 110000 gfx1100: major, minor and stepping, the last two in hexadecimal."""
    return f"gfx{version // 10_000}{version // 100 % 100:x}{version % 100:x}"


def _properties(file: Path) -> dict[str, str]:
    """Lines of `name number`. Empty where the kernel does not let us read it."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _memory(folder: Path) -> int | None:
    banks = [_properties(file) for file in folder.glob("mem_banks/*/properties")]
    sizes = [int(bank.get("size_in_bytes", "0")) for bank in banks if bank.get("heap_type") in DEVICE_MEMORY]
    return sum(sizes) or None


def _bus(about: dict[str, str]) -> str | None:
    """location_id is bus, device and function in 16 bits."""
    if "location_id" not in about:
        return None
    at = int(about["location_id"])
    return f"{int(about.get('domain', '0')):04x}:{at >> 8 & 0xFF:02x}:{at >> 3 & 0x1F:02x}.{at & 7}"


def _with_name(gpu: Gpu, place: int, named: list[Gpu], root: Path) -> Gpu:
    by_bus = next((n for n in named if n.bus is not None and n.bus == gpu.bus), None)
    in_order = named[place] if place < len(named) and named[place].bus is None else None
    told = by_bus or in_order
    name = told.name if told else _product_name(gpu, root)
    size = gpu.memory_bytes or (told.memory_bytes if told else None)
    return Gpu("amd", name or gpu.name, size, gpu.bus, gpu.arch)


def _product_name(gpu: Gpu, root: Path) -> str:
    """What the card's own memory says, where it has one (`product_name` of amdgpu)."""
    try:
        return (root / "sys/bus/pci/devices" / str(gpu.bus) / "product_name").read_text(errors="replace").strip()
    except OSError:
        return ""


def _named(limit_s: float) -> list[Gpu]:
    for command, understand in ((AMD_SMI, read_amd_smi), (ROCM_SMI, read_rocm_smi)):
        try:
            if found := understand(read_json(ask(command, limit_s).encode())):
                return found
        except (Unanswered, BadValue):
            continue
    return []


def read_amd_smi(told: Any) -> list[Gpu]:
    """A list of GPUs, since ROCm 7 under `gpu_data`, each with asic.market_name, bus.bdf and vram.size."""
    items = told.get("gpu_data") if isinstance(told, dict) else told
    found = []
    for item in items if isinstance(items, list) else []:
        asic, bus, vram = (_section(item, name) for name in ("asic", "bus", "vram"))
        if isinstance(name := asic.get("market_name"), str) and name not in ("", "N/A"):
            found.append(Gpu("amd", name, _mib(vram.get("size")), bus_id(str(bus.get("bdf", "")))))
    return found


def read_rocm_smi(told: Any) -> list[Gpu]:
    """An object a card, all values text. The name is `Card Series` (before ROCm 6 `Card series`), with the family's
    code name around it on older ones: `Arcturus GL-XL [AMD Instinct MI100]`."""
    found = []
    cards = told.items() if isinstance(told, dict) else ()
    for card, about in sorted(((c, a) for c, a in cards if re.fullmatch(r"card\d{1,4}", str(c))), key=_number):
        fields = {str(k).lower(): str(v) for k, v in about.items()} if isinstance(about, dict) else {}
        series = fields.get("card series", "")
        within = _IN_BRACKETS.search(series)
        size = fields.get("vram total memory (b)", "")
        memory = whole_in(size)
        found.append(Gpu("amd", (within[1] if within else series) or card, memory, bus_id(fields.get("pci bus", ""))))
    return found


def _number(card: tuple[str, Any]) -> int:
    return int(card[0].removeprefix("card"))


def _section(item: Any, name: str) -> dict[str, Any]:
    part = item.get(name) if isinstance(item, dict) else None
    return part if isinstance(part, dict) else {}


def _mib(size: Any) -> int | None:
    """`196592 MB`, or that as an object; the tool's MB are MiB."""
    value = str(size.get("value") if isinstance(size, dict) else size).split(" ")[0]
    mib = whole_in(value, LARGEST_MEMORY >> 20)
    return None if mib is None else mib << 20


def without_e4m3fn(name: str, arch: str) -> str | None:
    """Why `train.precision: fp8` does not go there; None where it may."""
    if arch.startswith(E4M3FN):
        return None
    return (
        f"train.precision fp8 is e4m3fn and e5m2 in Shoal, and {name} ({arch}) does not multiply those (MI350X and "
        "MI355X do; MI300X has e4m3fnuz, another format): take bf16."
    )


def problem(asked: int, limit_s: float, root: Path = Path("/")) -> str | None:
    """Why so many GPUs cannot be used here, as a sentence without its full stop."""
    if not os.access(root / "dev/kfd", os.R_OK | os.W_OK):
        return (
            f"{asked} GPUs were asked for and {root / 'dev/kfd'} may not be opened: put the user into the group that "
            "owns it (render, or video)"
        )
    seen = len(listed(root, limit_s))
    return None if seen >= asked else f"{asked} GPUs were asked for and {seen} can be seen"
