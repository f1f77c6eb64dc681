"""A machine that is not there: the files by which a kernel and its drivers tell of GPUs, cores and memory."""

from __future__ import annotations

from pathlib import Path

BUSES = ["05", "26", "46", "65", "85", "a6", "c6", "e5"]
GFX = {"gfx90a": 90010, "gfx942": 90402, "gfx950": 90500, "gfx1036": 100306}


def write(file: Path, text: str = "") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def amd_node(root: Path, gpus: int = 8, arch: str = "gfx942", memory: int = 206_141_652_992, given: int = 8) -> Path:
    """Two processors and `gpus` GPUs of AMD, of which the first `given` were given to this container."""
    write(root / "dev/kfd")
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    for node in range(2):
        write(nodes / str(node) / "properties", "cpu_cores_count 96\nsimd_count 0\ngfx_target_version 0\n")
        write(nodes / str(node) / "mem_banks/0/properties", "heap_type 0\nsize_in_bytes 1623497637888\n")
    for i in range(gpus):
        at = nodes / str(2 + i)
        about = {"cpu_cores_count": 0, "simd_count": 1216, "gfx_target_version": GFX[arch], "domain": 0}
        about |= {"location_id": int(BUSES[i], 16) << 8, "drm_render_minor": 128 + 8 * i, "num_xcc": 8}
        write(at / "properties", "".join(f"{name} {value}\n" for name, value in about.items()))
        write(at / "mem_banks/0/properties", f"heap_type 1\nsize_in_bytes {memory}\nflags 0\nwidth 8192\n")
        pci(root, f"0000:{BUSES[i]}:00.0", numa=i // 4)
        if i < given:
            write(root / f"dev/dri/renderD{128 + 8 * i}")
    return root


def nvidia_node(root: Path, gpus: int = 8, numa: bool = True) -> Path:
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{i}" for i in range(gpus))):
        write(root / "dev" / name)
    for i in range(gpus):
        bus = f"0000:{BUSES[i]}:00.0"
        said = f"Model: \t\t NVIDIA H200\nIRQ:   \t\t 123\nGPU UUID: \t GPU-{i}{i}{i}{i}\nBus Location: \t {bus}\n"
        write(root / f"proc/driver/nvidia/gpus/{bus}/information", said + f"Device Minor: \t {i}\n")
        pci(root, bus, numa=i // 4 if numa else -1)
    return root


def pci(root: Path, bus: str, numa: int) -> None:
    write(root / f"sys/bus/pci/devices/{bus}/numa_node", f"{numa}\n")


def cores(root: Path, *lists: str) -> Path:
    """NUMA nodes, each with its cores: `0-47,96-143`."""
    for node, text in enumerate(lists):
        write(root / f"sys/devices/system/node/node{node}/cpulist", f"{text}\n")
    return root
