"""A script whose loop is the Trainer of transformers or the SFTTrainer of TRL."""

from __future__ import annotations

import ast
import re
from typing import Any

from shoal.adopt.code import argument, is_open
from shoal.adopt.native.model import Written, put_model
from shoal.adopt.native.recipe import Recipe, refuse
from shoal.adopt.native.schedule import put_named
from shoal.adopt.native.values import End, Known, Values

_TRAINER = re.compile(r"(transformers|trl)(\.\w+)*\.(Trainer|SFTTrainer)$")
_ANY_TRAINER = re.compile(r"(transformers|trl|sentence_transformers)(\.\w+)*\.\w*Trainer$")
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adamw_hf")
_OWN_LOSSES = ("compute_loss", "training_step", "create_optimizer", "create_scheduler", "get_train_dataloader")
_OWN_PARTS = (
    "compute_loss_func",
    "optimizers",
    "optimizer_cls_and_kwargs",
    "model_init",
    "preprocess_logits_for_metrics",
)
PROCESSES = "of one process: multiply it by as many as you start the script with"


def the_trainer(values: Values) -> ast.Call | None:
    """The call that makes it; NotNative for one that trains otherwise."""
    made = [c for c, _, full in values.training.calls if _ANY_TRAINER.match(full)]
    for call, _, full in values.training.calls:
        own = values.graph.class_named(full)
        bases = [b for b in values.graph.bases(own) if _ANY_TRAINER.match(b)] if own is not None else []
        if own is not None and bases:
            changed = [name for name in own.methods if name in _OWN_LOSSES]
            at = own.methods[changed[0]].node if changed else own.node
            what = f"has {changed[0]} of its own" if changed else f"is a trainer of its own ({own.name})"
            raise refuse(values.line(at) if changed else values.line(call), what)
    if not made:
        return None
    if len(made) > 1:
        raise refuse(" and ".join(values.line(c) for c in made), "make several trainers")
    name = values.code.called(made[0])
    if not _TRAINER.match(name):
        raise refuse(values.line(made[0]), f"trains by {name.rpartition('.')[2]}")
    return made[0]


def read_trainer(values: Values, recipe: Recipe, call: ast.Call, written: Written) -> ast.expr | None:
    """Everything but the data; returns what is trained on."""
    where, sft = values.line(call), values.code.called(call).endswith("SFTTrainer")
    if is_open(call):
        raise refuse(where, "gives the trainer arguments that cannot be seen (`**`)")
    for name in _OWN_PARTS:
        if (part := argument(call, name)) is not None and not _is_nothing(part):
            raise refuse(values.line(part), f"gives the trainer {name} of its own")
    _no_adapters(values, argument(call, "peft_config"))
    if (quantized := argument(call, "quantization_config")) is not None and not _unasked(values, quantized):
        raise refuse(values.line(quantized), "loads quantized weights")
    _collator(values, argument(call, "data_collator", 2))
    model = argument(call, "model", 0)
    if model is None:
        raise refuse(where, "gives the trainer no model")
    settings = _settings(values, call, where)
    put_model(values, recipe, model, written, by_name=sft)
    _put_settings(values, recipe, settings, where, sft)
    return argument(call, "train_dataset", 3 if not sft else 4)


def _settings(values: Values, call: ast.Call, where: str) -> End:
    given = argument(call, "args", 1)
    ends = values.ends(given) if given is not None else []
    if len(ends) != 1:
        raise refuse(where, "takes the settings of the trainer from where they cannot be followed")
    return ends[0]


class _Of:
    """Settings by their names, and what to do where one cannot be read."""

    def __init__(self, values: Values, end: End, where: str) -> None:
        self.values, self.end, self.where = values, end, where

    def __call__(self, name: str) -> Known | None:
        return self.values.field(self.end, name)

    def of(self, name: str, usual: Any = None) -> Any:
        found = self(name)
        return usual if found is None else found.value


def _put_settings(values: Values, recipe: Recipe, end: End, where: str, sft: bool) -> None:
    of = _Of(values, end, where)
    _refuse_settings(of, sft)
    _length(recipe, of)
    _batch(values, recipe, of)
    rate = recipe.number(
        values, "train.optimizer.lr", of("learning_rate"), f"{where}: the learning rate is not read", 0.0
    )
    betas = of("adam_beta1"), of("adam_beta2")
    if betas[0] is not None and betas[1] is not None:
        both = Known([betas[0].value, betas[1].value], (*betas[0].where, *betas[1].where))
        recipe.known("train.optimizer.betas", both)
    recipe.number(values, "train.optimizer.eps", of("adam_epsilon"), "eps is not read")
    recipe.number(
        values,
        "train.optimizer.weight_decay",
        of("weight_decay"),
        "the weight decay is not read",
        note="on matrices, as in the Trainer",
    )
    clip = of("max_grad_norm")
    if clip is not None and isinstance(clip.value, int | float | None):
        recipe.known("train.clip", Known(clip.value or None, clip.where))
    else:
        recipe.ask("train", "max_grad_norm is not read: train.clip is Shoal's, 1.0")
    _schedule(recipe, of, rate)
    _precision(recipe, of, sft)
    if (seed := of("seed")) is not None and isinstance(seed.value, int):
        recipe.known("seed", seed)
    if of.of("gradient_checkpointing") is True:
        recipe.known("mesh.recompute", Known("full", of("gradient_checkpointing").where))  # type: ignore[union-attr]  # it is known
    saves, every = of.of("save_strategy", "steps"), of("save_steps")
    if str(saves) in ("steps", "SaveStrategy.STEPS") and every is not None and isinstance(every.value, int):
        recipe.known("checkpoint.every", every)
    if sft:
        _sft(values, recipe, of)


