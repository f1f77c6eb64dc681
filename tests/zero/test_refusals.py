"""What ZeRO does not do is refused by name, before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from shoal.decide.auto import decide
from shoal.errors import SetupError, SpecError
from shoal.parallel.zero.shares import dealt
from shoal.spec import load
from shoal.spec.begun import differences
from tests.train.tiny import make_data

RUN = "name: x\nmodel: {dim: 32, layers: 2, heads: 4, ffn_dim: 64}\ndata: {train: data, seq_len: 32}\n"
RUN += "train: {steps: 3, batch: 8}\nresources: {processes: 2, device: cpu}\nengine: {name: deepspeed}\n"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path / "run.yaml"


@pytest.mark.parametrize(
    "wrong",
    [
        "mesh.tp=2", "mesh.pp=2", "mesh.cp=2", "mesh.ep=2", "mesh.dp_replicate=2", "mesh.reduce=micro_batch",
        "train.precision=fp8", "train.compile=true", "train.optimizer.name=muon", "train.optimizer.moments=bf16",
        "model.experts={count: 4, top_k: 2, ffn_dim: 8}", "own.model=mine:Net",
        "own.optimizer=mine:Make", "guard.replay=5", "fleet.islands=2",
    ],
)  # fmt: skip
def test_what_zero_does_not_do_is_refused_with_what_to_do(file: Path, wrong: str) -> None:
    with pytest.raises(SpecError) as e:
        load(file, [wrong])
    sentence = next(line for line in str(e.value).split("\n") if "engine.name" in line)
    assert sentence.startswith((f"`{wrong}` on the command line: ", f"{file}:"))
    assert "native" in sentence or "leave it out" in sentence


def test_settings_of_zero_have_no_effect_without_it(file: Path) -> None:
    for wrong in ("engine.zero=2", "engine.offload=cpu"):
        with pytest.raises(SpecError, match=r"has no effect with engine\.name native"):
            load(file, ["engine.name=native", wrong])


def test_all_processes_share_and_nothing_is_planned(file: Path) -> None:
    make_data(file.parent / "data")
    run = decide(load(file).run, file.parent).run
    assert (run.mesh.dp_shard, run.mesh.dp_replicate, run.mesh.reduce) == (2, 1, "step")
    assert run.train.compile is False
    assert "is not known" in str(run.unplanned)
    native = load(file, ["engine.name=native"]).run
    moved = {d.key for d in differences(load(file).run, native, auto_is_equal=True) if not d.safe}
    assert not moved


def test_without_the_package_one_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.parallel.zero.engine import package

    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(SetupError, match=r"pip install 'shoal\[deepspeed\]'"):
        package(torch.device("cpu"))


def test_tensors_are_dealt_out_evenly_and_alike_everywhere() -> None:
    shapes = {f"t{i}": torch.Size([size]) for i, size in enumerate((100, 60, 50, 10, 0))}
    owners = dealt(shapes, 2)
    load_of = [sum(shapes[name].numel() for name, owner in owners.items() if owner == rank) for rank in (0, 1)]
    assert (list(owners), load_of) == (list(shapes), [110, 110])
    assert owners == dealt(dict(reversed(shapes.items())), 2) | {}
