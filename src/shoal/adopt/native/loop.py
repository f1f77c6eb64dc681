"""A script with a loop of its own: plain torch, Accelerate or Fabric."""

from __future__ import annotations

import ast
import re

from shoal.adopt.code import Loop, argument, is_open
from shoal.adopt.native.loss import own_loss
from shoal.adopt.native.model import Written, put_model
from shoal.adopt.native.optimizer import put_optimizer, trained_by
from shoal.adopt.native.recipe import Recipe, refuse
from shoal.adopt.native.schedule import put_of_loop
from shoal.adopt.native.trainer import PROCESSES
from shoal.adopt.native.values import Known, Values
from shoal.adopt.training import OWNERS

_CONFIGURED = {
    "engine": "hands its loop to DeepSpeed, whose optimizer, rate and batch stand in a file of its own",
    "booster": "hands model and optimizer to Colossal-AI",
}
_HANDS_ON = re.compile(r"(enumerate|tqdm(\.\w+)*|iter|zip|itertools\.\w+|reversed)$")
MEANS_OF_MEANS = (
    "each micro-batch of the script counts as much as the others; in Shoal each token does, which is the "
    "same where all "
    "micro-batches have as many targets"
)
_SEEDS = re.compile(r"(torch(\.random)?\.manual_seed|(\w+\.)*set_seed|(\w+\.)*seed_everything)$")
_CLIPS = ("clip_grad_norm_", "clip_gradients")


def read_loop(values: Values, recipe: Recipe, written: Written, has_length: bool) -> None:
    training = values.training
    for call, _, full in training.calls:
        kinds = training.kinds.of(call) if full else frozenset()
        for kind, what in _CONFIGURED.items():
            if kind in kinds and kind in training.helpers:
                raise refuse(values.line(call), what)
    if training.owner is not None:
        raise refuse(_owned_at(values), f"leaves its loop to {training.owner}")
    if not training.steps:
        raise refuse(training.project.script.shown, "has no step of an optimizer that can be found")
    if not training.optimizers:
        raise refuse(
            values.line(training.steps[0].call), "steps an optimizer that cannot be followed to where it is made"
        )
    if len(training.optimizers) > 1:
        lines = " and ".join(values.line(call) for call, _, _ in training.optimizers)
        raise refuse(lines, "make several optimizers")
    optimizer = training.optimizers[0][0]
    put_model(values, recipe, trained_by(values, optimizer), written)
    for backward in training.backwards:
        if (found := own_loss(values, backward.loss)) is not None:
            raise refuse(values.line(found[0]), found[1])
    _nothing_is_frozen(values)
    put_optimizer(values, recipe, optimizer)
    accumulated = _accumulation(values)
    _length(values, recipe, accumulated, has_length)
    _batch(values, recipe, accumulated)
    _clip(values, recipe)
    _precision(values, recipe)
    put_of_loop(values, recipe, training.project.script.shown)
    seeds = [c for c, _, full in training.calls if _SEEDS.match(full)]
    seed = values.read(argument(seeds[0], "seed", 0)) if seeds else None
    if seed is not None and isinstance(seed.value, int) and seed.value >= 0:
        recipe.known("seed", seed)


def _owned_at(values: Values) -> str:
    """Where the framework that has the loop comes in."""
    patterns = OWNERS.values()
    for classes in values.code.classes.values():
        for one in classes:
            if any(pattern.match(base) for base in values.graph.bases(one) for pattern in patterns):
                return values.line(one.node)
    calls = (call for call, _, full in values.training.calls if any(pattern.match(full) for pattern in patterns))
    return values.line(next(calls, values.training.project.script.tree))


def _nothing_is_frozen(values: Values) -> None:
    for unit in values.training.units:
        for node in unit.nodes:
            targets = node.targets if isinstance(node, ast.Assign) else []
            off = isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and node.value.value is False
            frozen = off and any(isinstance(t, ast.Attribute) and t.attr == "requires_grad" for t in targets)
            if isinstance(node, ast.Call) and values.code.reads(node.func) == "requires_grad_":
                frozen = bool(node.args) and isinstance(node.args[0], ast.Constant) and node.args[0].value is False
            if frozen:
                raise refuse(values.line(node), "freezes weights, and Shoal trains all of them")


