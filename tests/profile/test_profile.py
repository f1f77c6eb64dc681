"""`shoal profile` of a real run, from the run file to the sentence, and what goes wrong on the way."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import shoal
from shoal.cli.main import main
from shoal.errors import TransientError
from shoal.profile.capture import _export
from shoal.profile.kinds import kind_of_name
from shoal.profile.launches import name_triton_launches
from shoal.profile.least_work import shapes
from shoal.profile.trace import read
from shoal.spec import dump
from tests.forked import fork
from tests.patience import Stopwatch, slowness
from tests.train.tiny import make_data, make_run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    run = make_run(make_data(tmp_path / "data"), **{"data.seq_len": 64, "model.dim": 64})
    path = tmp_path / "run.yaml"
    path.write_text(dump(run))
    return path


@pytest.mark.alone  # it is about where its time goes: beside others some of it goes to them
def test_a_run_of_two_processes_is_explained_and_left_alone(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    out = tmp_path / "out"
    asked = ["--processes", "2", "--steps", "2", "--warmup", "4", "--out", str(out), "--workspace", str(tmp_path)]
    assert main(["profile", str(file), *asked]) == 0
    text = capsys.readouterr().out
    new = {path for path in tmp_path.rglob("*") if path.is_file()} - before
    assert {path.name for path in new} == {"rank-00000.json.gz", "rank-00001.json.gz", "profile.json", "run.yaml"}
    assert {path.parent for path in new} == {out}  # no run directory, no checkpoint, no log
    told = json.loads((out / "profile.json").read_text())
    assert told["accounted"] >= 1 - 0.03 * slowness()
    for rank in told["ranks"]:
        kinds = {kind: part["seconds"] for kind, part in rank["kinds"].items()}
        assert sum(kinds.values()) == pytest.approx(rank["step_s"])
        assert all(kinds[kind] > 0 for kind in ("matmul", "attention", "norm", "loss", "optimizer", "elementwise"))
        assert kinds["communication"] + rank["hidden_communication_s"] > 0
        assert set(rank["kinds"]["optimizer"]["phases"]) == {"clip", "optimizer"}
    assert "accounted for:" in text
    assert "next: " in text
    assert "ui.perfetto.dev" in text

    assert main(["profile", "--trace", str(out / "rank-00001.json.gz"), "--workspace", str(tmp_path), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["ranks"][0]["kinds"] == told["ranks"][1]["kinds"]


def test_ctrl_c_leaves_nothing_behind(file: Path, tmp_path: Path) -> None:
    said = tmp_path / "said.txt"
    pid = fork(lambda: main(["profile", str(file), "--steps", "100000", "--workspace", str(tmp_path)]), said)
    watch = Stopwatch()
    while not list(tmp_path.glob("profiles/*/logs/*/*.log")) and watch.quiet_s() < 60:
        time.sleep(0.05)
    os.kill(pid, signal.SIGINT)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 143
    assert said.read_text().splitlines()[-1] == "shoal: stopped before the trace was whole; nothing was kept."
    assert not (tmp_path / "profiles").exists()
    assert not (tmp_path / "runs").exists()


def test_wrong_input_is_told_in_one_sentence(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "journal.jsonl").touch()
    (tmp_path / "typo.yaml").write_text(file.read_text().replace("batch:", "bacth:"))
    for asked, code, words in (
        ([str(tmp_path / "typo.yaml")], 2, "did you mean"),
        ([str(file), f"data.train={tmp_path / 'nowhere'}"], 78, "does not exist"),
        ([str(file), "--out", str(tmp_path / "full")], 2, "not an empty folder"),
        ([str(file), "--steps", "0"], 2, "--steps is 0"),
        ([str(file), "fleet.islands=2"], 2, "fleet.islands=1 train.batch=8"),
        ([], 2, "say which run file"),
        ([str(file), "--trace", "t.json"], 2, "leave the run file"),
    ):
        assert main(["profile", *asked, "--workspace", str(tmp_path)]) == code, asked
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("shoal: ")]
        assert len(said) == 1
        assert words in said[0]
    assert not (tmp_path / "profiles").exists()


def test_a_full_disk_is_told_and_no_half_trace_stays(tmp_path: Path) -> None:
    """Kineto itself raises nothing. A limit on the size of files stands for the disk."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.ones(3).sum()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(TransientError, match=r"^cannot write the trace .*; free space, or choose another --out\.$"):
            _export(profiler, tmp_path / "rank-00000.json.gz", {"rank": 0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_hand_written_kernel_has_shapes_in_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jit = pytest.importorskip("triton.runtime.jit")
    monkeypatch.setattr(jit.JITFunction, "run", lambda self, *args, **kwargs: "launched")
    name_triton_launches()
    kernel = jit.JITFunction.__new__(jit.JITFunction)
    kernel.__name__ = "_adamw"
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        assert kernel.run(torch.ones(8, 4), 3, grid=(1,), warmup=False, m=torch.ones(2)) == "launched"
    _export(profiler, tmp_path / "t.json.gz", {})
    found = next(e for events in read(tmp_path / "t.json.gz").threads.values() for e in events if "adamw" in e.name)
    assert shapes(found) == [((8, 4), "float"), ((2,), "float")]
    assert kind_of_name(found.name) == "optimizer"


def test_the_loop_has_no_line_for_it() -> None:
    """Its phases are marked for the watch over hangs; a profile listens to those marks and costs a run nothing."""
    source = Path(shoal.__file__).parent
    for part in ("train", "parallel", "model", "data"):
        for file in (source / part).rglob("*.py"):
            assert "shoal.profile" not in file.read_text()
            assert "record_function" not in file.read_text()
