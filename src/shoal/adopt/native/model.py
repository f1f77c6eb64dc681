"""The model that a script trains, as the section `model` of a run file: a folder of weights, or a shape."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

from shoal.adopt.code import argument, is_open
from shoal.adopt.native.recipe import Recipe, refuse
from shoal.adopt.native.values import End, Known, Values
from shoal.errors import SetupError, ShoalError, SpecError
from shoal.spec.families import FAMILIES
from shoal.spec.hf.any_model import fields_of
from shoal.spec.hf.config import from_hf
from shoal.spec.hf.folder import CONFIG, model_of_folder, notes_of
from shoal.spec.model import Model

_CAUSAL = re.compile(
    r"transformers(\.\w+)*\.(?P<name>AutoModelForCausalLM|\w+ForCausalLM|\w+LMHeadModel)(?P<way>\.\w+)?$"
)
_CLASS_CONFIG = re.compile(r"transformers(\.\w+)*\.(?P<name>\w+)Config$")
_AUTO_CONFIG = re.compile(r"transformers(\.\w+)*\.(AutoConfig|\w+Config)\.from_pretrained$")
_ADAPTED = re.compile(r"(peft(\.\w+)*\.(get_peft_model|PeftModel\w*)|trl\.get_peft_\w+)")
# Names of a config that are about computing, files or tokens, and change no weight.
_SILENT = ("use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "attn_implementation", "dtype", "torch_dtype")
# `from_pretrained` with these loads something else than what is in the folder.
_CHANGES = ("quantization_config", "load_in_8bit", "load_in_4bit", "config", "revision", "subfolder", "variant")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")  # no path: `gpt2`, `owner/name`
MODELS = "models"  # beside the run file, where `hf download` is told to put what is named by a name of the hub


class Written:
    """Where the run file will be: what it names is looked for from there."""

    def __init__(self, file: Path) -> None:
        self.file, self.folder = file, file.absolute().parent

    def shown(self, path: str) -> str:
        """A path of the script, which runs in the current folder, as the run file has to say it."""
        if os.path.isabs(path):
            return path
        return os.path.relpath(os.path.abspath(path), self.folder)

    def model(self, name: str, where: str) -> tuple[Path, str, str]:
        """The folder of a model that is named by its path or as on the hub: it, how the file says it, and a note."""
        if (Path(name) / CONFIG).is_file():
            return Path(name), self.shown(name), ""
        local = Path(MODELS) / name.rstrip("/").rpartition("/")[2]
        if (self.folder / local / CONFIG).is_file():
            return self.folder / local, str(local), f"{name} of the hub"
        if not _HUB_NAME.fullmatch(name):
            raise SetupError(
                f"{where} starts from {name}, which is no folder with a {CONFIG} here; get it first, then say this "
                "again."
            )
        beside = self.file.parent / local
        raise SetupError(
            f"{where} starts from {name}, which is no folder with a {CONFIG} here; get it first "
            f"(`hf download {name} --local-dir {beside}`), then say this again."
        )


def put_model(values: Values, recipe: Recipe, expr: ast.expr, written: Written, by_name: bool = False) -> None:
    """`expr` is the trained object, or (`by_name`) what the script hands to a trainer as its name."""
    if by_name and (name := values.read(expr)) is not None:
        if not isinstance(name.value, str):
            raise refuse(
                values.line(expr),
                f"takes the name of the model from the command line ({name.said}): add it "
                "after SCRIPT; without it nothing is known",
            )
        return _of_folder(recipe, name, written)
    ends = values.ends(expr)
    if not ends:
        raise refuse(values.line(expr), "trains a model that cannot be followed to where it is made")
    if len(ends) > 1:
        lines = " and ".join(sorted({values.line(end.expr) for end in ends}))
        raise refuse(lines, "make different models, and which of them is trained is not known")
    _of_end(values, recipe, ends[0], written)
    return None


def _of_end(values: Values, recipe: Recipe, end: End, written: Written) -> None:
    name, where = values.made_by(end), values.line(end.expr)
    if not isinstance(end.expr, ast.Call):
        raise refuse(where, "gives the model, and it cannot be followed to where it is made")
    if _ADAPTED.match(name):
        raise refuse(where, "trains adapters (LoRA), and Shoal trains all weights")
    causal = _CAUSAL.match(name)
    if causal is None:
        raise refuse(
            where, f"makes the model by {_what(values, name)}, which is no causal language model of transformers"
        )
    call, way = end.expr, causal["way"] or ""
    if way == ".from_pretrained":
        changes = [k.arg for k in call.keywords if k.arg in _CHANGES and not _is_none(k.value)]
        if changes:
            raise refuse(where, f"loads the model with {changes[0]}")
        path = values.read(argument(call, "pretrained_model_name_or_path", 0))
        if path is None or not isinstance(path.value, str):
            raise refuse(
                where, "takes the model from a name that cannot be read: say it on the command line after SCRIPT"
            )
        _of_folder(recipe, Known(path.value, (where, *path.where) if where not in path.where else path.where), written)
        _ask_about_dtype(values, recipe, call, where)
        return
    config = argument(call, "config", 0)
    if config is None or way not in ("", ".from_config", "._from_config"):
        raise refuse(where, f"makes the model by {name}, in a way that is not followed")
    _of_config(values, recipe, config, where, written)


def _ask_about_dtype(values: Values, recipe: Recipe, call: ast.Call, where: str) -> None:
    dtype = argument(call, "dtype") or argument(call, "torch_dtype")
    found = values.read(dtype)
    if (
        dtype is None
        or "float32" in ast.unparse(dtype)
        or (found is not None and found.value in (None, "auto", "float32"))
    ):
        return
    recipe.ask(
        "model",
        f"{where} holds the weights as {ast.unparse(dtype)}; Shoal keeps them in float32, and computes in "
        "train.precision",
    )


def _what(values: Values, name: str) -> str:
    own = values.graph.class_named(name)
    if own is not None:
        return f"a class of its own ({own.name}, {own.unit.module.shown}:{own.node.lineno})"
    return name.lstrip(".") or "an expression"


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _of_folder(recipe: Recipe, name: Known, written: Written) -> None:
    folder, said, note = written.model(str(name.value), name.where[0])
    key = "model.weights"
    try:
        recipe.longest = model_of_folder(folder).max_seq_len
    except SpecError:
        try:
            recipe.longest = fields_of(folder)["max_seq_len"]
        except ShoalError as e:
            raise refuse(name.said, f"starts from {said}, and {str(e).rstrip('.')}") from None
        key, note = (
            "model.hf",
            f"{note}; " * bool(note) + "its own class in transformers is trained (docs/guide/hf-models.md)",
        )
    recipe.known(key, Known(said, name.where), note)
    for more in notes_of(folder):
        recipe.ask("model", more.rstrip("."))


def _of_config(values: Values, recipe: Recipe, config: ast.expr, where: str, written: Written) -> None:
    """A model that begins with start values: the shape is written out, for there are no weights."""
    ends = values.ends(config)
    if len(ends) != 1 or not isinstance(ends[0].expr, ast.Call):
        raise refuse(where, "makes the model of a config that cannot be followed to where it is made")
    call, made = ends[0].expr, values.made_by(ends[0])
    at = values.line(call)
    if _AUTO_CONFIG.match(made):
        path = values.read(argument(call, "pretrained_model_name_or_path", 0))
        if path is None or not isinstance(path.value, str) or len(call.keywords) > (not call.args):
            raise refuse(at, "takes the shape from a config that is not read as a whole")
        folder, said, _note = written.model(path.value, at)
        try:
            fields = model_of_folder(folder).model_dump(exclude_unset=True)
        except SpecError as e:
            if any(folder.glob("*.safetensors")):
                raise refuse(
                    at,
                    f"begins anew with the shape of {said}, which has weights beside it that `model.hf` would "
                    f"load ({str(e).rstrip('.')}); copy its {CONFIG} into a folder of its own and name that",
                ) from None
            return recipe.known("model.hf", Known(said, (at,)), "its own class in transformers, with start values")
        return _shape(recipe, fields, dict.fromkeys(fields, f"{at}, {said}/{CONFIG}"))
    own = _CLASS_CONFIG.match(made)
    if own is None:
        raise refuse(at, f"makes the config by {_what(values, made)}")
    said_by, shape = _keywords(values, call, at)
    kind = _family(own["name"])
    if kind is None:
        raise refuse(
            at,
            f"makes a {own['name']} model, whose shape Shoal takes from a folder alone: "
            "`config.save_pretrained(FOLDER)` once, and name that folder in the script",
        )
    vocabulary = "vocab_size" in shape
    try:
        fields = from_hf({"vocab_size": 1 << 20, **shape, "model_type": kind})
    except SpecError as e:
        raise refuse(at, f"makes a config that Shoal does not compute ({str(e).rstrip('.')})") from None
    if not vocabulary:
        del fields["vocab_size"]
    _shape(
        recipe,
        fields,
        {name: said_by.get(_FROM.get(name, ""), f"{at}, the default of {own['name']}Config") for name in fields},
    )
    return None


# Ours to the names of a config.
_FROM = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "tie_embeddings": "tie_word_embeddings",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "head_dim": "head_dim",
    "init_std": "initializer_range",
}


def _keywords(values: Values, call: ast.Call, at: str) -> tuple[dict[str, str], dict[str, Any]]:
    """What a config is made of; a `**table` that can be read is read."""
    if call.args:
        raise refuse(at, "makes the config of values without names")
    pairs = list[tuple[str, ast.expr]]()
    for keyword in call.keywords:
        if keyword.arg is not None:
            pairs.append((keyword.arg, keyword.value))
            continue
        ends = values.ends(keyword.value)
        table = ends[0].expr if len(ends) == 1 else None
        if isinstance(table, ast.Dict):
            pairs += [
                (str(k.value), v) for k, v in zip(table.keys, table.values, strict=True) if isinstance(k, ast.Constant)
            ]
        elif isinstance(table, ast.Call) and values.code.called(table) == "dict" and not is_open(table):
            pairs += [(str(k.arg), k.value) for k in table.keywords]
        else:
            raise refuse(at, "makes the config of a table that cannot be read")
    said, shape = dict[str, str](), dict[str, Any]()
    for name, node in pairs:
        if name in _SILENT:
            continue
        found = values.read(node)
        if found is None and name == "vocab_size":
            continue  # that of the data
        if found is None:
            raise refuse(values.line(node), f"gives the config a {name} that cannot be read")
        said[name], shape[name] = found.said, found.value
    return said, shape


def _family(name: str) -> str | None:
    plain = name.lower().replace("_", "")
    return next((kind for kind in FAMILIES if kind.replace("_", "") == plain), None)


def _shape(recipe: Recipe, fields: dict[str, Any], said: dict[str, str]) -> None:
    usual = Model().model_dump(mode="json")
    recipe.longest = Model(**fields).max_seq_len
    for name, value in Model(**fields).model_dump(mode="json", exclude_unset=True).items():
        if name == "family" or name in _FROM or value != usual[name]:
            recipe.put(f"model.{name}", value, said.get(name, ""))
    if "vocab_size" not in fields:
        recipe.ask("model", "model.vocab_size is that of the data, rounded up to 64 (`auto`)")
