"""A bad node is named before a run starts on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.launch import health
from shoal.launch.health import main, problem


def test_a_good_node_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mark").write_text("7-0\n")
    assert main(["--workspace", str(tmp_path), "--mark", "mark", "7-0", "--memory-gb", "0.001"]) == 0
    assert capsys.readouterr().out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["mark"]


def test_what_is_wrong_with_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(health, "SHARED_S", 0.0)
    assert main(["--workspace", str(tmp_path / "nowhere")]) == 1
    assert "cannot be written (No such file or directory)" in capsys.readouterr().out
    assert "not on a disk that the nodes share" in str(problem(tmp_path, ("mark", "7-0"), 0, None))
    assert "1e+06 GB of memory were asked for" in str(problem(tmp_path, None, 0, 1e6))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "nvidia-smi is not there" in str(problem(tmp_path, None, 2, None))
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n")
    smi.chmod(0o755)
    assert problem(tmp_path, None, 1, None) is None
    assert problem(tmp_path, None, 2, None) == "2 GPUs were asked for and 1 can be seen"
    smi.write_text("#!/bin/sh\necho 'Unable to determine the device handle'; exit 15\n")
    assert problem(tmp_path, None, 1, None) == "nvidia-smi failed (Unable to determine the device handle)"
