"""From a script to a run file: which of the labelled scripts Shoal can train, what prevents the others, what is read of
those that it can, and that the run is the script's: rate by rate, loss by loss."""

from __future__ import annotations

import dataclasses
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from shoal.adopt.native.frameworks import TRANSFORMERS
from shoal.adopt.native.recipe import Recipe
from shoal.adopt.native.run_file import Made, make
from shoal.adopt.native.schedule import put_named
from shoal.adopt.native.values import Known
from shoal.adopt.project import read_project
from shoal.adopt.training import Training
from shoal.cli.main import main
from shoal.decide.load import load
from shoal.errors import SetupError, SpecError
from shoal.journal.journal import records
from shoal.spec.run import Schedule
from shoal.train.schedule import lr_ratio
from tests.adopt.corpus import LABELS, SCRIPTS
from tests.train.tiny import VOCAB, make_data

NATIVES = Path(__file__).with_name("natives")
# By hand: the line that prevents it, and why. None: Shoal trains it.
OUTCOMES: dict[str, tuple[int, str] | None] = {
    "plain_loop.py": (13, "torch.nn.Sequential"),
    "nanogpt_style.py": (74, "TinyGPT"),
    "ddp_sampler.py": (53, "torch.nn.Sequential"),
    "fsdp2.py": (35, "torch.nn.Sequential"),
    "hf_trainer.py": None,
    "lightning_style.py": (10, "leaves its loop to Lightning"),
    "accelerate_loop.py": (33, "AutoModelForSequenceClassification"),
    "vision_amp.py": (59, "resnet50"),
    "gan.py": (20, "several optimizers"),
    "project/train.py": (13, "torch.nn.Sequential"),  # of lib/engine.py
    "deepspeed_loop.py": (35, "DeepSpeed"),
    "imagenet_spawn.py": (42, "resnet18"),
    "pieces.py": (56, "torch.nn.Sequential"),
    "snapshot_class.py": (129, "its own (Model"),
    "trl_sft.py": (13, "LoRA"),
    "fabric_loop.py": (20, "demos.Transformer"),
    "diffusion.py": (50, "its own (Net"),
    "ppo.py": (45, "its own (Agent"),
    "finetune_text.py": (42, "AutoModelForSeq2SeqLM"),
    "barrier_pair.py": (61, "torch.nn.Sequential"),
}


def made(script: Path, file: Path, *words: str, given: tuple[str, ...] = ()) -> Made:
    return make(Training(read_project(script)), words, given, file)


