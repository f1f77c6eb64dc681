"""What a model that is not Shoal's own (`own.model`, `model.hf`) goes together with."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.spec.mesh.rules import Broken
from shoal.spec.model import Model
from shoal.spec.run import Run

ONE_MODEL = ("pp", "tp", "cp", "ep")  # axes that cut a model in ways that only Shoal's own parts know
_READ = {"own.model": ("vocab_size", "max_seq_len"), "model.hf": ("hf", "hf_config", "vocab_size", "max_seq_len")}


def foreign_rules(run: Run) -> Iterator[Broken]:
    if run.model.hf_config is not None and run.model.hf is None:
        yield ("model.hf_config",), "model.hf_config has no effect without model.hf: leave it out"
    if run.foreign is None:
        return
    called, key = run.foreign, run.foreign.partition(" ")[0]
    if run.own.model is not None and run.model.hf is not None:
        yield ("model.hf", "own.model"), f"model.hf has no effect with {called}: leave one of them out"
        return
    usual = Model()
    for name in Model.model_fields:
        if name not in _READ[key] and getattr(run.model, name) != getattr(usual, name):
            yield (
                (f"model.{name}", key),
                f"model.{name} has no effect with {called}, which is the whole model: leave it out",
            )
    for axis in ONE_MODEL:
        if axis == "tp" and run.own.model is None:
            continue  # classes of transformers say how; what they say is counted and tried when it is laid out
        if getattr(run.mesh, axis) not in (1, "auto"):
            yield (f"mesh.{axis}", key), f"{called} is not cut over mesh.{axis}: take dp_shard or dp_replicate"
    if run.own.block is not None:
        yield ("own.block", key), f"own.block has no effect with {called}: leave one of them out"
    train = run.train
    if train.precision == "fp8":
        yield ("train.precision", key), f"{called} is not computed in fp8: take bf16"
    if train.z_loss:
        yield (
            ("train.z_loss", key),
            f"train.z_loss is of Shoal's own head, which {called} does not have: write it into own.objective",
        )
    if train.optimizer.name == "muon" and run.own.optimizer is None:
        yield (
            ("train.optimizer.name", key),
            f"which matrices of {called} Muon may turn is not known: take adamw, or own.optimizer",
        )
    if not train.optimizer.decay_embeddings:
        yield (
            ("train.optimizer.decay_embeddings", key),
            f"which matrices of {called} are embeddings is not known: leave it out, or take own.optimizer",
        )
