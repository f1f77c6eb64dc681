"""NVIDIA's GPUs, by the driver's files and nvidia-smi."""

from __future__ import annotations

from pathlib import Path

from shoal.devices.gpu import LARGEST_MEMORY, Gpu, Unanswered, ask, bus_id, whole_in

QUERY = ["nvidia-smi", "--query-gpu=name,memory.total,pci.bus_id,uuid", "--format=csv,noheader,nounits"]


def count(root: Path = Path("/")) -> int:
    """Without a tool: the driver makes a file for each."""
    return sum(1 for file in (root / "dev").glob("nvidia*") if file.name[6:].isdecimal())


def listed() -> list[Gpu]:
    """As nvidia-smi tells; Unanswered where it does not."""
    return read(ask(QUERY))


def read(told: str) -> list[Gpu]:
    """`NVIDIA H200, 143771, 00000000:19:00.0, GPU-6a…`, a line each; memory in MiB, or [N/A] where it is the host's."""
    found = []
    for line in told.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 4 or not fields[0]:
            continue
        name, memory, bus, uuid = fields
        mib = whole_in(memory, LARGEST_MEMORY >> 20)
        size = None if mib is None else mib << 20
        found.append(Gpu("nvidia", name[:200], size, bus_id(bus), uuid=uuid or None))
    return found


def nameless(root: Path = Path("/")) -> list[Gpu]:
    """What the driver's files tell without a tool: name, bus and id, no memory. Of each /proc has a file `information`
    with lines such as `Model: NVIDIA H200`, `GPU UUID: GPU-6a…`, `Bus Location: 0000:19:00.0`."""
    found = []
    for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        try:
            said = dict(line.split(":", 1) for line in file.read_text(errors="replace").splitlines() if ":" in line)
        except OSError:
            continue
        about = {key.strip(): value.strip() for key, value in said.items()}
        if not (root / "dev" / f"nvidia{about.get('Device Minor')}").exists():
            continue  # the machine's, and not given to this container
        bus = bus_id(about.get("Bus Location", "") or file.parent.name)
        found.append(Gpu("nvidia", about.get("Model", "NVIDIA GPU"), None, bus, uuid=about.get("GPU UUID")))
    there = count(root)
    return found if len(found) == there else [Gpu("nvidia", "NVIDIA GPU")] * there


def problem(asked: int, limit_s: float) -> str | None:
    """Why so many GPUs cannot be used here, as a sentence without its full stop."""
    try:
        told = ask(["nvidia-smi", "-L"], limit_s)
    except Unanswered as e:
        return f"{asked} GPUs were asked for and {e}" if "not there" in str(e) else str(e)
    seen = sum(line.startswith("GPU ") for line in told.splitlines())
    return None if seen >= asked else f"{asked} GPUs were asked for and {seen} can be seen"