def gpt2(folder: Path) -> Path:
    folder.mkdir(parents=True)
    config = {"model_type": "gpt2", "vocab_size": 128, "n_positions": 96, "architectures": ["GPT2LMHeadModel"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def llama(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=64, **size)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", LABELS)
def test_of_the_labelled_scripts_it_is_known_which_shoal_can_train_and_what_prevents_the_others(
    name: str, tmp_path: Path
) -> None:
    expected = OUTCOMES[name]
    if expected is None:
        gpt2(tmp_path / "models" / "gpt2")
        made(SCRIPTS / name, tmp_path / "run.yaml")
        return
    with pytest.raises(SpecError, match="Shoal cannot train this natively") as refused:
        made(SCRIPTS / name, tmp_path / "run.yaml")
    assert f".py:{expected[0]} " in str(refused.value)
    assert expected[1] in str(refused.value)
    assert not (tmp_path / "run.yaml").exists()


def test_a_model_of_the_hub_has_to_be_here_first(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"hf_trainer\.py:25 .*hf download gpt2 --local-dir"):
        made(SCRIPTS / "hf_trainer.py", tmp_path / "run.yaml")


def test_a_trainer_with_dataclasses_is_read_with_its_own_defaults_and_its_data_as_a_command(tmp_path: Path) -> None:
    gpt2(tmp_path / "models" / "gpt2")
    found = made(SCRIPTS / "hf_trainer.py", tmp_path / "run.yaml", "--learning_rate", "1e-4", "--warmup_steps=0.1")
    run = found.loaded.run
    assert run.model.hf == str(tmp_path / "models" / "gpt2")
    assert (run.train.epochs, run.train.batch, run.seed, run.checkpoint.every) == (3.0, 8, 42, 500)
    assert (run.train.optimizer.lr, run.train.optimizer.betas, run.train.optimizer.weight_decay) == (
        1e-4,
        (0.9, 0.999),
        0,
    )
    assert (run.train.schedule.name, run.train.schedule.warmup_steps) == ("wsd", "10%")
    assert (run.train.clip, run.train.precision) == (1.0, "fp32")
    assert found.prepare == [
        "shoal data prepare hf:wikitext --config wikitext-2-raw-v1 --tokenizer models/gpt2 --eval-fraction 0.05 "
        "--out data/wikitext"
    ]
    assert "lr: 0.0001" in found.text
    assert "--learning_rate on the command line" in found.text
    assert "the default of TrainingArguments" in found.text
    assert any("tokens a row" in question for question in found.questions)  # it truncates where the model ends


def test_a_loop_of_its_own_is_read_through_constants_classes_tables_and_functions(tmp_path: Path) -> None:
    found = made(NATIVES / "accelerate_lm.py", tmp_path / "run.yaml")
    run = found.loaded.run
    assert (run.model.dim, run.model.layers, run.model.ffn_dim, run.model.max_seq_len) == (64, 2, 192, 64)
    assert (run.data.seq_len, run.train.batch, run.train.steps, run.seed) == (32, 6, 200, 3)
    assert (run.train.optimizer.lr, run.train.optimizer.weight_decay, run.train.clip) == (6e-4, 0.1, 1.0)
    assert (run.train.schedule.name, run.train.schedule.min_ratio, run.train.precision) == ("cosine", 0.1, "bf16")
    where = {line.split(":")[0].strip(): line.partition("#")[2] for line in found.text.splitlines() if ": " in line}
    assert "accelerate_lm.py:14, " in where["ffn_dim"]  # 3 times a number of a class
    assert "put the text that it was made of" in where["train"]


def test_trl_is_read_with_the_model_that_the_command_line_names(tmp_path: Path) -> None:
    llama(tmp_path / "models" / "small")
    with pytest.raises(SpecError, match="add it after SCRIPT"):
        made(NATIVES / "sft.py", tmp_path / "run.yaml")
    run = made(NATIVES / "sft.py", tmp_path / "run.yaml", "--model_name_or_path", "hub/small").loaded.run
    assert run.model.weights == str(tmp_path / "models" / "small")
    assert (run.train.optimizer.lr, run.train.precision, run.mesh.recompute) == (2e-5, "bf16", "full")
    assert run.data.seq_len == 64  # of 1,024 that TRL would take
    with pytest.raises(SpecError, match="trains adapters"):
        made(NATIVES / "sft.py", tmp_path / "run.yaml", "--model_name_or_path", "hub/small", "--use_peft")


PLAIN = (NATIVES / "plain_lm.py").read_text()
TRAINER = (NATIVES / "trainer_lm.py").read_text()


@pytest.mark.parametrize(
    ("text", "old", "new", "said"),
    [
        (
            PLAIN,
            "use_cache=False).loss /",
            "use_cache=False).logits.std() /",
            "has a loss of its own",
        ),
        (PLAIN, "torch.optim.AdamW(groups", "torch.optim.SGD(groups", "takes the optimizer SGD"),
        (PLAIN, "    model.train()\n", "    model.model.requires_grad_(False)\n    model.train()\n", "freezes weights"),
        (PLAIN, '"weight_decay": 0.0}', '"weight_decay": 0.0, "lr": 1e-5}', "a lr of their own"),
        (PLAIN, "from_pretrained(args.model)", "from_pretrained(args.model, load_in_8bit=True)", "load_in_8bit"),
        (TRAINER, '"out",', '"out", optim="adafactor",', "the optimizer adafactor"),
        (TRAINER, '"out",', '"out", label_smoothing_factor=0.1,', "smooths labels"),
        (TRAINER, "callbacks=[data.order]", "compute_loss_func=print", "compute_loss_func of its own"),
        (TRAINER, "max_steps=8", "**{'max_steps': 8}", "how long it trains"),
    ],
)
def test_what_shoal_would_train_otherwise_is_refused(text: str, old: str, new: str, said: str, tmp_path: Path) -> None:
    assert text.count(old) == 1
    llama(tmp_path / "base")
    (tmp_path / "train.py").write_text(text.replace(old, new).replace('"base"', repr(str(tmp_path / "base"))))
    with pytest.raises(SpecError, match=said):
        made(tmp_path / "train.py", tmp_path / "run.yaml")


def test_what_cannot_be_known_is_a_question_and_never_a_number_of_somebody(tmp_path: Path) -> None:
    llama(tmp_path / "base")
    text = PLAIN.replace('"base"', repr(str(tmp_path / "base"))).replace("lr=args.lr", "lr=float(open('lr').read())")
    text = text.replace("default=4)", "default=len(__file__))")
    (tmp_path / "train.py").write_text(text)
    found = made(tmp_path / "train.py", tmp_path / "run.yaml")
    assert {"train.optimizer.lr", "train.batch"}.isdisjoint(
        key for key, origin in found.loaded.origins.items() if origin.startswith("run.yaml")
    )
    assert any(": lr is not read" in question for question in found.questions)
    assert any("the batch is not read" in question for question in found.questions)
    assert "# ? " in found.text


def test_a_length_that_is_not_read_may_be_given(tmp_path: Path) -> None:
    llama(tmp_path / "base")
    text = PLAIN.replace('"base"', repr(str(tmp_path / "base"))).replace("step >= args.steps", "done(step)")
    (tmp_path / "train.py").write_text(text)
    with pytest.raises(SpecError, match=r"say it: train\.steps=N"):
        made(tmp_path / "train.py", tmp_path / "run.yaml")
    assert made(tmp_path / "train.py", tmp_path / "run.yaml", given=("train.steps=9",)).loaded.run.train.steps == 9


@pytest.mark.parametrize(
    "words", [["--to", "run-file", "--out", "run.yaml", "S"], ["S", "--to", "run-file", "run.yaml"]]
)
def test_the_file_is_written_once_and_shown(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = str(NATIVES / "accelerate_lm.py")
    words = [script if word == "S" else word for word in words]
    assert main(["adopt", *words]) == 0
    assert "First: shoal data prepare TEXT" in capsys.readouterr().out
    before = (tmp_path / "run.yaml").read_text()
    assert main(["show", "run.yaml"]) == 0
    assert main(["adopt", *words]) == 2
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "run.yaml").read_text() == before


def test_the_defaults_are_those_of_the_transformers_that_is_here() -> None:
    from transformers import TrainingArguments

    fields = {f.name: f.default for f in dataclasses.fields(TrainingArguments)}
    assert {name: getattr(fields[name], "value", fields[name]) for name in TRANSFORMERS} == TRANSFORMERS


@pytest.mark.parametrize(
    ("name", "warmup", "steps", "exact_from"),
    [("linear", 0, 10, 0), ("linear", 3, 10, 3), ("constant", 0, 5, 0), ("constant_with_warmup", 4, 9, 4),
     ("cosine", 0, 40, None), ("cosine", 8, 40, None), ("linear", 0.25, 12, 3)],
)  # fmt: skip
def test_rates_are_those_of_transformers_or_one_step_ahead_as_the_file_says(
    name: str, warmup: float, steps: int, exact_from: int | None
) -> None:
    from transformers import get_scheduler

    recipe = Recipe()
    recipe.put("train.steps", steps, "")
    put_named(recipe, Known(name), Known(warmup))
    said = {k.removeprefix("train.schedule."): e.value for k, e in recipe.entries.items() if "schedule" in k}
    schedule, whole = Schedule(**said), round(warmup * steps) if 0 < warmup < 1 else warmup
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    theirs = get_scheduler(name, optimizer, num_warmup_steps=int(whole), num_training_steps=steps)
    rates = []
    for _ in range(steps + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    ours = [lr_ratio(schedule, step, steps) for step in range(steps)]
    first = 0 if exact_from is None else exact_from
    # In the warm-up, and of a cosine everywhere, ours lies between theirs at this step and at the next one.
    for step, (mine, now, after) in enumerate(zip(ours, rates, rates[1:], strict=False)):
        if exact_from is not None and step >= first:
            assert mine == pytest.approx(now, abs=1e-12)
        else:
            assert min(now, after) - 1e-12 <= mine <= max(now, after) + 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "words"),
    [("trainer_lm.py", []), ("plain_lm.py", ["--accumulate", "1", "--schedule", "linear", "--warmup", "0"])],
)
def test_the_written_run_has_the_losses_gradients_and_rates_of_the_script(
    script: str,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    warm_starts: None,
) -> None:
    make_data(tmp_path / "shards")
    llama(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *words])
    runpy.run_path(str(NATIVES / script), run_name="__main__")
    rows = [row.split() for row in capsys.readouterr().out.splitlines()]
    theirs = [tuple(map(float, row[2:])) for row in rows if row[:1] == ["step"]]
    assert main(["adopt", "--to", "run-file", "--out", "run.yaml", str(NATIVES / script), *words]) == 0
    here = ["resources.device=cpu", "resources.processes=1", "resources.threads=1", "track.mlflow=false"]
    assert main(["train", "run.yaml", *here]) == 0
    steps = [r for r in records(tmp_path / "runs" / "run" / "journal.jsonl") if r["kind"] == "step"]
    ours = [(r["loss"], r["grad_norm"], r["lr"]) for r in steps]
    assert len(ours) == len(theirs) == load(tmp_path / "run.yaml").run.train.steps
    for mine, one in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(one, rel=2e-5)
