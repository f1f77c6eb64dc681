"""One line in a script of a framework: what it logs, evaluates and saves is in the journal, and a stop saves first."""

from __future__ import annotations

import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shoal
from shoal.journal.journal import Record, records
from shoal.journal.rundir import RunDir
from shoal.script.callbacks.telling import Telling
from shoal.script.checkpoints import candidates
from shoal.spec.script import Script
from tests.ranks import run_ranks
from tests.require import unavailable
from tests.script.conftest import ScriptRun


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """That of a script which `shoal run` has started."""
    found = RunDir(tmp_path / "runs" / "demo")
    found.path.mkdir(parents=True)
    monkeypatch.setenv("SHOAL_SCRIPT", str(found.path))
    monkeypatch.setenv("SHOAL_ATTEMPT", "2")
    monkeypatch.setenv("RANK", "0")
    return found


def told(run_dir: RunDir, kind: str) -> list[Record]:
    return [r for r in records(run_dir.journal_file) if r["kind"] == kind] if run_dir.journal_file.exists() else []


def trained(callback: Any, folder: Path, stop_at: int | None = None) -> Any:
    """A training of 4 steps as the Trainer drives its callbacks, with its own objects; the control at its end."""
    from transformers import TrainerControl, TrainerState

    args, state, control = SimpleNamespace(output_dir=str(folder)), TrainerState(), TrainerControl()
    callback.on_train_begin(args, state, control)
    for step in range(1, 5):
        state.global_step = step
        if step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        callback.on_step_end(args, state, control)
        callback.on_log(args, state, control, logs={"loss": 4.0 / step, "learning_rate": 0.1, "note": "text"})
        if step == 2:
            metrics = {"eval_loss": 0.5, "eval_accuracy": 0.25}
            callback.on_log(args, state, control, logs=metrics)
            callback.on_evaluate(args, state, control, metrics=metrics)
        if step == 2 or control.should_save:
            place = folder / f"checkpoint-{step}"
            place.mkdir()
            torch.save({"step": step}, place / "optimizer.pt")
            callback.on_save(args, state, control)
        if control.should_training_stop:
            break
    callback.on_train_end(args, state, control)
    return state, control


