"""`shoal bench`: measures this machine and writes an entry that the catalogue prefers."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.bench import collectives, entry, products, publish, shapes, table
from shoal.bench.machine import Machine, this_machine
from shoal.cli.main import main
from shoal.plan.catalogue import find
from shoal.plan.hardware_types import Device, Measured
from tests.forked import fork
from tests.patience import Stopwatch

H200 = Machine(torch.device("cuda", 0), "NVIDIA H200", "nvidia", 132, 139.8, 1, 60 << 20, "torch 2.11.0")
SEEN = Measured(
    matmul=(
        (8192, 8192, 8192, "bf16", 780.0),
        (8192, 8192, 128, "bf16", 210.0),
        (8192, 8192, 8192, "fp32", 51.5),
        (8192, 8192, 8192, "fp8", 1400.0),
        (8192, 8192, 8192, "fp8 by row", 1290.0),
    ),
    attention=((2, 32, 8, 4096, 128, "bf16", 480.5, 390.25),),
    memory=((8 << 20, 5100.0), (2 << 30, 4280.0)),
    disk=(("write", 1.5), ("read", 2.0)),
    launch_us=4.2,
    when="2026-11-12",
    software="torch 2.11.0",
)
OF_CPU = ["bench", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _no_folder_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_HARDWARE", raising=False)


def read_back(machine: Machine, seen: Measured, known: Device | None, name: str | None = None) -> Device:
    made = entry.entry(machine, seen, known, name, host_gbs=25.0)
    return publish.read_back(made["name"], publish.text_of(made), [])


def test_a_bench_of_this_machine_is_what_the_catalogue_then_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*OF_CPU, "--seconds", "0.3", "--processes", "1", "--json", "--workspace", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    told: dict[str, Any] = json.loads(out)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["cpu.toml"]  # no trace of the disk's
    ours, theirs = find("cpu", [tmp_path / "hardware"]), find("cpu")
    assert ours.measured
    assert not theirs.measured
    assert json.loads(json.dumps(asdict(ours.measured))) == told["measured"]
    best = {p: row[4] for p, row in products.best(ours.measured.matmul).items()}
    assert ours.ceiling("fp32") == best["fp32"] != theirs.ceiling("fp32")
    assert 1e-4 < best["fp32"] < 100
    assert all(ours.matmul[p] <= ours.peak[p] for p in ours.matmul)
    assert ours.bandwidth_tbs == told["bandwidth_tbs"] == pytest.approx(max(ours.measured.memory)[1] / 1e3)
    assert 1e-4 < ours.bandwidth_tbs < 10
    assert ours.units == torch.get_num_threads()
    measured = ours.measured
    for rows in (measured.matmul, measured.attention, measured.memory, measured.norm, measured.disk):
        assert rows
        assert all(value > 0 for row in rows for value in row if isinstance(value, float))
    assert {row[0] for row in measured.disk} == {"read", "write"}
    assert 0.01 < measured.launch_us < 1e4
    assert find(this_machine("cpu").name, [tmp_path / "hardware"]).measured  # also by what the processor calls itself
    lines = [line.split()[0] for line in err.splitlines() if not line.startswith("shoal:")]
    assert lines[1:] == ["collectives", "matmul", "attention", "memory", "norm", "launch", "disk"]


def test_a_file_of_ones_own_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "hardware" / "cpu.toml"
    mine.parent.mkdir()
    mine.write_text('[[device]]\nname = "CPU"\nwatts = 15\n')
    before = mine.read_bytes()
    for command in ([*OF_CPU, "--workspace", str(tmp_path)], [*OF_CPU, "--out", str(mine)]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert "was not written by `shoal bench`" in said
        assert said.count("\n") == 1
        assert mine.read_bytes() == before
    publish.check_free(mine, force=True)
    publish.put(mine, publish.text_of(entry.entry(H200, SEEN, find("h200"), None, 0)))
    publish.check_free(mine, force=False)  # what a bench wrote, a bench replaces
    assert os.listdir(mine.parent) == ["cpu.toml"]


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--workspace", "/proc/none"], 78, "/proc/none/hardware cannot be written"),
        (["--out", "/dev/null/ours.toml"], 78, "/dev/null cannot be written"),
        (["--out", "ours.yaml"], 2, "end in .toml"),
        (["--processes", "0"], 2, "1 is the least"),
        (["--seconds", "nan"], 2, "--seconds must be more than 0"),
        (["--name", "--"], 2, "see `shoal bench --help`"),
        (["--name", "!"], 2, "no letter or digit"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(
    options: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*OF_CPU, *options]) == code
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_told_to_stop_it_leaves_nothing(tmp_path: Path) -> None:
    log, place = tmp_path / "log", tmp_path / "workspace"
    place.mkdir()
    for number in (signal.SIGINT, signal.SIGTERM):
        log.unlink(missing_ok=True)
        pid = fork(lambda: main([*OF_CPU, "--seconds", "60", "--processes", "1", "--workspace", str(place)]), log)
        watch = Stopwatch()
        while not (log.exists() and "collectives" in log.read_text()) and watch.quiet_s() < 30:
            time.sleep(0.01)
        os.kill(pid, number)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 143
        assert "shoal: stopped." in log.read_text()
        assert os.listdir(place) == []


def test_collectives_of_two_processes() -> None:
    rows = collectives.measure(this_machine("cpu"), 2, 0.1)
    assert {row[0] for row in rows} == set(collectives.OPERATIONS)
    assert all(row[1] == 2 and 1e-6 < row[3] < 10 for row in rows)
    assert multiprocessing.active_children() == []
    ring = tuple(("all_gather", 8, size, 2e-5 + size * 7 / 8 / 360e9) for size in (1 << 20, 1 << 24, 1 << 26))
    assert collectives.link_gbs(ring) == pytest.approx(360)


def test_collectives_of_a_gpu_that_is_shared_are_told_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """More processes than GPUs: refused, but for tests, and then it tells nothing of a link."""
    seen = replace(SEEN, collectives=tuple(("all_gather", 2, size, size / 1e9) for size in (1 << 20, 1 << 26)))
    monkeypatch.setattr("shoal.bench.machine.this_machine", lambda asked: H200)
    monkeypatch.setattr("shoal.bench.machine.busy", lambda machine: "")
    monkeypatch.setattr("shoal.bench.measure.measure", lambda *_: seen)
    asked = ["bench", "--processes", "2", "--json", "--workspace", str(tmp_path)]
    monkeypatch.delenv("SHOAL_TEST_SHARE_GPU", raising=False)
    assert main(asked) == 2
    assert "but this machine has 1 GPU; leave it out" in capsys.readouterr().err
    monkeypatch.setenv("SHOAL_TEST_SHARE_GPU", "1")
    assert main(asked) == 0
    out, err = capsys.readouterr()
    assert "2 processes share 1 GPU" in err
    assert len(json.loads(out)["measured"]["collectives"]) == 2
    ours, known = find("h200", [tmp_path / "hardware"]), find("h200")
    assert ours.link == known.link
    assert not ours.measured.collectives


def test_a_known_gpu_keeps_its_name_and_what_was_not_measured() -> None:
    known = find("h200")
    ours = read_back(H200, SEEN, entry.known_as(H200, None, []))
    assert ours.name == "H200"
    assert (ours.matmul["bf16"], ours.matmul["fp32"], ours.matmul["fp8"], ours.matmul["fp16"]) == (780, 51.5, 1400, 761)
    assert (ours.bandwidth_tbs, ours.memory_gb, ours.units) == (4.28, 139.8, 132)
    assert (ours.peak, ours.link, ours.prices, ours.watts) == (known.peak, known.link, known.prices, known.watts)
    assert ours.measured == SEEN
    source = next(s for s in ours.sources if "shoal bench" in s.text)
    assert source.date == "2026-11-12"
    assert set(source.fields) == {"matmul", "memory_gb", "bandwidth_tbs", "units"}
    told = table.table(SEEN, known)
    assert "79% of 989" in told
    assert "89% of the bandwidth on paper" in told


def test_under_a_name_of_its_own_it_is_like_the_known_one_and_found_by_the_drivers_name(tmp_path: Path) -> None:
    ours = read_back(H200, SEEN, entry.known_as(H200, "our-box", []), "our-box")
    assert (ours.name, ours.peak, ours.matmul["fp16"], ours.matmul["bf16"]) == ("our-box", find("h200").peak, 761, 780)
    made = entry.entry(H200, SEEN, find("h200"), "our-box", 0)
    publish.put(tmp_path / "our-box.toml", publish.text_of(made))
    assert find("NVIDIA H200", [tmp_path]).name == "our-box"
    assert not find("H200", [tmp_path]).measured


def test_a_gpu_that_nobody_knows_is_described_by_what_was_measured(tmp_path: Path) -> None:
    other = replace(H200, name="NVIDIA Foo 77", units=50, memory_gb=20.0)
    assert entry.known_as(other, None, []) is None
    ours = read_back(other, SEEN, None)
    assert (ours.name, ours.peak["bf16"], ours.link.gbs, ours.link.domain) == ("NVIDIA Foo 77", 780, 25, 1)
    publish.put(tmp_path / "foo.toml", publish.text_of(entry.entry(other, SEEN, None, None, 25.0)))
    assert find("NVIDIA Foo 77", [tmp_path]).measured
    assert entry.known_as(other, None, [tmp_path]) is None  # what a bench wrote is no knowledge of its own
    for name in ("NVIDIA H200 Laptop GPU", "NVIDIA H200 MIG 1g.18gb"):  # other silicon under a known name
        small = replace(H200, name=name, units=16, memory_gb=16.0)
        assert entry.known_as(small, None, []) is None
        assert read_back(small, SEEN, None).units == 16


def test_several_gpus_say_what_their_link_reaches() -> None:
    rows = tuple(("all_gather", 8, size, 2e-5 + size * 7 / 8 / 360e9) for size in (1 << 24, 1 << 26))
    ours = read_back(replace(H200, count=8), replace(SEEN, collectives=rows), find("h200"))
    assert (ours.link.gbs, ours.link.achievable) == (450, pytest.approx(0.8, abs=1e-3))


def test_a_precision_that_is_emulated_is_no_ceiling() -> None:
    slow = replace(SEEN, matmul=((512, 512, 512, "fp32", 0.2), (512, 512, 512, "bf16", 0.01)))
    cpu = this_machine("cpu")
    ours = read_back(cpu, slow, entry.known_as(cpu, None, []))
    assert "bf16" not in ours.matmul
    assert ours.ceiling("bf16") is None


@pytest.mark.parametrize("by_row", [False, True])
def test_fp8_products_are_called_as_torch_wants_them(by_row: bool) -> None:
    y = products._scaled(torch.device("cpu"), shapes.Product(32, 64, 16), by_row)()
    assert isinstance(y, torch.Tensor)
    assert (y.shape, y.dtype) == ((32, 64), torch.bfloat16)
    assert all(side % 16 == 0 for p in shapes.few_products() for side in (p.m, p.n, p.k))
