"""The learning rate over a run: which of Shoal's schedules a script's is, and by how much they differ.

transformers and torch count from the step before: at step k of N (from 0) their linear decay is at (N - k) / (N - w),
and with a warm-up of w steps the first step has the rate 0. Shoal reaches the peak at the last step of the warm-up, and
the floor at the last step of the run. A linear decay is `wsd` without a stable part, and the same to the bit of a
float: its last rate, 1 / (N - w), is the floor. A cosine is one step ahead where N is the same.
"""

from __future__ import annotations

import ast
import math
import re

from shoal.adopt.code import argument
from shoal.adopt.native.recipe import Recipe
from shoal.adopt.native.values import Known, Values

_OF_TRANSFORMERS = re.compile(
    r"(transformers|diffusers)(\.\w+)*\.get_(?P<name>\w*?)_?(?P<with>schedule|scheduler)(_with_warmup)?$"
)
_OWN = "transformers(\\.\\w+)*\\."
ONE_STEP = "the curve of the script, one step earlier: Shoal is at the floor at its last step"
FIRST_RATE = "the script's first step has the rate 0, and each of the warm-up that of Shoal one step later"
UNKNOWN_END = "all steps after the warm-up, whose number is not known here"


def put_named(recipe: Recipe, name: Known, warmup: Known | None, floor: Known | None = None) -> None:
    """By the names that transformers has for them. `train.steps` is put before, where it is known."""
    kind = str(name.value).rpartition(".")[2].lower()
    plain = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
    plain |= {"cosine_with_min_lr": "cosine"}
    if kind not in plain or (kind == "cosine_with_min_lr" and floor is None):
        recipe.ask(
            "train.schedule",
            f"{name.said}: the schedule `{name.value}` is none of Shoal's (cosine, wsd, constant); "
            "write it as own.schedule (docs/guide/own-code.md), or choose one: until then it is Shoal's usual one",
        )
        return None
    wanted = Known(0, name.where) if kind == "constant" else warmup
    if plain[kind] == "linear":
        return _linear(recipe, name, wanted)
    recipe.known("train.schedule.name", Known(plain[kind], name.where), ONE_STEP if plain[kind] == "cosine" else "")
    _warmup(recipe, wanted)
    if plain[kind] == "cosine":
        low = floor or Known(0.0, name.where)
        recipe.known("train.schedule.min_ratio", Known(float(low.value), low.where))
    return None


def none(recipe: Recipe, where: str) -> None:
    recipe.put("train.schedule.name", "constant", f"{where} has no schedule")
    recipe.put("train.schedule.warmup_steps", 0, "none")


def _warmup(recipe: Recipe, warmup: Known | None) -> int | str | None:
    key = "train.schedule.warmup_steps"
    if warmup is None or not isinstance(warmup.value, int | float):
        recipe.ask("train.schedule", "how long the warm-up is could not be read: until then it is Shoal's `auto`")
        return None
    value: int | str = int(warmup.value)
    if 0 < warmup.value < 1:
        steps = recipe.value("train.steps")
        value = math.ceil(warmup.value * steps) if steps else f"{100 * warmup.value:g}%"
    recipe.known(key, Known(value, warmup.where), FIRST_RATE if value else "")
    return value


def _linear(recipe: Recipe, name: Known, warmup: Known | None) -> None:
    steps = recipe.value("train.steps")
    recipe.known("train.schedule.name", Known("wsd", name.where), "linear is wsd without a stable part")
    first = _warmup(recipe, warmup)
    if isinstance(first, int) and isinstance(steps, int) and steps - first > 1:
        recipe.put("train.schedule.decay_steps", steps - first - 1, "all steps after the warm-up")
        recipe.put("train.schedule.min_ratio", 1 / (steps - first), "the rate of the script's last step, 1 of so many")
        return
    recipe.put("train.schedule.min_ratio", 0.0, "Shoal's last step; that of the script is one step before it")
    if first == 0:
        recipe.put("train.schedule.decay_steps", "99.9999%", "all steps")
    elif isinstance(first, str):
        recipe.put(
            "train.schedule.decay_steps", f"{99.9999 - float(first.rstrip('%')):g}%", "all steps after the warm-up"
        )
    else:
        recipe.ask(
            "train.schedule",
            f"decay_steps is {UNKNOWN_END}: `shoal show` says how many steps there are once the data "
            "is prepared; until then it is a fifth of them",
        )


