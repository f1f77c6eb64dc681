"""Shoal's order in the Trainer of transformers: the same windows and losses, and each window once whatever happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.families import opened  # first: it tells transformers to be quiet

import torch  # isort: skip
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_callback import TrainerState

from shoal.data.feed import Feed
from shoal.data.order import Order
from shoal.data.sources import open_sources
from shoal.data.windows import Windows
from shoal.errors import SetupError, SpecError, UsageError
from shoal.hf import Data, Place
from shoal.model.decoder import Decoder
from shoal.model.hf import save_folder
from shoal.spec.shape import shape_of
from tests.patience import limit
from tests.train.tiny import VOCAB, make_data, make_run

ROOT = Path(__file__).resolve().parent.parent
SMALL = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=64,
)


def trainer(out: Path, data: Data, steps: int, each: int, accumulate: int = 1, **more: Any) -> Trainer:
    torch.manual_seed(0)
    args = TrainingArguments(
        str(out),
        max_steps=steps,
        per_device_train_batch_size=each,
        gradient_accumulation_steps=accumulate,
        save_steps=3,
        logging_steps=1,
        learning_rate=0.05,
        lr_scheduler_type="constant",
        optim="sgd",  # a constant factor of the gradient would be seen
        max_grad_norm=0,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **more,
    )
    return Trainer(
        LlamaForCausalLM(SMALL),
        args,
        train_dataset=data.train,
        eval_dataset=data.eval,
        data_collator=data.collate,
        callbacks=[data.order],
    )


def weights(of: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in of.model.named_parameters()}


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_a_batch_has_the_windows_of_shoal_train_and_the_loss_that_shoal_computes(tmp_path: Path) -> None:
    folder = make_data(tmp_path / "data", masked=True)
    run = make_run(folder, **{"seed": 11, "train.batch": 4})
    windows = Windows.of(open_sources(run.data.train, run.data, tmp_path), run.data)
    with Feed(windows, Order(windows.sizes, [1.0], run.seed), 4) as feed:
        (batch,) = feed.assemble(2)
    assert (np.diff(batch.documents) != 0).any(), "several documents in a window"
    found = Data(folder, seq_len=32, seed=11).collate([Place(False, n) for n in range(8, 12)])
    assert np.array_equal(found["input_ids"][:, :-1], batch.tokens)
    assert np.array_equal(found["labels"][:, 1:], batch.targets)
    torch.manual_seed(0)
    shape = shape_of(run.model, VOCAB)
    ours = Decoder(shape)
    ours.init_weights(3)
    save_folder(tmp_path / "hf", shape, ours.state_dict())
    theirs = opened(tmp_path / "hf")
    theirs.config.use_cache = False  # as the Trainer has it: with a cache, documents would see each other
    about = {"positions": torch.from_numpy(batch.positions), "documents": torch.from_numpy(batch.documents)}
    with torch.no_grad():
        expected = ours(torch.from_numpy(batch.tokens), targets=torch.from_numpy(batch.targets), **about)
        loss = theirs(**found).loss
    assert float(loss) == pytest.approx(float(expected) / batch.target_count, rel=1e-5)


def test_it_goes_on_with_the_next_window_whatever_the_sizes_are(tmp_path: Path) -> None:
    folder = make_data(tmp_path / "data")
    held_out = make_data(tmp_path / "held-out", documents=30, seed=5)
    whole = trainer(tmp_path / "whole", Data(folder, seq_len=32), 6, 4)
    whole.train()
    assert [r["loss"] for r in whole.state.log_history if "loss" in r][-1] < 5
    first = trainer(tmp_path / "out", Data(folder, seq_len=32), 3, 4)
    first.train()
    # The same global batch in other pieces: the same steps.
    again = Data(folder, [held_out], seq_len=32)
    other = trainer(tmp_path / "out", again, 6, 1, 4)
    other.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert again.order.position == 24
    assert apart(weights(whole), weights(other)) < 1e-6
    assert apart(weights(whole), weights(first)) > 1e-4
    assert other.evaluate()["eval_loss"] == pytest.approx(other.evaluate()["eval_loss"])
    # Another one: it goes on behind the last window, and says so in its own checkpoint.
    grown = Data(folder, seq_len=32)
    trainer(tmp_path / "out", grown, 9, 5).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-6"))
    assert (grown.train.first, grown.order.position) == (24, 24 + 3 * 5)
    kept = TrainerState.load_from_json(str(tmp_path / "out" / "checkpoint-9" / "trainer_state.json"))
    assert kept.stateful_callbacks["ShoalOrder"]["attributes"]["position"] == 39


def resumed(tmp_path: Path, data: Data, change: Any = None) -> None:
    file = tmp_path / "out" / "checkpoint-3" / "trainer_state.json"
    said = json.loads(file.read_text())
    if change is not None:
        change(said["stateful_callbacks"])
        file.write_text(json.dumps(said))
    trainer(tmp_path / "out", data, 6, 4).train(resume_from_checkpoint=str(file.parent))


def test_a_checkpoint_of_another_order_is_refused_in_a_sentence(tmp_path: Path) -> None:
    folder = make_data(tmp_path / "data")
    trainer(tmp_path / "out", Data(folder, seq_len=32), 3, 4).train()
    with pytest.raises(SetupError, match="was trained with seed 0, and now it is 1: another order"):
        resumed(tmp_path, Data(folder, seq_len=32, seed=1))
    with pytest.raises(SetupError, match="was trained with seq_len 32, and now it is 16"):
        resumed(tmp_path, Data(folder, seq_len=16))
    with pytest.raises(SetupError, match="says that -3 windows were used"):
        resumed(
            tmp_path,
            Data(folder, seq_len=32),
            lambda kept: kept["ShoalOrder"]["attributes"].update(position=-3),
        )
    with pytest.raises(SetupError, match="was not trained on Shoal's order, so nobody knows where to go on"):
        resumed(tmp_path, Data(folder, seq_len=32), lambda kept: kept.pop("ShoalOrder"))


def test_settings_that_would_deal_windows_twice_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_data(tmp_path / "data")
    data = Data(folder, seq_len=32)
    alone = trainer(tmp_path / "out", data, 3, 4)
    with monkeypatch.context() as patched:
        patched.setenv("WORLD_SIZE", "2")
        with pytest.raises(UsageError, match="2 processes were started and this Trainer knows of 1, so that all would"):
            data.order.on_init_end(alone.args, alone.state, alone.control)
    with pytest.raises(UsageError, match="auto_find_batch_size changes the batch"):
        trainer(tmp_path / "out", Data(folder, seq_len=32), 3, 4, auto_find_batch_size=True)
    with pytest.raises(UsageError, match="dataloader_num_workers is 2, and each would read all"):
        trainer(tmp_path / "out", Data(folder, seq_len=32), 3, 4, dataloader_num_workers=2)
    with pytest.raises(UsageError, match="split_batches cuts batches"):
        trainer(tmp_path / "out", Data(folder, seq_len=32), 3, 4, accelerator_config={"split_batches": True})
    with pytest.raises(UsageError, match="use_cache lets the documents of a window see each other"):
        trainer(tmp_path / "out", Data(folder, seq_len=32), 3, 4, use_cache=True)
    with pytest.raises(SpecError, match=r"data\.seq_len"):
        Data(folder, seq_len=0)
    with pytest.raises(SpecError, match=r"data\.packin"):
        Data(folder, seq_len=32, packin="chop")
    with pytest.raises(SpecError, match=r"is also in data\.train"):
        Data(folder, folder, seq_len=32)


READS = """
import json, os, sys
import shoal.hf
at = os.environ["SHOAL_TEST_READ"] + "." + os.environ.get("RANK", "0")
plain = shoal.hf.Data.collate
def noted(self, places):
    with open(at, "a") as f:
        f.write(json.dumps([place.number for place in places]) + "\\n")
    return plain(self, places)
