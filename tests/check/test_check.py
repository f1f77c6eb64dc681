"""`shoal check`: own code that is sound passes every row, and each common mistake fails the row that is about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.check.ways import a_run, checked
from tests.train.tiny import make_data, make_run

from shoal.check.check import check
from shoal.check.jobs import ROWS, WHOLE, jobs
from shoal.check.rows import rows
from shoal.check.table import table
from shoal.check.trained import Learning, Trained
from shoal.cli.main import main
from shoal.decide.checks import trainable
from shoal.decide.load import load
from shoal.errors import SpecError
from shoal.own import record
from shoal.own.files import digest, files_of, in_folder
from shoal.spec import dump

SOUND = """
import torch
import torch.nn.functional as F
from torch import nn
from shoal.model.decoder import Block
from shoal.train.hooks import Hook


def loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


class Scaled(Block):
    starts = {"scale": torch.ones_like}

    def __init__(self, shape, layer):
        super().__init__(shape, layer)
        self.scale = nn.Parameter(torch.ones(shape.dim))

    def forward(self, x, *rest, **more):
        return super().forward(x, *rest, **more) * self.scale


class Momentum(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["m"] = torch.zeros_like(p)
                    state["m"].lerp_(p.grad, 0.5)
                    p.sub_(state["m"], alpha=group["lr"])


def optimizer(named, run):
    return Momentum([p for _, p in named], lr=run.train.optimizer.lr)


class Fading(Hook):
    def __init__(self, run):
        self.seen = 0

    def start(self, model, step):
        self.model = model

    def update(self, at, targets):
        self.seen += 1
        for _, p in self.model.named_parameters():
            if p.grad is not None:
                p.grad.mul_(1 / self.seen)

    def state(self):
        return self.seen

    def load(self, state):
        self.seen = state
"""
OWN = {"block": "mine:Scaled", "objective": "mine:loss", "optimizer": "mine:optimizer", "hooks": ["mine:Fading"]}


def but(*changes: tuple[str, str]) -> str:
    """The sound code, with a mistake."""
    code = SOUND
    for before, after in changes:
        assert before in code
        code = code.replace(before, after)
    return code


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("check") / "data")


def test_sound_code_passes_every_row(data: Path, tmp_path: Path) -> None:
    result = checked(a_run(data, tmp_path / "code", SOUND, **OWN), tmp_path, *ROWS)
    assert result.failed == [], table(result)
    by_name = {row.name: row for row in result.rows}
    assert by_name["repeat"].found == by_name["resume"].found == "equal bits"
    for name in ("dp_shard", "dp_replicate", "accumulation"):
        loss, norm, moved = by_name[name].loss, by_name[name].norm, by_name[name].moved
        assert None not in (loss, norm, moved)
        assert max(loss or 0, norm or 0, moved or 0) < 1e-6, "another order of adding up, and no more than that"
        assert norm, "and another one it is"
    assert by_name["gradients"].found == "23 of 23 parameters have a gradient"
    assert table(result).endswith("\npassed")


MISTAKES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "a mean objective": (
        but(('reduction="sum"', 'reduction="mean"')),
        {"objective": "mine:loss"},
        "accumulation",
        "in 4 parts the loss is 4.00 times as large: the objective gives a mean",
    ),
    "an objective that couples rows": (
        but(("def loss(logits, targets):", "def loss(logits, targets):\n    logits = logits - logits.mean((0, 1))")),
        {"objective": "mine:loss"},
        "accumulation",
        "couples the rows of a micro-batch",
    ),
    "random numbers that are not seeded": (
        but(("import torch\n", "import random\nimport torch\n"), ("    return F.", "    return random.random() * F.")),
        {"objective": "mine:loss"},
        "repeat",
        "not drawn by torch's generator",
    ),
    "dropout": (
        but(("* self.scale", "* F.dropout(self.scale, 0.5)")),
        {"block": "mine:Scaled"},
        "accumulation",
        "the steps draw random numbers (dropout?)",
    ),
    "a hook that does not save its state": (
        but(("        return self.seen\n", "        return None\n")),
        {"hooks": ["mine:Fading"]},
        "resume",
        "the runs differ from step 3 on, after the resume at step 2: something is kept where no checkpoint finds it",
    ),
    "an optimizer whose state is lost": (
        but(
            ('super().__init__(params, {"lr": lr})', 'super().__init__(params, {"lr": lr})\n        self.m = {}'),
            ("state = self.state[p]", "state = self.m.setdefault(p, {})"),
        ),
        {"optimizer": "mine:optimizer"},
        "resume",
        "in `self.state[parameter]` of an optimizer",
    ),
    "an optimizer that takes a part for the whole": (
        but(
            ("p.sub_(state", 'part = getattr(p.grad, "_local_tensor", p.grad)\n                    p.sub_(state')
        ).replace('alpha=group["lr"])', 'alpha=group["lr"] / (1 + part.norm().item()))'),
        {"optimizer": "mine:optimizer"},
        "dp_shard",
        "own code takes a part of a parameter or gradient for the whole",
    ),
    "a parameter that nothing uses": (
        but((" * self.scale", "")),
        {"block": "mine:Scaled"},
        "gradients",
        "blocks.0.scale, blocks.1.scale had no gradient, or zeros, in all 4 steps",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_fails_its_row_and_is_named(mistake: str, data: Path, tmp_path: Path) -> None:
    code, own, row, words = MISTAKES[mistake]
    wanted = (row, "dp_replicate") if row == "dp_shard" else (row,)
    result = checked(a_run(data, tmp_path / "code", code, **own), tmp_path, *wanted)
    assert result.failed == [row], table(result)
    assert words in result.rows[0].why
    assert " ".join(words.split()[:4]) in table(result)
    assert table(result).endswith(f"not passed: {row}")


def told(moved: float = 1.0, without: list[str] | None = None, **changes: Any) -> Learning:
    fields: dict[str, Any] = {"moved": {"a": moved, "b": 1.0}, "frozen": [], "without": without or [], "same": []}
    return Learning(**{**fields, "draws": False, **changes})


def trained(loss: float = 2.0, norm: float = 1.0, digest: str | None = "d", **changes: Any) -> Trained:
    fields: dict[str, Any] = {"losses": {1: 2.0, 2: loss}, "norms": {1: 1.0, 2: norm}, "digest": digest}
    return Trained(**{**fields, "learning": told(), **changes})


def compared(row: str, other: Trained, whole: Trained | None = None, **others: Trained) -> tuple[bool, str, str]:
    (base, *_) = jobs(make_run(Path("data")), 6, 4)
    found = rows(base.run, {WHOLE: whole or trained(), ROWS[row][-1]: other, **others}, [row])[0]
    return found.passed, found.found, found.why


def test_differences_pass_up_to_their_bars_and_no_further() -> None:
    assert compared("dp_shard", trained(2.0 * (1 + 1e-4)))[0], "a later step: ten times the bar of the first"
    assert not compared("dp_shard", trained(2.0 * (1 + 3e-4)))[0]
    first = {"losses": {1: 2.0 * (1 + 1e-4), 2: 2.0}}
    assert not compared("dp_shard", trained(**first))[0]
    assert not compared("dp_shard", trained(norm=1.01))[0]
    assert compared("dp_shard", trained(learning=told(1.001)))[0]
    assert not compared("dp_shard", trained(learning=told(1.1)))[0], "the losses hide it, the weights do not"
    assert compared("repeat", trained()) == (True, "equal bits", "")
    assert not compared("repeat", trained(digest="e"))[0]
    assert not compared("repeat", trained(2.0 * (1 + 1e-9)))[0], "nothing but the same bits"
    assert not compared("resume", trained())[0], "it was not resumed"
    assert compared("resume", trained(resumed_from=1))[0]


def test_a_row_says_what_follows_from_another_one() -> None:
    off = trained(2.1)
    assert "a part of a parameter" in compared("dp_shard", off, dp_replicate=trained())[2]
    assert "on one process alone" in compared("dp_shard", off, dp_replicate=off)[2]
    assert "this follows from the line on accumulation" in compared("dp_shard", off, accumulated=off)[2]
    double = {"losses": {1: 4.01, 2: 4.0}}
    assert "in 2 parts the loss is 2.00 times as large" in compared("dp_replicate", trained(**double))[2]
    (base, *_) = jobs(make_run(Path("data")), 6, 4)
    ways = {WHOLE: trained(), "again": off, "resumed": trained(2.1, resumed_from=1)}
    assert "this follows from the first line" in rows(base.run, ways, ["repeat", "resume"])[1].why


def test_a_way_that_fails_is_a_row_that_fails_with_its_last_words() -> None:
    row = compared("dp_replicate", trained(digest=None, code=78, words="shoal: no such thing."))
    assert row == (False, "the second run failed", "no such thing.")
    unused = compared("dp_replicate", trained(digest=None, words="No."), trained(learning=told(without=["a"])))
    assert unused[2] == "No; parameters without a gradient are a likely cause: see the last line."
    records = [{"kind": "failure", "evidence": "one"}, {"kind": "failure", "evidence": "mine.py:3: no."}]
    assert Trained.of(records, Path("none"), 2, "next: `shoal resume`").words == "mine.py:3: no."


def test_what_is_frozen_on_purpose_passes_and_what_does_not_move_is_said() -> None:
    frozen = compared("gradients", trained(learning=told(frozen=["a"])))
    assert frozen == (True, "1 of 2 parameters have a gradient, 1 frozen by requires_grad=False", "")
    passed, _, why = compared("gradients", trained(learning=told(same=["a"])))
    assert passed
    assert why.startswith("a had a gradient and did not change")


@pytest.mark.parametrize("file", sorted((Path(__file__).parents[2] / "examples").glob("*.yaml")), ids=lambda f: f.stem)
def test_every_example_can_be_checked_on_data_that_is_here(file: Path) -> None:
    if file.stem in ("finetune", "stages", "script", "batch", "generate"):
        pytest.skip("weights that are not here; trained by other means, or nothing is")
    native = ["engine.name=native"] if file.stem == "deepspeed" else []  # which has fp8
    run = load(file, ["data.train=data", "train.precision=fp8", "train.fp8_scaling=row", *native]).run
    for job in jobs(run, 6, 4):
        trainable(job.run)
        assert (job.run.train.precision, job.run.train.compile) == ("fp32", False)
        assert job.run.own == run.own
        assert job.run.model == run.model
    assert jobs(run, 6, 4, told={"train.precision"})[0].run.train.precision == "fp8"


def test_what_cannot_be_checked_is_refused_before_anything_starts(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(dump(make_run(data)))
    place = ["--workspace", str(tmp_path / "place")]
    for args, code, said in (
        (["--steps", "2"], 2, "--steps must be from 3 to 1000"),
        (["--batch", "3"], 2, "--batch must be an even number"),
        (["--patience", "nan"], 2, "--patience must be more than 0"),
        (["data.train=s3://bucket/there"], 2, "a check reads data that is on this machine"),
        (["data.train=nowhere"], 78, "which does not exist"),
        (["model.dim=65536", "model.layers=400", "model.ffn_dim=262144"], 78, "this machine has"),
    ):
        assert main(["check", str(file), *place, *args]) == code
        err = capsys.readouterr().err
        assert said in err
        assert err.count("\n") == 1
    assert not (tmp_path / "place").exists()


def test_a_run_that_fails_as_it_is_ends_the_check_with_its_sentence(data: Path, tmp_path: Path) -> None:
    todo = jobs(make_run(data), 6, 4)
    failed = trained(digest=None, code=2, words="shoal: mine.py:3: no.")
    with pytest.raises(SpecError, match=r"the run fails as it is, so there is nothing to compare: mine.py:3: no\."):
        check(todo, lambda job: failed)


def test_a_check_is_found_by_its_code_and_settings_alone(data: Path, tmp_path: Path) -> None:
    run = a_run(data, tmp_path / "code", SOUND, objective="mine:loss")
    files = files_of(run, tmp_path / "code")

    def said(run: Any = run, files: dict[str, bytes] = files) -> str:
        return record.sentence(tmp_path, run, files, "run.yaml")

    assert said() == "own code has not been checked: `shoal check run.yaml`"
    at = record.file_of(tmp_path, run, files)
    record.write(at, {"passed": True, "time": 1.5e9, "failed": [], "more": 1})
    assert said() == "own code was checked on 2017-07-14"
    assert said(run.model_copy(update={"seed": 3})) == said()
    other = run.own.model_copy(update={"settings": {"x": 1}})
    assert "has not been" in said(run.model_copy(update={"own": other}))
    assert "has not been" in said(files={**files, "mine.py": b""})
    record.write(at, {"passed": False, "time": 1.5e9, "failed": ["resume"]})
    assert said() == "own code failed its check on 2017-07-14 (resume): `shoal check run.yaml` says why"
    at.write_text('{"passed": 1e999, "time": []}')
    assert "has not been" in said()


def test_the_digest_of_a_copy_is_that_of_the_files(data: Path, tmp_path: Path) -> None:
    run = a_run(data, tmp_path, "", objective="pack.a:loss")
    for name in ("__init__.py", "a.py", "words.txt", "words/more.txt"):
        (path := tmp_path / "pack" / name).parent.mkdir(exist_ok=True, parents=True)
        path.write_text("")
    files = files_of(run, tmp_path)
    assert len(files) == 4
    (tmp_path / "mine.py").unlink()
    assert digest(files) == digest(in_folder(tmp_path))


def test_training_says_whether_own_code_was_checked(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.cli.train.supervise", lambda *args, **more: 0)
    run = a_run(data, tmp_path / "code", SOUND, objective="mine:loss")
    (file := tmp_path / "run.yaml").write_text(dump(run))
    train = ["train", str(file), "--workspace", str(tmp_path), "--name"]
    assert main([*train, "one"]) == 0
    assert f"own code has not been checked: `shoal check {file}`.\n" in capsys.readouterr().out
    at = record.file_of(tmp_path, run, files_of(run, tmp_path / "code"))
    record.write(at, {"passed": True, "time": 1.5e9, "failed": []})
    assert main([*train, "two"]) == 0
    assert "own code was checked on 2017-07-14.\n" in capsys.readouterr().out
    file.write_text(dump(make_run(data)))
    assert main([*train, "three"]) == 0
    assert "own code" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("warm_starts")
def test_the_verb_trains_real_processes_and_records_what_it_found(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(data, tmp_path / "code", SOUND, **OWN)
    (file := tmp_path / "run.yaml").write_text(dump(run))
    verb = ["check", str(file), "--workspace", str(tmp_path), "--steps", "4", "--json"]
    assert main(verb) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"]
    assert [row["name"] for row in found["rows"]] == list(ROWS)
    files = files_of(run, tmp_path / "code")
    assert record.sentence(tmp_path, run, files, "x").startswith("own code was checked on 20")
    assert list(tmp_path.glob(".check-*")) == [], "nothing of it is left"
    (tmp_path / "code" / "mine.py").write_text(but(("        return self.seen\n", "        return None\n")))
    assert main(verb) == 2
    assert json.loads(capsys.readouterr().out)["failed"] == ["resume"]
    assert "failed its check" in record.sentence(tmp_path, run, files_of(run, tmp_path / "code"), "x")
