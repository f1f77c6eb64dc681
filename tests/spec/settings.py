"""Every name of the run file, with values that are right for it and not the usual ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin

from shoal.spec import Run
from shoal.spec.names import Name, names

LEAVES = [n for n in names() if n.section is None]
# What a section cannot be without.
NEEDED = {
    "launch.volumes": {"launch.volumes.0.at": "/x"},
    "model.experts": {"model.experts": {"count": 4, "top_k": 2, "ffn_dim": 8}},
    "model.mamba": {"model.mamba": {"attention_layers": [1], "heads": 4}},
    "model.mla": {
        "model.mla": {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    },
    "model.rope_scaling": {"model.rope_scaling": {"kind": "linear", "factor": 2.0}},
    "train.schedule.past": {"train.schedule.past": [{"until": 3, "steps": 9}]},
    "script": {"script.path": "/x.py"},
    "batch": {"batch.command": ["x"], "batch.units": 3},
    "data.eval": {"data.eval": [{"path": "held-out"}]},
}
TRIED: list[Any] = [
    "s3://bucket/prefix", 2, 7, 0.25, True, False, "x", "30 s", [2], [0.5, 0.6], {"A": "x"}, {"A": 1}, ["x"], "/x",
    {"A": "env:HOME"}, "off", 64, 128, 3.5, "/y", "mine:Thing", ["mine:Thing"],
]  # fmt: skip


def least(name: Name | None = None, foreign: str | None = None) -> dict[str, Any]:
    """A run file with nothing in it that a person could leave out, but for what a name needs around it. `foreign`: of a
    run that is a `script` or a `batch`."""
    values: dict[str, Any] = {"name": "x", "data": {"train": [{"path": "x"}]}, "train": {"steps": 9}}
    if foreign == "script":
        values = {"name": "x", "script": {"path": "/x.py"}}
    elif foreign == "batch":
        values = {"name": "x", "batch": {"command": ["x"], "units": 3}}
    for section, needed in NEEDED.items():
        if name is not None and name.dotted.startswith(f"{section}."):
            for key, value in needed.items():
                put(values, key, copy.deepcopy(value))
    return values


def changes(name: Name, foreign: str | None = None) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Values for a name, each with the run file that it makes."""
    usual = Run.model_validate(least(name, foreign))
    for value in [*TRIED, *_literals(name.field.annotation)]:
        changed = least(name, foreign)
        put(changed, name.dotted, value)
        try:
            run = Run.model_validate(changed)
        except ValueError:
            continue
        if run != usual:
            yield value, changed


def another(name: Name) -> Any:
    return next(changes(name))[0]


def put(values: Any, name: str, value: Any) -> None:
    """Into sections and lists, whose only item is 0 or *."""
    parts = name.split(".")
    for part, then in pairwise(parts):
        inner: Any = [] if then in ("*", "0") else {}
        if part in ("*", "0"):
            values.extend([inner] * (not values))
            values = values[0]
        else:
            values = values.setdefault(part, inner)
    values[parts[-1]] = value


def _literals(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    for part in get_args(annotation):
        yield from _literals(part)
