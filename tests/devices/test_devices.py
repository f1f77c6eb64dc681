"""Which GPUs a machine has, by files and tools of its drivers; recorded, since no machine here has AMD's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import devices
from shoal.devices import amd, gpu, here, nvidia, on_torch, torch_build
from shoal.devices.gpu import Gpu, allowed, bus_id
from shoal.errors import SetupError
from shoal.plan.catalogue import find
from tests.devices.made_up import BUSES, amd_node, nvidia_node

RECORDED = Path(__file__).parent / "recorded"


def recorded(name: str) -> Any:
    return json.loads((RECORDED / name).read_text())


@pytest.fixture(autouse=True)
def all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    for names in (*gpu.CHOOSERS["nvidia"], *gpu.CHOOSERS["amd"]):
        for name in names:
            monkeypatch.delenv(name, raising=False)


def test_what_nvidia_smi_tells() -> None:
    told = "NVIDIA H200, 143771, 00000000:19:00.0, GPU-6a\nNVIDIA GB10, [N/A], 0000000F:01:00.0, GPU-7b\n\nno GPU\n"
    h200, gb10 = nvidia.read(told)
    assert h200 == Gpu("nvidia", "NVIDIA H200", 143771 << 20, "0000:19:00.0", uuid="GPU-6a")
    assert (gb10.memory_bytes, gb10.bus) == (None, "000f:01:00.0")


@pytest.mark.parametrize(
    ("read", "file", "catalogued", "gib"),
    [
        (amd.read_amd_smi, "amd-smi-6.4-mi300x.json", "MI300X", 192),
        (amd.read_amd_smi, "amd-smi-7.2-mi355x.json", "MI355X", 288),
        (amd.read_rocm_smi, "rocm-smi-6.2-mi300x.json", "MI300X", 192),
        (amd.read_rocm_smi, "rocm-smi-6.0-mi250x.json", "MI250X", 64),
    ],
)
def test_what_amds_tools_tell_is_a_device_of_the_catalogue(read: Any, file: str, catalogued: str, gib: int) -> None:
    found = read(recorded(file))
    assert len(found) == 8
    assert {find(one.name).name for one in found} == {catalogued}
    assert all(round(one.memory_bytes / 2**30) == gib for one in found)
    assert [one.bus for one in found] == [f"0000:{bus}:00.0" for bus in BUSES]
    assert find(catalogued).peak["bf16"] > 100


def test_an_old_tools_name_is_the_one_in_brackets() -> None:
    (found,) = amd.read_rocm_smi(recorded("rocm-smi-4.5-mi100.json"))
    assert (found.name, found.bus) == ("AMD Instinct MI100", None)


@pytest.mark.parametrize("told", [None, [], {}, 3, "x", [1, None], {"gpu_data": 7}, {"card0": []}, {"card0": {"a": 1}}])
def test_what_is_no_answer_of_a_tool_is_no_gpu_and_no_error(told: Any) -> None:
    assert amd.read_amd_smi(told) == []
    assert all(one.memory_bytes is None for one in amd.read_rocm_smi(told))


def test_amds_gpus_are_counted_by_the_kernels_topology_and_what_the_container_was_given(tmp_path: Path) -> None:
    found = amd.nameless(amd_node(tmp_path, gpus=8, given=3))
    assert [(one.arch, one.bus) for one in found] == [("gfx942", f"0000:{bus}:00.0") for bus in ("05", "26", "46")]
    assert found[0].memory_bytes == 206_141_652_992
    assert here.vendor(tmp_path) == "amd"
    assert here.visible_gpus(tmp_path) == 3
    assert [amd.architecture(v) for v in (90010, 90402, 90500, 110000)] == ["gfx90a", "gfx942", "gfx950", "gfx1100"]


def test_a_gpu_is_named_by_a_tool_and_matched_by_its_place_on_the_bus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    amd_node(tmp_path / "node", gpus=2, given=2)
    named = list(reversed(recorded("amd-smi-6.4-mi300x.json")))
    named[-1]["asic"]["market_name"] = "AMD Instinct MI325X"  # the one at 05
    program = tmp_path / "bin" / "amd-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n[ \"$1\" = static ] && cat <<'E'\n{json.dumps(named)}\nE\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    tools = amd._named(20.0)
    found = [amd._with_name(one, i, tools, tmp_path / "node") for i, one in enumerate(amd.nameless(tmp_path / "node"))]
    assert [one.name for one in found] == ["AMD Instinct MI325X", "AMD Instinct MI300X"]
    assert found[0].arch == "gfx942"
    program.write_text("#!/bin/sh\necho broken; exit 3\n")
    assert amd._named(20.0) == []


def test_without_a_tool_the_cards_own_name_or_its_architecture_is_told(tmp_path: Path) -> None:
    amd_node(tmp_path, gpus=2, given=2)
    (tmp_path / "sys/bus/pci/devices/0000:05:00.0/product_name").write_text("AMD Instinct MI300X OAM\n")
    assert [one.name for one in amd.listed(tmp_path)] == ["AMD Instinct MI300X OAM", "AMD gfx942"]


@pytest.mark.parametrize(
    ("maker", "environ", "buses"),
    [
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "3,1"}, ["65", "26"]),
        ("nvidia", {"CUDA_VISIBLE_DEVICES": ""}, []),
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "0,-1,2"}, ["05"]),
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "2,99,0"}, ["46"]),
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "GPU-2222,0"}, ["46", "05"]),
        ("nvidia", {"ROCR_VISIBLE_DEVICES": "0"}, ["05", "26", "46", "65"]),
        ("amd", {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, ["65"]),
        ("amd", {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}, ["26"]),
        ("amd", {"CUDA_VISIBLE_DEVICES": "0"}, ["05"]),
    ],
)
def test_what_a_process_may_use_is_chosen_as_its_runtime_chooses(
    maker: str, environ: dict[str, str], buses: list[str], tmp_path: Path
) -> None:
    root = (nvidia_node if maker == "nvidia" else amd_node)(tmp_path, 4)
    found = (nvidia if maker == "nvidia" else amd).nameless(root)
    assert [str(one.bus)[5:7] for one in allowed(found, environ)] == buses


def test_slices_and_ids_that_no_driver_gave_still_count() -> None:
    four = [Gpu("nvidia", "NVIDIA H200")] * 4
    assert len(allowed(four, {"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"})) == 2
    assert len(allowed(four[:1], {"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"})) == 1


def test_nothing_is_started_to_count_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise AssertionError("a tool was started")

    monkeypatch.setattr(gpu, "ask", fail)
    monkeypatch.setattr(nvidia, "ask", fail)
    monkeypatch.setattr(amd, "ask", fail)
    assert here.visible_gpus(tmp_path) == 0
    assert here.visible_gpus(nvidia_node(tmp_path / "n", 8)) == 8
    assert here.visible_gpus(amd_node(tmp_path / "a")) == 8
    assert here.on_the_bus(tmp_path / "n")[0] == "0000:05:00.0"


def test_a_bus_is_named_as_sysfs_names_it() -> None:
    assert bus_id("00000000:C4:00.0") == bus_id("C4:00.0") == "0000:c4:00.0"
    assert bus_id("c4") is None


def test_a_user_who_may_not_open_amds_device_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = amd_node(tmp_path, gpus=4, given=4)
    assert amd.problem(4, 1.0, root) is None
    assert amd.problem(8, 1.0, root) == "8 GPUs were asked for and 4 can be seen"
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "dev/kfd may not be opened: put the user into the group" in str(amd.problem(4, 1.0, root))


def test_what_torch_was_built_for_is_read_without_importing_it() -> None:
    rocm = "__version__ = '2.13.0+rocm7.1'\ncuda: Optional[str] = None\nhip: Optional[str] = '7.1.25424'\n"
    assert torch_build.read(rocm) == {"__version__": "2.13.0+rocm7.1", "hip": "7.1.25424"}
    assert torch_build.read("something else") is None
    built = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"
    assert (torch_build.build(), torch_build.version()) == (built, torch.__version__)


def test_one_place_asks_drivers() -> None:
    """Tools and device files of drivers are named in shoal/devices alone (and in what a person is told)."""
    src = Path(devices.__file__).parent.parent
    marks = ['"nvidia-smi"', '"rocm-smi"', '"amd-smi"', "/dev/nvidia", "nvidia[0-9]", '"/dev/kfd"']
    marks += ["get_device_capability"]
    files = [file for file in src.rglob("*.py") if file.parent != src / "devices"]
    assert [(file.name, mark) for file in files for mark in marks if mark in file.read_text()] == []


class OneGpu:
    """What torch's HIP build says of one."""

    def __init__(self, arch: str) -> None:
        self.gcnArchName = f"{arch}:sramecc+:xnack-"


@pytest.mark.parametrize(
    ("arch", "kind"), [("gfx90a", None), ("gfx942", torch.float8_e4m3fnuz), ("gfx950", torch.float8_e4m3fn)]
)
def test_eight_bits_on_amd_are_told_by_architecture_not_by_capability(
    arch: str, kind: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 4))  # an H100 says 9.0
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "AMD Instinct")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: OneGpu(arch))
    device = torch.device("cuda", 0)
    assert on_torch.eight_bits(device) is kind
    assert not on_torch.groups_products(device)
    assert not on_torch.has_tf32(device)
    if kind is torch.float8_e4m3fn:
        on_torch.refuse_without_e4m3fn(device)
    else:
        with pytest.raises(SetupError, match=rf"AMD Instinct \({arch}\) does not multiply those .*: take bf16\."):
            on_torch.refuse_without_e4m3fn(device)