shoal.hf.Data.collate = noted
sys.argv = sys.argv[1:]
exec(compile(open(sys.argv[0]).read(), sys.argv[0], "exec"))
"""


def read(file: Path) -> list[int]:
    lines = [line for rank in file.parent.glob(f"{file.name}.*") for line in rank.read_text().splitlines()]
    return [number for line in lines for number in json.loads(line)]


@pytest.mark.slow
def test_the_example_killed_on_two_processes_goes_on_with_one_and_reads_each_window_once(tmp_path: Path) -> None:
    make_data(tmp_path / "data", documents=4000)
    (tmp_path / "noted.py").write_text(READS)
    words = ["noted.py", str(ROOT / "examples" / "hf-trainer" / "train.py")]
    told = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

    def start(name: str, ranks: int, *more: str) -> subprocess.Popen[bytes]:
        two = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        return subprocess.Popen(
            [sys.executable, *two, *words, "--out", "out", *more],
            cwd=tmp_path,
            env={**told, "SHOAL_TEST_READ": str(tmp_path / name)},
        )

    begun = start("begun", 2, "--batch", "4", "--steps", "100000")
    until = time.monotonic() + limit(240)
    saved = tmp_path / "out" / "checkpoint-20" / "trainer_state.json"
    while not saved.exists() and time.monotonic() < until:
        time.sleep(0.1)
    subprocess.run(["pkill", "-KILL", "-P", str(begun.pid)])
    begun.wait()
    assert saved.exists()
    assert set(range(160)) <= set(read(tmp_path / "begun"))
    before = read(tmp_path / "begun")
    assert len(before) == len(set(before)), "no rank has read what another did"
    more = ("--resume_from_checkpoint", "out/checkpoint-20", "--batch", "6", "--accumulate", "2", "--steps", "24")
    assert start("resumed", 1, *more).wait() == 0
    after = read(tmp_path / "resumed")
    assert after[: 4 * 12] == list(range(160, 160 + 4 * 12))
    assert len(after) <= 5 * 12 + 6, "a batch may be fetched ahead"