def _accumulation(values: Values) -> Known | None:
    """Micro-batches of a step; None where that is not known."""
    training = values.training
    for call, _ in training.made("accelerator"):
        if (node := argument(call, "gradient_accumulation_steps", 3)) is not None:
            return values.read(node)
    step, backwards = training.steps[0], training.backwards
    for guard in training.guards.around(step.call):
        for part in ast.walk(guard.test):
            if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod):
                return values.read(part.right)
    around = training.graph.loops(step.call)
    inner = [one for b in backwards for one in training.graph.loops(b.call) if one not in around]
    if not inner:
        return Known(1, ())
    found = [_times(values, one) for one in inner]
    return found[0] if len(found) == 1 else None


def _times(values: Values, loop: Loop) -> Known | None:
    """Of a `for` over a range: how often; of `while n < N`: N."""
    if isinstance(loop, ast.While):
        test = loop.test
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Lt):
            return values.read(test.comparators[0])
        return None
    over = _over(values, loop)
    if not isinstance(over, ast.Call) or values.code.called(over) not in (
        "range",
        "trange",
        "tqdm.trange",
        "tqdm.auto.trange",
    ):
        return None
    if len(over.args) == 3:
        return None
    last, first = values.read(over.args[-1]), values.read(over.args[0]) if len(over.args) == 2 else None
    if first is not None and last is not None and isinstance(first.value, int) and isinstance(last.value, int):
        return Known(last.value - first.value, last.where)
    return last  # it begins where a checkpoint ends


def _over(values: Values, loop: Loop) -> ast.expr | None:
    """What a `for` reads, without what hands it on."""
    if isinstance(loop, ast.While):
        return None
    node = loop.iter
    while isinstance(node, ast.Call) and node.args and _HANDS_ON.search(values.code.called(node).lstrip(".")):
        node = node.args[0]
    if isinstance(node, ast.Name):
        ends = values.ends(node)
        if len(ends) == 1 and isinstance(ends[0].expr, ast.Call) and ends[0].index is None:
            inner = ends[0].expr
            while inner.args and isinstance(inner.args[0], ast.Call) and _HANDS_ON.search(values.code.called(inner)):
                inner = inner.args[0]
            return inner
    return node


