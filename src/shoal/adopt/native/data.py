"""The data of a script as the section `data`: shards where it has them, else the command that makes some."""

from __future__ import annotations

import ast
import re
import shlex

from shoal.adopt.code import argument
from shoal.adopt.native.model import Written
from shoal.adopt.native.recipe import Recipe
from shoal.adopt.native.values import Known, Values
from shoal.errors import SetupError

_FILES = ("json", "text", "csv", "parquet", "arrow")
_TOKENIZER = re.compile(r"transformers(\.\w+)*\.\w*Tokenizer\w*\.from_pretrained$")
_NO_TEXT = "TEXT"
DATA = "data"


def put_data(values: Values, recipe: Recipe, written: Written) -> None:
    calls = [(c, full) for c, _, full in values.training.calls]
    ours = [c for c, full in calls if full == "shoal.hf.Data"]
    if len(ours) == 1:
        return _shards(values, recipe, ours[0], written)
    _length_of_rows(values, recipe)
    tokenizer = _tokenizer(values, recipe, written)
    loads = [c for c, full in calls if full in ("datasets.load_dataset", "datasets.load.load_dataset")]
    given, note = _NO_TEXT, "put the script's text in the place of TEXT"
    name = DATA
    if len(loads) == 1:
        given, name, note = _of_load(values, loads[0], written)
    elif loads:
        several = " and ".join(values.line(c) for c in loads)
        note = f"{several} load several; put the one that is trained on in the place of TEXT"
    elif raw := _token_file(values):
        note = f"{raw} reads a file of token numbers; put the text that it was made of in the place of TEXT"
    out = f"{DATA}/{name}" if name != DATA else DATA
    field = _text_field(values, recipe)
    words = [
        "shoal",
        "data",
        "prepare",
        *given.split("\0"),
        *field,
        *tokenizer,
        "--eval-fraction",
        "0.05",
        "--out",
        out,
    ]
    recipe.prepare.append(shlex.join(words))
    recipe.put("data.train", f"{out}/train", f"made by the command above; {note}")
    recipe.put("data.eval", f"{out}/eval", "a twentieth that is held out")
    return None


def _shards(values: Values, recipe: Recipe, call: ast.Call, written: Written) -> None:
    for key, node in (("data.train", argument(call, "train", 0)), ("data.eval", argument(call, "held_out", 1))):
        found = values.read(node)
        if found is not None and isinstance(found.value, str):
            recipe.known(key, Known(written.shown(found.value), found.where))
        elif node is not None:
            recipe.ask("data", f"{values.line(node)}: which shards {key} is could not be read")
    if "data.train" not in recipe.entries:
        recipe.put("data.train", f"{DATA}/train", "put the folder of the script's shards here")
    recipe.number(
        values, "data.seq_len", values.read(argument(call, "seq_len")), "the length of a window is not read", 1
    )
    if (seed := values.read(argument(call, "seed"))) is not None and isinstance(seed.value, int):
        recipe.known("seed", seed, "of the order; the same windows come at the same steps")
    for name in ("mask_documents", "packing"):
        if (more := values.read(argument(call, name))) is not None:
            recipe.known(f"data.{name}", more)


def _of_load(values: Values, call: ast.Call, written: Written) -> tuple[str, str, str]:
    """What `data prepare` is given, a name for the folder, and a note."""
    where = values.line(call)
    first, second = values.read(argument(call, "path", 0)), values.read(argument(call, "name", 1))
    if first is None or not isinstance(first.value, str):
        return _NO_TEXT, DATA, f"{where} loads a dataset whose name is not read; put it in the place of TEXT (hf:NAME)"
    if first.value in _FILES:
        files = values.read(argument(call, "data_files"))
        if files is None or not isinstance(files.value, str):
            return _NO_TEXT, DATA, f"{where} loads files that are not read; put them in the place of TEXT"
        return files.value, DATA, f"{where}"
    words = [f"hf:{first.value}"]
    if second is not None and isinstance(second.value, str):
        words += ["--config", second.value]
    split = values.read(argument(call, "split"))
    words += ["--split", str(split.value)] if split is not None and split.value != "train" else []
    return "\0".join(words), first.value.rpartition("/")[2], where


def _tokenizer(values: Values, recipe: Recipe, written: Written) -> list[str]:
    made = [c for c, _, full in values.training.calls if _TOKENIZER.match(full)]
    found = values.read(argument(made[0], "pretrained_model_name_or_path", 0)) if len(made) == 1 else None
    model = recipe.value("model.weights") or recipe.value("model.hf")
    if found is not None and isinstance(found.value, str):
        try:
            return ["--tokenizer", written.model(found.value, values.line(made[0]))[1]]
        except SetupError as e:
            recipe.ask("data", str(e).rstrip("."))
    return ["--tokenizer", str(model)] if model else ["--tokenizer", "TOKENIZER"]


def _text_field(values: Values, recipe: Recipe) -> list[str]:
    """The column that a tokenizer is given."""
    found = set[str]()
    for call, _, _ in values.training.calls:
        first = call.args[0] if call.args else None
        if not (isinstance(first, ast.Subscript) and isinstance(first.slice, ast.Constant)):
            continue
        made = [values.made_by(end) for end in values.ends(call.func)] if isinstance(call.func, ast.Name) else []
        if any(_TOKENIZER.match(name) for name in made) and isinstance(first.slice.value, str):
            found.add(first.slice.value)
    return ["--text-field", found.pop()] if len(found) == 1 and found != {"text"} else []


def _token_file(values: Values) -> str | None:
    made = [c for c, _, full in values.training.calls if full in ("numpy.memmap", "numpy.fromfile")]
    return values.line(made[0]) if made else None


def _length_of_rows(values: Values, recipe: Recipe) -> None:
    if "data.seq_len" in recipe.entries:
        return
    found = list[Known]()
    for call, _, _ in values.training.calls:
        for end in values.ends(call.func) if isinstance(call.func, ast.Name) else ():
            if _TOKENIZER.match(values.made_by(end)) and (n := values.read(argument(call, "max_length"))) is not None:
                found.append(n)
    if not found:
        found = _slices(values)
    numbers = {n.value for n in found if isinstance(n.value, int) and not isinstance(n.value, bool) and n.value > 1}
    if len(numbers) == 1:
        recipe.known("data.seq_len", next(n for n in found if n.value in numbers))


def _slices(values: Values) -> list[Known]:
    """`data[i : i + block]`: how long a row is, by the name or number that is added."""
    found = list[Known]()
    for unit in values.training.units:
        for node in unit.nodes:
            if not isinstance(node, ast.Slice) or not isinstance(node.upper, ast.BinOp) or node.lower is None:
                continue
            upper = node.upper
            if isinstance(upper.op, ast.Add) and ast.dump(upper.left) == ast.dump(node.lower):
                found += [n] if (n := values.read(upper.right)) is not None else []
    return found