def test_what_the_trainer_logs_evaluates_and_saves_is_told(run_dir: RunDir, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    _, control = trained(shoal.trainer_callback(), tmp_path / "out")
    assert not control.should_training_stop
    metrics = told(run_dir, "metrics")
    assert [(r["step"], r["attempt"]) for r in metrics] == [(1, 2), (2, 2), (3, 2), (4, 2)]
    assert metrics[0]["values"] == {"loss": 4.0, "learning_rate": 0.1}
    assert metrics[1]["values"] == {"loss": 2.0, "learning_rate": 0.1, "eval_loss": 0.5, "eval_accuracy": 0.25}
    (evaluation,) = told(run_dir, "eval")
    assert (evaluation["step"], evaluation["loss"]) == (2, 0.5)
    (saved,) = told(run_dir, "checkpoint")
    assert (saved["step"], saved["path"]) == (2, str(tmp_path / "out" / "checkpoint-2"))
    assert saved["bytes"] == (tmp_path / "out" / "checkpoint-2" / "optimizer.pt").stat().st_size


def test_a_stop_saves_after_the_step_and_ends_the_training(run_dir: RunDir, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    (tmp_path / "out").mkdir()
    state, control = trained(shoal.trainer_callback(), tmp_path / "out", stop_at=3)
    assert (state.global_step, control.should_save, control.should_training_stop) == (3, True, True)
    assert [r["step"] for r in told(run_dir, "checkpoint")] == [2, 3]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_restart_goes_on_from_the_folder_and_not_from_a_file_in_it(run_dir: RunDir, tmp_path: Path) -> None:
    from shoal.journal.journal import Journal

    (tmp_path / "out").mkdir()
    journal = Journal(run_dir.journal_file)
    journal.note("open", session=1)
    inside = tmp_path / "out" / "checkpoint-2" / "optimizer.pt"
    journal.note("checkpoint", step=2, path=str(inside), bytes=1, by="torch.save")
    trained(shoal.trainer_callback(), tmp_path / "out")
    found = candidates(run_dir, Script(path="train.py"))
    assert [(one.path, one.step) for one in found] == [(str(inside.parent), 2)]


def test_only_rank_0_writes_and_nobody_outside_of_a_run(
    run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    (tmp_path / "one").mkdir()
    assert trained(shoal.trainer_callback(), tmp_path / "one", stop_at=3)[0].global_step == 3
    assert not run_dir.journal_file.exists()
    monkeypatch.delenv("SHOAL_SCRIPT")
    before = signal.getsignal(signal.SIGTERM)
    shoal.trainer_callback().on_train_begin(None, None, None)
    assert signal.getsignal(signal.SIGTERM) is before


def test_all_ranks_stop_at_the_step_at_which_one_is_told(tmp_path: Path) -> None:
    def work(rank: int, world: int, place: str) -> list[bool]:
        os.environ["SHOAL_SCRIPT"] = place
        telling = Telling()
        telling.begin()
        heard = []
        for step in range(4):
            if (rank, step) == (1, 2):
                os.kill(os.getpid(), signal.SIGTERM)
            heard.append(telling.stop_asked())
        telling.end()
        return heard

    assert run_ranks(work, 2, str(tmp_path)) == [[False, False, True, True]] * 2


def needs(package: str) -> None:
    if find_spec(package) is None:
        unavailable(package, f"{package} is not installed; PYTHONPATH may name a folder that has it")


def test_accelerate_tells_what_it_logs_and_saves(run_dir: RunDir, tmp_path: Path) -> None:
    needs("accelerate")
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    follow = shoal.follow_accelerator(accelerator)
    for step in range(1, 5):
        accelerator.log({"loss": model(torch.ones(1, 2)).sum()}, step=step)
        if step == 2:
            accelerator.save_state(str(tmp_path / "state-2"))
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        if follow.stop_asked(step):
            accelerator.save_state(str(tmp_path / "state-3"))
            break
    accelerator.end_training()
    assert [(r["step"], list(r["values"])) for r in told(run_dir, "metrics")] == [(s, ["loss"]) for s in (1, 2, 3)]
    assert [(r["step"], Path(r["path"]).name) for r in told(run_dir, "checkpoint")] == [(2, "state-2"), (3, "state-3")]


LIGHTNING = """
import lightning, shoal, torch
class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
    def training_step(self, x, i):
        loss = self.net(x).square().mean()
        self.log("train_loss", loss)
        if self.global_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss
    def validation_step(self, x, i):
        self.log("val_loss", self.net(x).mean())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)
keeps = lightning.pytorch.callbacks.ModelCheckpoint("out", every_n_train_steps=2, save_top_k=-1)
data = torch.utils.data.DataLoader(torch.ones(4, 2))
trainer = lightning.Trainer(accelerator="cpu", max_steps=12, callbacks=[keeps, shoal.lightning_callback()],
    logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir="out", log_every_n_steps=1)
trainer.fit(Lit(), data, data)
print("ended at", trainer.global_step)
"""


@pytest.mark.slow
def test_lightning_tells_what_it_logs_and_saves_and_stops(script: ScriptRun) -> None:
    needs("lightning")
    assert script.run(LIGHTNING) == 0, script.err
    assert "ended at 5" in script.out
    saves = [(r["step"], Path(r["path"]).name) for r in script.records("checkpoint") if r.get("by") == "callback"]
    assert saves == [(2, "epoch=0-step=2.ckpt"), (4, "epoch=0-step=4.ckpt"), (5, "stopped-5.ckpt")]
    assert [r["step"] for r in script.records("eval")] == [4, 5]  # Lightning validates before it ends
    assert {r["step"] for r in script.records("metrics")} >= {1, 2, 3}
    assert "train_loss" in script.records("metrics")[-1]["values"]


TRAINER = """
import shoal, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
class Told(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 5 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
rows = [{"input_ids": [i % 9] * 8, "labels": [i % 9] * 8} for i in range(64)]
model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_positions=8, n_embd=8, n_layer=1, n_head=1))
args = TrainingArguments("out", max_steps=20, save_steps=4, eval_steps=4, eval_strategy="steps", logging_steps=2,
    per_device_train_batch_size=2, use_cpu=True, report_to=[], disable_tqdm=True)
callbacks = [shoal.trainer_callback(), Told()]
trainer = Trainer(model, args, train_dataset=rows, eval_dataset=rows[:8], callbacks=callbacks)
trainer.train()
print("ended at", trainer.state.global_step)
"""


@pytest.mark.slow
def test_a_stop_that_one_rank_hears_ends_the_trainer_on_both_with_a_save(script: ScriptRun) -> None:
    needs("accelerate")
    assert script.run(TRAINER, "--processes", "2") == 0, script.err
    assert "ended at 6" in script.out
    assert [r["step"] for r in script.records("checkpoint") if r.get("by") == "callback"] == [4, 6]
    assert [r["step"] for r in script.records("eval")] == [4]
    assert [r["step"] for r in script.records("metrics")] == [2, 4, 6]
    assert (script.folder / "out" / "checkpoint-6" / "trainer_state.json").exists()


def test_no_framework_is_imported_by_who_does_not_ask() -> None:
    import subprocess

    code = "import shoal, sys; shoal.trainer_callback, shoal.lightning_callback, shoal.follow_accelerator; "
    code += "print([n for n in ('transformers', 'lightning', 'accelerate', 'torch') if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