def _length(values: Values, recipe: Recipe, accumulated: Known | None, has_length: bool) -> None:
    training = values.training
    around = training.graph.loops(training.steps[0].call)
    found = _broken_at(values, around)
    counted = [(one, _times(values, one)) for one in around]
    over_data = [one for one, times in counted if times is None and isinstance(one, ast.For | ast.AsyncFor)]
    times = next((times for _, times in reversed(counted) if times is not None), None)
    if found is not None and isinstance(found.value, int) and found.value > 0:
        return recipe.known("train.steps", found)
    if times is not None and isinstance(times.value, int) and times.value > 0:
        whiles = [one for one, t in counted if t is times and isinstance(one, ast.While)]
        if over_data and not whiles:
            return recipe.known("train.epochs", times, "of Shoal's windows of seq_len tokens")
        each = accumulated.value if accumulated is not None and not _has_inner(values) else 1
        note = f"micro-batches, {each} a step" if each != 1 else ""
        return recipe.known("train.steps", Known(max(1, times.value // each), times.where), note)
    if not has_length:
        where = values.line(around[-1] if around else training.steps[0].call)
        raise refuse(
            where, "does not tell by a number that can be read how long it trains (say it: train.steps=N before SCRIPT)"
        )
    return None


def _has_inner(values: Values) -> bool:
    """Whether the micro-batches have a loop of their own, inside that of the steps."""
    training = values.training
    around = training.graph.loops(training.steps[0].call)
    return any(one not in around for b in training.backwards for one in training.graph.loops(b.call))


def _broken_at(values: Values, around: list[Loop]) -> Known | None:
    """`if step >= N: break` in one of the loops."""
    for loop in around:
        for node in values.graph.below(loop):
            ends = isinstance(node, ast.If) and any(isinstance(s, ast.Break) for s in node.body)
            test = node.test if isinstance(node, ast.If) and ends else None
            counts = isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.GtE | ast.Eq)
            found = values.read(test.comparators[0]) if isinstance(test, ast.Compare) and counts else None
            if found is not None:
                return found
    return None


def _batch(values: Values, recipe: Recipe, accumulated: Known | None) -> None:
    each = _of_loader(values) or _of_indices(values)
    if each is None or not isinstance(each.value, int) or accumulated is None or not isinstance(accumulated.value, int):
        return recipe.ask("train", "the batch is not read: train.batch is Shoal's, 32 windows")
    note = f"{each.value} x accumulation {accumulated.value}" if accumulated.value > 1 else ""
    if accumulated.value > 1:
        recipe.ask("train", MEANS_OF_MEANS)
    if values.training.spreads or values.training.helpers:
        note += f"{', ' if note else ''}{PROCESSES}"
    recipe.known("train.batch", Known(each.value * accumulated.value, (*each.where, *accumulated.where)), note)
    recipe.known("mesh.micro_batch", each)
    return None


def _of_loader(values: Values) -> Known | None:
    training = values.training
    loops = [one for one in training.graph.loops(training.steps[0].call) if isinstance(one, ast.For)]
    of_loop = [over for one in loops if (over := _over(values, one)) is not None]
    made = [n for n in of_loop if isinstance(n, ast.Call) and "loader" in training.kinds.of(n)]
    if not made and len(all_made := [c for c, _ in training.made("loader")]) == 1:
        made = all_made
    if len(made) != 1 or is_open(made[0]):
        return None
    node = argument(made[0], "batch_size", 1)
    return values.read(node) if node is not None else Known(1, (f"{values.line(made[0])}, the default of DataLoader",))


def _of_indices(values: Values) -> Known | None:
    """`torch.randint(…, (batch,))`, of which each is the begin of a row."""
    for call, _, full in values.training.calls:
        size = argument(call, "size", 1) if full == "torch.randint" else None
        if isinstance(size, ast.Tuple) and len(size.elts) == 1:
            return values.read(size.elts[0])
    return None


def _clip(values: Values, recipe: Recipe) -> None:
    calls = [c for c, _, _ in values.training.calls if values.code.reads(c.func) in _CLIPS]
    if not calls:
        return recipe.put("train.clip", None, "the script clips nothing")
    node = argument(calls[0], "max_norm", 1) or argument(calls[0], "clip_val")
    recipe.number(
        values,
        "train.clip",
        values.read(node),
        f"{values.line(calls[0])}: the largest norm is not read; train.clip is Shoal's, 1.0",
        1e-30,
    )
    return None


def _precision(values: Values, recipe: Recipe) -> None:
    said = dict[str, str]()
    for call, _, full in values.training.calls:
        if full.endswith(("autocast", ".amp.autocast")):
            said.setdefault(ast.unparse(argument(call, "dtype", 1) or ast.Constant("float16")), values.line(call))
        for node in [argument(call, "mixed_precision")] if "accelerator" in values.training.kinds.of(call) else []:
            if (found := values.read(node)) is not None:
                said.setdefault(str(found.value), found.said)
        for node in [argument(call, "precision")] if "fabric" in values.training.kinds.of(call) else []:
            if (found := values.read(node)) is not None:
                said.setdefault(str(found.value), found.said)
    kinds = {
        "bf16": "bf16",
        "bfloat16": "bf16",
        "fp16": "fp16",
        "float16": "fp16",
        "16": "fp16",
        "no": "fp32",
        "32": "fp32",
    }
    found_kinds = {next((kinds[k] for k in kinds if k in word), "?"): (word, at) for word, at in said.items()}
    if len(found_kinds) > 1 or "?" in found_kinds:
        return recipe.ask("train", "the precision is not read: train.precision is `auto`")
    if not found_kinds:
        return recipe.put("train.precision", "fp32", "the script has no autocast")
    kind, (_word, at) = next(iter(found_kinds.items()))
    note = "the script has fp16, which Shoal has not" if kind == "fp16" else ""
    recipe.known("train.precision", Known("bf16" if kind == "fp16" else kind, (at,)), note)
    return None