def _refuse_settings(of: _Of, sft: bool) -> None:
    optim = of("optim")
    if optim is not None and str(optim.value).rpartition(".")[2].lower() not in _OPTIMIZERS:
        raise refuse(optim.said, f"takes the optimizer {optim.value}, and Shoal has AdamW and Muon")
    refusals = {
        "label_smoothing_factor": "smooths labels",
        "neftune_noise_alpha": "adds noise to embeddings (NEFTune)",
        "optim_target_modules": "trains some layers alone",
        "auto_find_batch_size": "finds the batch while it runs",
        "assistant_only_loss": "masks what is not the assistant's by a chat template",
    }
    for name, what in refusals.items():
        found = of(name)
        if found is not None and found.value:
            raise refuse(found.said, what)
    if sft and of.of("loss_type", "nll") not in ("nll", "chunked_nll"):
        raise refuse(of("loss_type").said, f"has the loss {of.of('loss_type')}")  # type: ignore[union-attr]  # it is known


def _length(recipe: Recipe, of: _Of) -> None:
    steps, epochs = of("max_steps"), of("num_train_epochs")
    if steps is not None and isinstance(steps.value, int) and steps.value > 0:
        recipe.known("train.steps", steps)
    elif steps is None or epochs is None or not isinstance(epochs.value, int | float):
        raise refuse(of.where, "does not tell how long it trains (max_steps or num_train_epochs cannot be read)")
    else:
        recipe.known("train.epochs", epochs, "of Shoal's windows of seq_len tokens, where the script counts its rows")


def _batch(values: Values, recipe: Recipe, of: _Of) -> None:
    each, accumulate = of("per_device_train_batch_size"), of("gradient_accumulation_steps")
    if each is None or accumulate is None or not isinstance(each.value * accumulate.value, int):
        return recipe.ask("train", "the batch is not read: train.batch is Shoal's, 32 windows")
    note = f"{each.value} x accumulation {accumulate.value}, {PROCESSES}"
    recipe.known("train.batch", Known(each.value * accumulate.value, (*each.where, *accumulate.where)), note)
    recipe.known("mesh.micro_batch", each)
    return None


def _schedule(recipe: Recipe, of: _Of, rate: float | None) -> None:
    name, more = of("lr_scheduler_type"), of("lr_scheduler_kwargs")
    warmup, ratio = of("warmup_steps"), of("warmup_ratio")
    if ratio is not None and ratio.value and warmup is not None and not warmup.value:
        warmup = ratio
    if name is None or (more is None and of.end is not None) or (more is not None and more.value):
        return recipe.ask(
            "train.schedule", f"{of.where}: the schedule is not read as a whole: until then it is Shoal's usual one"
        )
    put_named(recipe, name, warmup)
    return None


def _precision(recipe: Recipe, of: _Of, sft: bool) -> None:
    bf16, fp16 = of("bf16"), of("fp16")
    if bf16 is None or fp16 is None:
        return recipe.ask("train", "the precision is not read: train.precision is `auto`")
    if fp16.value:
        return recipe.known("train.precision", Known("bf16", fp16.where), "the script has fp16, which Shoal has not")
    on = bf16.value or (sft and bf16.value is None)
    recipe.known("train.precision", Known("bf16" if on else "fp32", bf16.where))
    return None


def _sft(values: Values, recipe: Recipe, of: _Of) -> None:
    longest, older = of("max_length"), of("max_seq_length")
    found = older if older is not None and older.value else longest
    if found is not None and isinstance(found.value, int):
        recipe.known("data.seq_len", found)
    completions = of("completion_only_loss")
    if completions is None or completions.value is not False:
        recipe.ask(
            "data",
            "prompts are no targets where the rows have prompt and completion: `shoal data prepare "
            "--prompt-field prompt "
            "--text-field completion` masks them, too",
        )
    if of.of("packing") is False:
        recipe.ask(
            "data",
            "the script has one row of its data in each row of a batch; Shoal fills windows with several, kept apart",
        )


def _collator(values: Values, node: ast.expr | None) -> None:
    for end in values.ends(node) if node is not None else ():
        if not values.made_by(end).endswith("DataCollatorForLanguageModeling") or not isinstance(end.expr, ast.Call):
            continue
        masked = values.read(argument(end.expr, "mlm", 1))
        if masked is None or masked.value:
            raise refuse(values.line(end.expr), "masks words of the text (mlm), and Shoal's models are causal")


def _no_adapters(values: Values, node: ast.expr | None) -> None:
    if node is not None and not _unasked(values, node):
        raise refuse(values.line(node), "trains adapters (LoRA), and Shoal trains all weights")


def _unasked(values: Values, node: ast.expr) -> bool:
    """`None`, or what TRL makes of options that nobody has given."""
    if _is_nothing(node):
        return True
    options = {"trl.get_peft_config": ("use_peft",), "trl.get_quantization_config": ("load_in_4bit", "load_in_8bit")}
    if not isinstance(node, ast.Call) or not node.args or (asked := options.get(values.code.called(node))) is None:
        return False
    ends = values.ends(node.args[0])
    found = [values.field(ends[0], name) for name in asked] if len(ends) == 1 else [None]
    return all(one is not None and not one.value for one in found)


def _is_nothing(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
