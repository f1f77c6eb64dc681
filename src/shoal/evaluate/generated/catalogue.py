"""The made tasks by name, as items and as the task file that lm-eval reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shoal.errors import UsageError
from shoal.evaluate.generated.cloze import CLOZE
from shoal.evaluate.generated.dice import Dice
from shoal.evaluate.generated.kind import Kind
from shoal.evaluate.generated.needle import needle
from shoal.evaluate.generated.numbers import ARITHMETIC, SORTING
from shoal.evaluate.generated.text import BRACKETS, COPY, JSON
from shoal.evaluate.generated.told import Told
from shoal.near import closest

COUNT = 200
MOST = 1_000_000
KINDS: Mapping[str, Kind | Told] = {
    "arithmetic": ARITHMETIC,
    "brackets": BRACKETS,
    "cloze": CLOZE,
    "copy": COPY,
    "json": JSON,
    "needle": needle(1_000),
    "needle-4k": needle(4_000),
    "needle-16k": needle(16_000),
    "needle-64k": needle(64_000),
    "sorting": SORTING,
}


@dataclass(frozen=True)
class Made:
    """A task with its items."""

    name: str
    keys: Mapping[str, Any]
    """Of lm-eval's task file, less those that say where the data is."""
    items: tuple[dict[str, Any], ...]
    examples: tuple[dict[str, Any], ...]
    """Of few-shot: none of them is an item."""


def named(name: str, seed: int = 0, count: int | None = None) -> Made:
    """The items are a function of name, version, seed and place: the first hundred are the same whatever the count."""
    kind = KINDS.get(name)
    if kind is None:
        near = closest(name, list(KINDS))
        more = f" Did you mean {near}?" if near else ""
        raise UsageError(f"there is no made task '{name}'; there are {', '.join(KINDS)}.{more}")
    if count is not None and not 1 <= count <= MOST:
        raise UsageError(f"{count:,} items of {name} were asked for; it can be 1 to {MOST:,}.")
    keys = {"task": name, **kind.keys, "metadata": {"version": kind.version}}
    if isinstance(kind, Told):
        keys["metadata"] |= {"cluster": kind.cluster}
        return Made(name, keys, kind.items(seed, count), ())
    keys["metadata"] |= {"seed": seed}
    shots = int(kind.keys.get("num_fewshot", 0))
    return Made(
        name,
        keys,
        tuple(_item(kind, name, seed, "item", k) for k in range(COUNT if count is None else count)),
        tuple(_item(kind, name, seed, "example", k) for k in range(shots)),
    )


def first_of(name: str, limit: int | None) -> Made:
    """The first so many of a made task, as `--limit` has it; beyond the usual count where there are more."""
    more = limit is not None and limit > COUNT and not isinstance(KINDS.get(name), Told)
    return named(name, count=limit if more else None)


def _item(kind: Kind, name: str, seed: int, side: str, place: int) -> dict[str, Any]:
    names = (name, kind.version, seed, side, place)
    return {"id": "-".join(map(str, names)), **kind.item(Dice(*names))}


def write(made: Made, folder: Path) -> Path:
    """As a task file with its data beside it, which `shoal eval` and lm-eval read alike."""
    data_files = {"test": f"{made.name}.jsonl"}
    if made.examples:
        data_files["train"] = f"{made.name}.examples.jsonl"
    where = {"dataset_path": "json", "dataset_kwargs": {"data_files": data_files}, "test_split": "test"}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"{folder} is no folder; name one for the task files with --out.") from None
    for side, items in (("test", made.items), ("train", made.examples)):
        if side in data_files:
            (folder / data_files[side]).write_text("".join(json.dumps(one) + "\n" for one in items), encoding="utf-8")
    path = folder / f"{made.name}.yaml"
    said = yaml.safe_dump({"task": made.name, **where, **made.keys}, sort_keys=False, allow_unicode=True)
    path.write_text(
        f"# lm-eval looks for the data files in the folder that it is started in.\n{said}", encoding="utf-8"
    )
    return path
