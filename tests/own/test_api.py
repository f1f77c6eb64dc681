"""`import shoal`: what it promises is there, is written down, and costs nothing until it is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from shoal import api_page
from shoal.errors import UsageError
from shoal.journal.rundir import RunDir
from tests.own.test_own_code import here
from tests.train.tiny import digest_of, make_data, make_run

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date() -> None:
    committed = (ROOT / "docs" / "reference" / api_page.FILE).read_text()
    assert committed == api_page.page(), "run `python -m shoal.api_page docs/reference`"


def test_every_name_is_there_and_says_what_it_is() -> None:
    assert dir(shoal) == sorted(shoal.__all__)
    for name in shoal.NAMES:
        assert getattr(shoal, name).__doc__, name
    with pytest.raises(AttributeError, match=r"has no attribute 'Trainer'; docs/reference/api.md"):
        shoal.Trainer  # noqa: B018


def test_no_name_is_hidden_by_a_package_of_the_same_name() -> None:
    """`import shoal.train` makes `shoal.train` a package for the whole process."""
    packages = {p.stem for p in (ROOT / "src" / "shoal").iterdir()}
    assert not packages & set(shoal.NAMES)


def test_importing_shoal_imports_nothing_large() -> None:
    code = "import sys, shoal; shoal.load; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_script_takes_the_steps_that_shoal_train_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SHOAL_ATTEMPT"):
        monkeypatch.setenv(name, "0")  # so that they are put back
        monkeypatch.delenv(name)
    make_data(tmp_path / "data")
    usual = here(make_run(tmp_path / "data", name="usual", **{"train.steps": 4}), tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text((usual.path / "run.yaml").read_text())
    with shoal.session(file, ["name=script"], tmp_path) as s:
        losses = [s.step()["loss"] for _ in s.steps()]
    run_dir = RunDir.of("script", tmp_path)
    assert digest_of(run_dir) == digest_of(usual)
    assert len(losses) == 4
    assert shoal.checkpoints(run_dir.path) == [4]
    step, tensors = shoal.read_checkpoint(run_dir.path)
    run = shoal.load(run_dir.spec_file)
    assert step == 4
    assert tensors.keys() == shoal.make_model(run).state_dict().keys()
    assert shoal.windows(run, tmp_path).sizes[0] > 0
    monkeypatch.delenv("RANK")
    two = shoal.session(
        file, ["name=two", "resources.processes=2", "mesh.dp_replicate=2", "mesh.micro_batch=8"], tmp_path
    )
    with pytest.raises(UsageError, match="torchrun --nproc-per-node 2"):
        two.__enter__()
