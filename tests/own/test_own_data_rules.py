"""What goes with `own.data` and what does not; and that nobody imports it but those who train."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.decide.checks import local_inputs, trainable
from shoal.errors import WRONG_USAGE, SpecError
from shoal.guard.begin import data_identity
from shoal.spec import load

FILE = """name: own
model: {dim: 32, layers: 2, heads: 4, vocab_size: 128}
data: {seq_len: 32}
train: {steps: 5, batch: 4}
own: {data: 'mine:Source'}
resources: {device: cpu, processes: 1}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "run.yaml").write_text(FILE)
    return tmp_path / "run.yaml"


def test_data_of_ones_own_needs_no_other(file: Path) -> None:
    run = load(file).run
    trainable(run)
    local_inputs(run)
    assert run.data.train == ()
    assert data_identity(run)["data"] == {}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("data.train=x", "data.train has no effect with own.data mine:Source: leave one of them out"),
        ("model.vocab_size=auto", "is asked by those who train alone: set model.vocab_size"),
        ("train.epochs=2", "set train.steps or train.tokens"),
        ("data.packing=chop", "data.packing has no effect with own.data mine:Source"),
        ("data.mask_documents=false", "data.mask_documents has no effect with own.data mine:Source"),
        ("data.cache_gb=3", "data.cache_gb has no effect with own.data mine:Source"),
    ],
)
def test_what_has_no_effect_beside_it_is_refused(file: Path, change: str, said: str) -> None:
    with pytest.raises(SpecError) as e:
        load(file, [change])
    assert f"`{change}` on the command line: " in str(e.value)
    assert said in str(e.value)


def test_held_out_data_is_prepared_and_keeps_its_keys(file: Path) -> None:
    load(file, ["data.eval=held-out", "data.packing=chop"])


def test_other_drivers_refuse_it(file: Path) -> None:
    for driver in ("swarm", "stages"):
        with pytest.raises(SpecError, match=r"own\.data has no effect in .*: a charter brings no code"):
            trainable(load(file, ["swarm.stages.count=2"] if driver == "stages" else []).run, driver)  # type: ignore[arg-type]


@pytest.mark.parametrize("verb", ["show", "plan"])
def test_who_only_looks_at_a_run_never_imports_it(
    verb: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, str(file), *(["--workspace", str(tmp_path)] if verb == "plan" else [])]) == 0
    assert "imported" not in capsys.readouterr().err


def test_data_look_says_where_its_windows_are_to_be_had(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "look", str(file)]) == WRONG_USAGE
    assert "own.data mine:Source is read by those who train alone; in Python" in capsys.readouterr().err