def put_of_loop(values: Values, recipe: Recipe, optimizer: str) -> None:
    """The schedule of a loop of the script's own."""
    made = [call for call, _ in values.training.made("schedule")]
    if not made:
        by_hand = [n for u in values.training.units for n in u.nodes if _sets_a_rate(n)]
        if by_hand:
            recipe.ask(
                "train.schedule",
                f"{values.line(by_hand[0])} sets the rate by code of its own; write it as own.schedule "
                "(docs/guide/own-code.md), or choose one: until then it is Shoal's usual one",
            )
        else:
            none(recipe, optimizer)
        return None
    if len(made) > 1:
        lines = " and ".join(values.line(call) for call in made)
        return recipe.ask(
            "train.schedule", f"{lines} make several schedules; which one Shoal should have is left to you"
        )
    call, where = made[0], values.line(made[0])
    full = values.code.called(call)
    if full.endswith(".CosineAnnealingLR"):
        return _torch_cosine(values, recipe, call, where)
    if full.endswith(".get_scheduler"):
        name = values.read(argument(call, "name", 0))
        warmup, length = argument(call, "num_warmup_steps", 2), argument(call, "num_training_steps", 3)
    elif found := re.match(_OWN + r"get_(constant|linear|cosine)_schedule(_with_warmup)?$", full):
        name = Known("constant" if found[2] == "constant" and not found[3] else found[2], (where,))
        if found[2] == "constant" and found[3]:
            name = Known("constant_with_warmup", (where,))
        warmup, length = argument(call, "num_warmup_steps", 1), argument(call, "num_training_steps", 2)
    else:
        kind = full.rpartition(".")[2] or "a schedule of its own"
        return put_named(recipe, Known(kind, (where,)), None)
    if name is None:
        return recipe.ask(
            "train.schedule", f"{where}: the name of the schedule is not read: until then it is Shoal's usual one"
        )
    _same_length(values, recipe, length)
    put_named(recipe, name, values.read(warmup) if warmup is not None else Known(0, (where,)))
    return None


def _torch_cosine(values: Values, recipe: Recipe, call: ast.Call, where: str) -> None:
    low, peak = values.read(argument(call, "eta_min", 2)), recipe.value("train.optimizer.lr")
    floor = Known(0.0, (where,))
    if low is not None and isinstance(low.value, int | float) and peak:
        floor = Known(low.value / peak, low.where)
    elif argument(call, "eta_min", 2) is not None:
        recipe.ask("train.schedule", f"{where}: eta_min is not read; min_ratio is what is left of the peak at the end")
    _same_length(values, recipe, argument(call, "T_max", 1))
    recipe.known("train.schedule.name", Known("cosine", (where,)), ONE_STEP)
    recipe.put("train.schedule.warmup_steps", 0, "none")
    recipe.known("train.schedule.min_ratio", floor)


def _same_length(values: Values, recipe: Recipe, node: ast.expr | None) -> None:
    """Shoal's schedules are as long as the run."""
    if node is None:
        return
    length, steps = values.read(node), recipe.value("train.steps")
    if length is None or steps is None:
        recipe.ask(
            "train.schedule",
            f"{values.line(node)}: how long the schedule is could not be compared with the run; Shoal's "
            "is as long as the run",
        )
    elif length.value != steps:
        recipe.ask(
            "train.schedule",
            f"{values.line(node)} makes a schedule of {length.value} steps for a run of {steps}; Shoal's "
            "is as long as the run",
        )


def _sets_a_rate(node: ast.AST) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    return any(
        isinstance(t, ast.Subscript) and isinstance(t.slice, ast.Constant) and t.slice.value == "lr" for t in targets
    )
