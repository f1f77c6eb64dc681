"""What is said of a name that the run file or the command line does not have: what was meant, what Shoal calls it, that
Shoal lacks it, or nothing but the names there are."""

from __future__ import annotations

import random
import re
import string
from pathlib import Path

import pytest

from shoal.cli.main import VERBS, main
from shoal.errors import SpecError
from shoal.near import closest
from shoal.spec import load
from shoal.spec.elsewhere import ANSWERED, CALLED, VERBS_ANSWERED, VERBS_CALLED
from shoal.spec.names import hint, lookup, names

NONE = "the names there are"

# What people type, and what must be in the answer. Slips first, then names of other trainers, then what Shoal lacks.
MISTAKES = {
    "train.stpes": "did you mean train.steps?",
    "train.step": "did you mean train.steps?",
    "train.epoch": "did you mean train.epochs?",
    "train.bacth": "did you mean train.batch?",
    "train.optimiser": "did you mean train.optimizer?",
    "train.optimizer.weigth_decay": "did you mean train.optimizer.weight_decay?",
    "train.optimizer.weightDecay": "did you mean train.optimizer.weight_decay?",
    "train.schedule.warmup-steps": "did you mean train.schedule.warmup_steps?",
    "train.schedule.min_ration": "did you mean train.schedule.min_ratio?",
    "train.precison": "did you mean train.precision?",
    "train.complie": "did you mean train.compile?",
    "train.sched": "did you mean train.schedule?",
    "model.layer": "did you mean model.layers?",
    "model.head": "did you mean model.heads?",
    "model.vocabsize": "did you mean model.vocab_size?",
    "model.n_experts": "did you mean model.experts?",
    "model.maxSeqLen": "did you mean model.max_seq_len?",
    "data.seqlen": "did you mean data.seq_len?",
    "data.mask_docs": "the names there are train, eval, seq_len",
    "checkpoint.evry": "did you mean checkpoint.every?",
    "checkpoint.keep_bset": "did you mean checkpoint.keep_best?",
    "checkpoints": "did you mean checkpoint?",
    "modle": "did you mean model?",
    "training": "did you mean train?",
    "tracking": "did you mean track?",
    "sead": "did you mean seed?",
    "recources": "did you mean resources?",
    "resource": "did you mean resources?",
    "guard.restart": "did you mean guard.restarts?",
    "launch.node": "did you mean launch.nodes?",
    "launch.time-limit": "did you mean launch.time_limit?",
    "launch.kuberntes": "did you mean launch.kubernetes?",
    "swarm.peer": "did you mean swarm.peers?",
    "fleet.island": "did you mean fleet.islands?",
    "mesh.microbatch": "did you mean mesh.micro_batch?",
    "mesh.recomptue": "did you mean mesh.recompute?",
    # in the wrong section
    "lr": "lr belongs under train.optimizer",
    "train.lr": "lr belongs under train.optimizer",
    "train.weight_decay": "weight_decay belongs under train.optimizer",
    "train.warmup_steps": "warmup_steps belongs under train.schedule",
    "train.seq_len": "seq_len belongs under data",
    "train.seed": "seed belongs at the top of the file",
    "optimizer": "optimizer belongs under train",
    "wandb": "wandb belongs under track",
    "train.micro_batch": "micro_batch belongs under mesh",
    "every": "did you mean eval.every or checkpoint.every?",
    # Hugging Face's Trainer and TRL
    "train.num_train_epochs": "Shoal calls it train.epochs",
    "train.per_device_train_batch_size": "mesh.micro_batch",
    "train.gradient_accumulation_steps": "mesh.micro_batch",
    "learning_rate": "train.optimizer.lr",
    "learning_rte": "train.optimizer.lr",
    "train.learning-rate": "train.optimizer.lr",
    "adam_beta2": "train.optimizer.betas",
    "adam_epsilon": "train.optimizer.eps",
    "max_grad_norm": "train.clip",
    "lr_scheduler_type": "train.schedule.name",
    "train.warmup_ratio": "train.schedule.warmup_steps, a number of steps or a share such as 5%",
    "logging_steps": "every step is recorded",
    "save_total_limit": "checkpoint.keep",
    "evaluation_strategy": "eval.every",
    "gradient_checkpointing": "mesh.recompute",
    "report_to": "track.mlflow, track.wandb or track.tensorboard",
    "output_dir": "runs/NAME of the workspace",
    "resume_from_checkpoint": "`shoal resume NAME`",
    "model.model_name_or_path": "model.weights",
    "bf16": "train.precision: bf16",
    "train.fp16": "Shoal has no fp16",
    "dataloader_num_workers": "reads data ahead by itself",
    "push_to_hub": "`hf upload`",
    "attn_implementation": "the fastest attention",
    "load_in_4bit": "no quantization of weights yet",
    "max_seq_length": "data.seq_len",
    "dataset_name": "`shoal data prepare`",
    # torchtitan
    "training.local_batch_size": "mesh.micro_batch",
    "data_parallel_shard_degree": "mesh.dp_shard",
    "parallelism": "Shoal calls it mesh",
    "checkpoint.interval": "checkpoint.every",
    "checkpoint.async_mode": "checkpoint.background",
    "metrics.log_freq": "every step is recorded",
    "activation_checkpoint": "mesh.recompute",
    "model.flavor": "model.preset",
    "train.max_norm": "train.clip",
    "decay_ratio": "train.schedule.decay_steps",
    "float8": "train.precision: fp8",
    # Lightning
    "max_epochs": "train.epochs",
    "accumulate_grad_batches": "mesh.micro_batch",
    "gradient_clip_val": "train.clip",
    "val_check_interval": "eval.every",
    "num_nodes": "launch.nodes",
    "strategy": "Shoal calls it mesh",
    "callbacks": "code of your own",
    "save_top_k": "checkpoint.keep_best",
    # Megatron
    "train_iters": "train.steps",
    "clip_grad": "train.clip",
    "num_query_groups": "model.kv_heads",
    "ffn_hidden_size": "model.ffn_dim",
    "tensor_model_parallel_size": "mesh.tp",
    "moe_router_topk": "model.experts.top_k",
    "lr_warmup_fraction": "train.schedule.warmup_steps",
    "hidden_dropout": "no dropout",
    "untie_embeddings_and_output_weights": "model.tie_embeddings",
    # nanochat
    "model.depth": "model.layers",
    "device_batch_size": "mesh.micro_batch",
    "num_iterations": "train.steps",
    "warmdown_ratio": "train.schedule.decay_steps",
    "matrix_lr": "train.optimizer.muon_lr",
    # what Shoal lacks
    "train.lora": "Shoal has no LoRA or other adapters yet",
    "lora_alpha": "Shoal has no LoRA or other adapters yet",
    "train.dpo": "no preference or reinforcement learning yet",
    "rlhf": "no preference or reinforcement learning yet",
    "quantization": "no quantization of weights yet",
    "serve": "no server for models yet",
    "deepspeed": "ZeRO is `engine: {name: deepspeed, zero: 3}`",
    "eval.harness": "`shoal eval RUN --tasks FILE.yaml`",
    "train.ema": "no moving average",
    # close to nothing
    "launch.retries": "guard.restarts, or launch.requeues",
    "xyzzy": NONE,
    "train.metrics": "metrics belongs under launch.kubernetes",
    "mesh.xp": NONE,
    "train.frobnicate": NONE,
}


