"""Processes keep to cores near their GPU, on a machine that is made up: two sockets, eight GPUs, 2 x 48 threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.devices import here
from shoal.devices.cores import CORES, Share, bind, ranges, read_ranges, shares, threads
from tests.devices.made_up import amd_node, cores, nvidia_node, write

ALL = set(range(96))


def two_sockets(root: Path) -> Path:
    """Cores 0-47, of which core n has the second thread n + 48; even cores are on socket 0, as on many an Intel."""
    for core in range(96):
        write(
            root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list", f"{core % 48},{core % 48 + 48}\n"
        )
    write(root / "sys/devices/system/cpu/online", "0-95\n")
    even, odd = (",".join(str(c) for c in range(first, 96, 2)) for first in (0, 1))
    return cores(root, even, odd)


def of_node(root: Path, processes: int, may: set[int] = ALL) -> list[Share] | None:
    return shares(processes, here.on_the_bus(root), here.all_on_the_bus(root), may, root)


@pytest.mark.parametrize("make", [nvidia_node, amd_node])
def test_each_process_gets_its_part_of_the_cores_of_its_gpus_socket(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    root = two_sockets(make(tmp_path))
    found = of_node(root, 8)
    assert found is not None
    assert all(share.near and len(share.cores) == 12 for share in found)
    assert set().union(*(share.cores for share in found)) == ALL
    assert [{core % 2 for core in share.cores} for share in found] == [{0}] * 4 + [{1}] * 4
    for share in found:
        assert {core % 48 for core in share.cores} == {
            c for core in share.cores for c in [core % 48] if c + 48 in share.cores
        }


def test_two_runs_on_one_machine_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = two_sockets(nvidia_node(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    first = of_node(root, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    second = of_node(root, 2)
    assert first is not None
    assert second is not None
    assert not set().union(*(s.cores for s in first)) & set().union(*(s.cores for s in second))


def test_what_a_scheduler_has_cut_for_this_run_is_shared_by_its_processes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = two_sockets(nvidia_node(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,5")
    may = {0, 48, 2, 50, 1, 49}
    found = of_node(root, 2, may)
    assert found == [Share(frozenset({0, 48, 2, 50}), True), Share(frozenset({1, 49}), True)]
    # Its cores are all on the socket of the first: an even share of them is better than none for the second.
    assert of_node(root, 2, {0, 2, 48, 50}) == [Share(frozenset({0, 48}), False), Share(frozenset({2, 50}), False)]


def test_where_the_kernel_does_not_tell_cores_are_shared_out_evenly(tmp_path: Path) -> None:
    root = cores(nvidia_node(tmp_path, 3, numa=False), "0-7")
    found = of_node(root, 3, set(range(8)))
    assert found is not None
    assert [sorted(share.cores) for share in found] == [[0, 1], [2, 3, 4], [5, 6, 7]]
    assert not any(share.near for share in found)


def test_processes_of_a_cpu_run_are_spread_over_numa_nodes_and_left_alone_on_one(tmp_path: Path) -> None:
    assert shares(2, [], [], set(range(8)), cores(tmp_path / "one", "0-7")) is None
    assert shares(9, [], [], set(range(8)), cores(tmp_path / "two", "0-3", "4-7")) is None, "more processes than cores"
    found = shares(2, [], [], set(range(8)), tmp_path / "two")
    assert found is not None
    assert [ranges(share.cores) for share in found] == ["0-3", "4-7"]


def test_a_container_counts_the_gpus_that_it_was_given_not_the_machines(tmp_path: Path) -> None:
    root = nvidia_node(tmp_path)
    for i in range(2, 8):
        (root / f"dev/nvidia{i}").unlink()
    assert here.on_the_bus(root) == ["0000:05:00.0", "0000:26:00.0"]
    (root / "proc/driver/nvidia/gpus/0000:05:00.0/information").unlink()
    assert here.on_the_bus(root) == [None, None], "nobody is bound by half of the truth"


def test_a_process_is_bound_with_all_its_threads_and_computes_with_as_many(tmp_path: Path) -> None:
    """In a process of its own, which then has one core; the GPUs are made up, the binding is real."""
    may = sorted(os.sched_getaffinity(0))
    cores(nvidia_node(tmp_path, 1, numa=False), ranges(may))
    (tmp_path / "sys/bus/pci/devices/0000:05:00.0/numa_node").write_text("0\n")
    cores(tmp_path, str(may[-1]))
    code = """
import os, sys, threading
from pathlib import Path
from shoal.devices.cores import CORES, bind, threads
wait = threading.Event()
other = threading.Thread(target=wait.wait); other.start()
share = bind(True, 0, 1, Path(sys.argv[1]))
both = [sorted(os.sched_getaffinity(thread)) for thread in (0, other.native_id)]
print(share, *both, os.environ[CORES], threads(64))
wait.set()
"""
    said = subprocess.check_output([sys.executable, "-c", code, str(tmp_path)], text=True, env=_unbound()).strip()
    last = may[-1]
    assert said == f"cores {last} near its GPU [{last}] [{last}] {last} 1"


def _unbound() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in (CORES, "CUDA_VISIBLE_DEVICES")}


def test_nobody_is_bound_twice_and_nobody_without_gpus_on_one_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.sched_getaffinity(0)
    assert bind(False, 0, 1, cores(tmp_path, ranges(before))) is None
    monkeypatch.setenv(CORES, "0-1")
    assert bind(True, 0, 1, cores(nvidia_node(tmp_path, 1), "0")) is None
    assert os.sched_getaffinity(0) == before
    assert (threads(8), threads(1)) == (2, 1)


@pytest.mark.parametrize("text", ["x", "3-1", "0-99999999", "1,,2", "-1", "0-70000"])
def test_what_is_no_list_of_cores_is_empty(text: str) -> None:
    assert read_ranges(text) == set()
    assert read_ranges(" 0-2,5\n") == {0, 1, 2, 5}
    assert ranges({0, 1, 2, 5}) == "0-2,5"
