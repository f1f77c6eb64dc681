"""The optimizer of a loop of the script's own, and what it moves."""

from __future__ import annotations

import ast

from shoal.adopt.code import argument, is_open
from shoal.adopt.native.recipe import Recipe, refuse
from shoal.adopt.native.values import Known, Values

_OURS = (
    "torch.optim.AdamW",
    "torch.optim.adamw.AdamW",
    "transformers.AdamW",
    "torch.optim.Adam",
    "torch.optim.adam.Adam",
)
_MOST_LOOKED = 500
_USUAL = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
OTHER_DECAY = "Shoal decays matrices alone, and not norms and biases"


def trained_by(values: Values, optimizer: ast.Call) -> ast.expr:
    """The object whose parameters it is given."""
    given = argument(optimizer, "params", 0)
    for node in _looked_through(values, given):
        of = node.func if isinstance(node, ast.Call) else None
        if isinstance(of, ast.Attribute) and of.attr in ("parameters", "named_parameters"):
            return of.value
    raise refuse(values.line(optimizer), "gives the optimizer parameters that cannot be followed to a model")


def _looked_through(values: Values, node: ast.AST | None) -> list[ast.AST]:
    """All that an expression is made of, through names."""
    found, wanted, seen = list[ast.AST](), [node] if node is not None else [], set[ast.AST]()
    while wanted and len(found) < _MOST_LOOKED:
        one = wanted.pop(0)
        if one in seen:
            continue
        seen.add(one)
        found.append(one)
        if isinstance(one, ast.Name):
            wanted += [b.value for b in values.bounds(one)]
        wanted += list(ast.iter_child_nodes(one))
    return found


def put_optimizer(values: Values, recipe: Recipe, call: ast.Call) -> None:
    name, where = values.code.called(call), values.line(call)
    if name not in _OURS:
        raise refuse(
            where, f"takes the optimizer {name.rpartition('.')[2] or 'of its own'}, and Shoal has AdamW and Muon"
        )
    if is_open(call):
        raise refuse(where, "gives the optimizer settings that cannot be seen (`**`)")
    adam = name.endswith("Adam")
    for key, at in (("lr", 1), ("betas", 2), ("eps", 3)):
        node = argument(call, key, at)
        usual = Known(_USUAL[key], (f"{where}, the default of {name.rpartition('.')[2]}",))
        found = values.read(node) if node is not None else usual
        if key == "betas" and found is not None:
            found = Known(list(found.value), found.where) if isinstance(found.value, tuple) else None
        if found is None:
            recipe.ask(
                "train.optimizer", f"{values.line(node or call)}: {key} is not read; until then it is Shoal's usual one"
            )
        else:
            recipe.known(f"train.optimizer.{key}", found)
    _decay(values, recipe, call, adam)
    for name in ("amsgrad", "maximize"):
        if (node := argument(call, name)) is not None and not (isinstance(node, ast.Constant) and not node.value):
            raise refuse(values.line(node), f"gives AdamW {name}")


def _decay(values: Values, recipe: Recipe, call: ast.Call, adam: bool) -> None:
    where, key = values.line(call), "train.optimizer.weight_decay"
    node = argument(call, "weight_decay", 4)
    usual = Known(0.0 if adam else 0.01, (f"{where}, the default of {'Adam' if adam else 'AdamW'}",))
    found = values.read(node) if node is not None else usual
    groups = [n for n in _looked_through(values, argument(call, "params", 0)) if isinstance(n, ast.Dict)]
    said = list[Known | None]()
    for group in groups:
        for name, value in zip(group.keys, group.values, strict=True):
            if isinstance(name, ast.Constant) and name.value in ("lr", "betas", "eps"):
                raise refuse(values.line(value), f"gives groups of weights a {name.value} of their own")
            if isinstance(name, ast.Constant) and name.value == "weight_decay":
                said.append(values.read(value))
    if said:
        sizes = {one.value for one in said if one is not None and one.value}
        if None in said or len(sizes) > 1:
            return recipe.ask("train.optimizer", f"{where}: the weight decay of its groups is not read as one number")
        found = next((one for one in said if one is not None and one.value), said[0])
    if found is not None and adam and found.value:
        raise refuse(where, "has Adam with weight_decay, which adds to the gradient; Shoal's decay is AdamW's")
    recipe.number(
        values,
        key,
        found,
        f"{where}: the weight decay is not read",
        note=OTHER_DECAY if found and found.value and not said else "",
    )
    return None
