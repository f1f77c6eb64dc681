"""The run file of a script: read, checked as a run file, then written, each value with the line that it came from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.adopt.native.data import put_data
from shoal.adopt.native.loop import read_loop
from shoal.adopt.native.model import Written
from shoal.adopt.native.recipe import Entry, Recipe
from shoal.adopt.native.trainer import read_trainer, the_trainer
from shoal.adopt.native.values import Values
from shoal.adopt.training import Training
from shoal.decide.load import load_text
from shoal.errors import SetupError, SpecError, UsageError
from shoal.spec.resolve import Loaded
from shoal.spec.run import NAME_PATTERN, Data
from shoal.spec.yaml_text import dump_yaml

# In this order; what else there is comes after.
_ORDER = ("name", "seed", "model", "data", "train", "mesh", "eval", "checkpoint")
_LENGTHS = ("train.steps=", "train.epochs=", "train.tokens=")
_ASIDE = 34  # where comments begin


@dataclass(frozen=True)
class Made:
    text: str
    loaded: Loaded
    questions: list[str]
    prepare: list[str]


def make(training: Training, words: Sequence[str], overrides: Sequence[str], file: Path) -> Made:
    """`words` are those of the script; `overrides`, values of the run file that its reader has given."""
    values, recipe, written = Values(training, words), Recipe(), Written(file)
    try:
        if (trainer := the_trainer(values)) is not None:
            read_trainer(values, recipe, trainer, written)
        else:
            read_loop(values, recipe, written, has_length=any(o.startswith(_LENGTHS) for o in overrides))
        put_data(values, recipe, written)
    except RecursionError:
        raise SpecError(f"{training.project.script.shown} is nested too deeply to be read.") from None
    _fit(recipe)
    _given(recipe, overrides)
    text = as_text(recipe, training.project.script.shown, file)
    try:
        loaded = load_text(text, file)
    except SpecError as e:
        raise SpecError(f"what {training.project.script.shown} says makes no run file: {e}") from None
    asked = [question for some in recipe.questions.values() for question in some]
    return Made(text, loaded, asked, recipe.prepare)


def _fit(recipe: Recipe) -> None:
    """What a rule of run files would refuse although nobody asked for it."""
    if "data.seq_len" not in recipe.entries:
        usual = Data().seq_len
        recipe.put(
            "data.seq_len", min(usual, recipe.longest or usual), "? not read: how many tokens a row of the script has"
        )
        recipe.ask("data", "how many tokens a row of the script has is not read; seq_len is a number to begin with")
    every = recipe.value("checkpoint.every")
    if every is not None and not every:
        del recipe.entries["checkpoint.every"]
    rows, longest = recipe.entries.get("data.seq_len"), recipe.longest
    if longest is not None and rows is not None and rows.value > longest:
        recipe.put("data.seq_len", longest, f"the longest that the model takes; {rows.value} in {rows.comment}")


def _given(recipe: Recipe, overrides: Sequence[str]) -> None:
    from shoal.spec.yaml_text import scalar

    for one in overrides:
        key, _, value = one.partition("=")
        if f"{key}=" in _LENGTHS:
            for other in _LENGTHS:
                recipe.entries.pop(other.rstrip("="), None)
        recipe.put(key, scalar(value), "given on the command line")


def write(made: Made, file: Path) -> None:
    """Never over another one."""
    try:
        with open(file, "x", encoding="utf-8") as out:
            out.write(made.text)
    except FileExistsError:
        raise UsageError(f"{file} is there already; give another name, or move it away.") from None
    except OSError as e:
        raise SetupError(f"{file} cannot be written ({e.strerror}); choose another place.") from None


def as_text(recipe: Recipe, script: str, file: Path) -> str:
    name = file.stem if re.fullmatch(NAME_PATTERN, file.stem) else "run"
    tree: dict[str, Any] = {"name": Entry("name", name, "")}
    for key in sorted(recipe.entries, key=lambda k: _place(k, list(recipe.entries))):
        section, *parts = tree, *key.split(".")
        for part in parts[:-1]:
            section = section.setdefault(part, {})
        section[parts[-1]] = recipe.entries[key]
    lines = [
        f"# What {script} trains, as a run of Shoal's own. Beside each value: the line that it was read in.",
        "# A line with `?` is a question: nobody but you can answer it. Look at the file with `shoal show`.",
    ]
    if recipe.prepare:
        lines += ["#", "# First make token shards of the data:", *(f"#   {command}" for command in recipe.prepare)]
    return "\n".join([*lines, "", *_section(tree, (), recipe.questions)]) + "\n"


def _place(key: str, keys: list[str]) -> tuple[int, int, int]:
    first = key.split(".")[0]
    return _ORDER.index(first) if first in _ORDER else len(_ORDER), key.count(".") > 1, keys.index(key)


def _section(tree: dict[str, Any], above: tuple[str, ...], questions: dict[str, list[str]]) -> list[str]:
    indent, lines = "  " * len(above), list[str]()
    lines += [f"{indent}# ? {question}" for question in questions.get(".".join(above), []) if above]
    wanted = {tuple(key.split(".")) for key in questions}
    below = [path[len(above)] for path in sorted(wanted) if path[: len(above)] == above and len(path) > len(above)]
    for name in [*tree, *(n for n in dict.fromkeys(below) if n not in tree)]:
        value = tree.get(name, {})
        if isinstance(value, Entry):
            stated = f"{indent}{name}: {_said(value.value)}"
            note = f"{stated:<{_ASIDE}}  # {value.comment}" if value.comment else stated
            lines.append(note)
            continue
        inner = _section(value, (*above, name), questions)
        empty = not value
        lines += [f"{indent}{'# ' if empty else ''}{name}:", *inner] if not empty else inner
        lines += [""] if not above else []
    return lines


def _said(value: Any) -> str:
    """On one line, as a run file spells it."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_said(one) for one in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_said(one)}" for key, one in value.items()) + "}"
    return dump_yaml({"a": value}).removeprefix("a:").strip() or "null"