@pytest.mark.parametrize(("wrong", "says"), MISTAKES.items(), ids=list(MISTAKES))
def test_a_wrong_name_is_answered_with_what_was_meant(wrong: str, says: str) -> None:
    path = tuple(wrong.split("."))
    # As `load` and overrides ask: of the first part that is no name; a section that is none is asked about itself.
    known = next(n for n in range(1, len(path) + 1) if lookup(path[:n]) is None)
    asked = path if known == len(path) else (*path[: known - 1], path[-1])
    assert says in hint(asked)


def test_random_words_get_no_suggestion() -> None:
    rng, every = random.Random(7), sorted({str(n.path[-1]) for n in names()})
    for _ in range(600):
        word = "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randint(5, 14)))
        assert closest(word, every) is None, word
        assert closest(word, VERBS) is None, word
    for word in ("banana", "kitchen", "weather", "guitar", "umbrella", "penguin", "sunlight", "retrieve", "harvest"):
        assert hint(("train", word)).startswith(NONE), word


def test_every_slip_of_one_letter_in_a_long_name_finds_it() -> None:
    within = sorted({str(n.path[-1]) for n in names() if len(str(n.path[-1])) > 8})
    for name in within:
        for i in range(len(name) % 2, len(name) - 1, 2):
            swapped = name[:i] + name[i + 1] + name[i] + name[i + 2 :]
            for word in (name[:i] + name[i + 1 :], swapped, name[:i] + "x" + name[i + 1 :]):
                # One section and one value differ by a letter: a slip of the longer may be the shorter.
                assert closest(word, within) in (name, name.removesuffix("s")), word


def test_no_answer_names_what_is_not_there_and_none_hides_what_is() -> None:
    for foreign, said in (*CALLED.items(), *ANSWERED.items()):
        assert lookup((foreign,)) is None, f"{foreign} is a name of the run file now"
        for name in re.findall(r"\b(?:train|model|data|mesh|checkpoint|eval|track|guard|launch)\.[a-z_.]*[a-z]", said):
            assert lookup(tuple(name.split("."))) is not None, f"{foreign}: {name}"
        for verb in re.findall(r"`shoal ([a-z]+)", said):
            assert verb in VERBS, f"{foreign}: {verb}"
    for foreign, said in VERBS_CALLED.items():
        assert foreign not in VERBS
        assert said.split()[0] in (*VERBS, "--version")
    assert not set(VERBS_ANSWERED) & set(VERBS)


@pytest.mark.parametrize(
    ("verb", "says"),
    [
        ("serve", "Shoal has no server for models yet"),
        ("deploy", "Shoal has no server for models yet"),
        ("trian", "did you mean `shoal train`?"),
        ("fit", "it is `shoal train`."),
        ("status", "it is `shoal ps`."),
        ("demo.yaml", "`shoal train demo.yaml` trains that run file"),
        ("banana", "`shoal --help` lists them."),
    ],
)
def test_a_wrong_verb_is_answered_likewise(verb: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb]) == 2
    assert says in capsys.readouterr().err


def test_a_list_of_any_length_is_not_described_as_one_of_two(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("name: x\nmodel: {preset: tiny}\ndata: {train: here}\n")
    with pytest.raises(SpecError, match=r"must be a list of numbers, each at least 0"):
        load(file, ["data.skip=seven"])
    with pytest.raises(SpecError, match=r"must be a list of 2 numbers"):
        load(file, ["train.optimizer.betas=seven"])
