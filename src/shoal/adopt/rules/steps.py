"""What is done in each step: gradients set to zero, losses divided, the model in the right mode."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shoal.adopt.code import LOOPS, Bound, Loop, Unit, argument, constant
from shoal.adopt.finding import Finding
from shoal.adopt.kinds import WRAPPED
from shoal.adopt.training import Backward, Step, Training

_DEEP = 5
_TYPES = re.compile(r"dtype|float|half|bf16|fp16|memory_format|channels_last")
_SCALES = ("div", "div_", "mul", "mul_", "true_divide", "divide")
_KEEPS = ("mean", "sum", "stack", "squeeze", "float", "to", "clone", "contiguous", "view", "reshape")


def zero_grad(t: Training) -> Iterator[Finding]:
    if any(step.managed for step in t.steps) or any(n.startswith("torch.distributed.autograd") for n in t.names):
        return  # a context of RPC has gradients of its own
    zeroed = {t.code.reads(target) for _, _, target in t.methods("zero_grad")}
    stepped = {step.optimizer for step in t.steps}
    for unit in t.units:  # `p.grad = None`, `p.grad.zero_()`
        for node in unit.nodes:
            if isinstance(node, ast.Attribute) and node.attr == "grad" and _is_cleared(t, node):
                return
    if not t.backwards or zeroed - stepped:  # of a model, or by another name: nobody can tell
        return
    for step in t.steps:
        if step.optimizer not in zeroed and step.optimizer and t.graph.loops(step.call):
            yield Finding(
                "zero-grad",
                step.unit.module.shown,
                t.line(step.call),
                f"gradients are never set to zero before the next step of `{step.optimizer}`: they add up for ever.",
            )


def _is_cleared(t: Training, node: ast.Attribute) -> bool:
    above = t.code.parents.get(node)
    if isinstance(node.ctx, ast.Store | ast.Del):
        return True
    return isinstance(above, ast.Attribute) and above.attr in ("zero_", "fill_", "detach_")


def accumulation(t: Training) -> Iterator[Finding]:
    if t.helpers or _sums(t) or _mends_gradients(t):
        return
    for step in t.steps:
        for backward in t.backwards:
            if backward.unit is not step.unit or backward.managed or not _accumulates(t, step, backward):
                continue
            if not _is_divided(t, backward.loss, backward.unit, 0):
                yield Finding(
                    "accumulation",
                    backward.unit.module.shown,
                    t.line(backward.call),
                    "several backward calls add up before a step, and the loss is not divided by their number.",
                )


def _sums(t: Training) -> bool:
    """A loss that is a sum is divided in another way."""
    return any(constant(k.value) == "sum" for call, _, _ in t.calls for k in call.keywords if k.arg == "reduction")


def _mends_gradients(t: Training) -> bool:
    """`p.grad /= n`, `p.grad.mul_(…)`, a rate that is divided."""
    for unit in t.units:
        for node in unit.nodes:
            if isinstance(node, ast.Attribute) and node.attr == "grad":
                above = t.code.parents.get(node)
                if isinstance(above, ast.AugAssign) or (
                    isinstance(above, ast.Attribute) and above.attr in ("div_", "mul_", "div", "mul", "copy_")
                ):
                    return True
    return False


def _accumulates(t: Training, step: Step, backward: Backward) -> bool:
    """The step is behind `i % n == 0` and the backward is not; or the backward has a loop of its own before it."""
    step_loops, back_loops = t.code.loops(step.call), t.code.loops(backward.call)
    if step_loops and back_loops and step_loops[0] is back_loops[0]:
        outside = {guard.test for guard in t.guards.around(backward.call, until=back_loops[0])}
        mine = [g for g in t.guards.around(step.call, until=step_loops[0]) if g.test not in outside]
        turns = [g for g in mine if _turns(t, g.test, step.unit, 0)]
        return bool(turns) and _zeroed_with(t, step, turns[0].test, step_loops[0])
    inner = [loop for loop in back_loops if loop not in step_loops]
    if len(inner) != 1 or (step_loops and step_loops[0] not in back_loops):
        return False
    loop = inner[0]
    counted = isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call) and t.code.called(loop.iter) == "range"
    once = (
        counted and isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call) and constant(loop.iter.args[0]) == 1
    )
    return counted and not once and bool(step_loops) and t.line(step.call) > t.line(loop)


def _turns(t: Training, test: ast.AST, unit: Unit, depth: int) -> bool:
    """Whether a condition is about every n-th time."""
    for node in ast.walk(test):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            return constant(node.right) != 1
        found = t.code.binding(node.id, unit) if isinstance(node, ast.Name) and depth < 2 else None
        values = [b.value for b in found[1][:4] if b.index is None and not b.each] if found else []
        if found and any(_turns(t, value, found[0], depth + 1) for value in values):
            return True
    return False


def _zeroed_with(t: Training, step: Step, test: ast.AST, loop: Loop) -> bool:
    """Whether gradients are set to zero as seldom as the step is taken; each time: nothing adds up."""
    for call, unit, _ in t.methods("zero_grad"):
        if unit is step.unit and loop in t.code.loops(call) and not t.guards.around(call, until=loop):
            return False
    return True


def _is_divided(t: Training, loss: ast.AST, unit: Unit, depth: int) -> bool:
    """By something that is no plain number, on its way from the loss function to backward."""
    if depth > _DEEP:
        return True  # nobody can tell
    if isinstance(loss, ast.BinOp):
        if isinstance(loss.op, ast.Div):
            return True
        if isinstance(loss.op, ast.Mult):
            return not any(isinstance(side, ast.Constant) for side in (loss.left, loss.right))
        return _is_divided(t, loss.left, unit, depth + 1) and _is_divided(t, loss.right, unit, depth + 1)
    if isinstance(loss, ast.IfExp):
        return _is_divided(t, loss.body, unit, depth + 1) or _is_divided(t, loss.orelse, unit, depth + 1)
    if isinstance(loss, ast.Name):
        changes = [n for n in unit.nodes if isinstance(n, ast.AugAssign) and t.code.reads(n.target) == loss.id]
        if any(isinstance(one.op, ast.Div | ast.Mult) for one in changes):
            return True
        if (found := t.code.binding(loss.id, unit)) is not None:
            values = [b for b in found[1][:5] if not b.each and b.value is not loss]
            return _in_place(t, loss.id, unit) or any(_of_bound(t, b, found[0], depth + 1) for b in values)
        return _in_place(t, loss.id, unit)
    if isinstance(loss, ast.Call):
        if isinstance(loss.func, ast.Attribute) and loss.func.attr in _SCALES:
            return True
        if isinstance(loss.func, ast.Attribute) and loss.func.attr in _KEEPS and not t.graph.callees.get(loss):
            inside = loss.args[0] if t.code.called(loss).startswith("torch.") and loss.args else loss.func.value
            return _is_divided(t, inside, unit, depth + 1)
        returned = [(v, u) for u in t.graph.callees.get(loss, ()) if u.name != "forward" for v in u.returned]
        return any(_is_divided(t, value, callee, depth + 1) for value, callee in returned)
    return False


def _of_bound(t: Training, bound: Bound, unit: Unit, depth: int) -> bool:
    """`logits, loss = step(…)`: which part of what a function of the project returns."""
    value = bound.value
    if bound.index is None or not isinstance(value, ast.Call):
        return _is_divided(t, value, unit, depth)
    parts = [(v, u) for u in t.graph.callees.get(value, ()) if u.name != "forward" for v in u.returned]
    chosen = [(v.elts[bound.index], u) for v, u in parts if isinstance(v, ast.Tuple) and bound.index < len(v.elts)]
    return any(_is_divided(t, part, callee, depth) for part, callee in chosen)


def _in_place(t: Training, name: str, unit: Unit) -> bool:
    return any(u is unit and t.code.reads(target) == name for _, u, target in t.methods("div_", "mul_"))


def train_mode(t: Training) -> Iterator[Finding]:
    """`eval()` in a loop that trains, with no `train()` in the same loop."""
    trained = {t.code.reads(target) for _, _, target in t.methods("train")} | _optimized(t)
    for call, unit, target in t.methods("eval"):
        if call.args or not (t.code.reads(target) in trained or "ddp" in t.kinds.of(target)):
            continue
        around = [loop for loop in t.graph.loops(call) if loop in t.all_loops]
        if not around:
            continue
        back = [
            n for n in t.graph.inside(t.graph.below(around[0]))
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "train"
            and constant(argument(n, "mode", 0)) is not False
        ]  # fmt: skip
        if not back and not _restores(t, unit):
            yield Finding(
                "train-mode",
                unit.module.shown,
                t.line(call),
                "the model is put into eval mode in the training loop, and never back: it trains on without dropout.",
            )


def _optimized(t: Training) -> set[str]:
    """Names of models whose parameters an optimizer has."""
    found = set[str]()
    for call, _, _ in t.optimizers:
        for node in ast.walk(call):
            if isinstance(node, ast.Attribute) and node.attr in ("parameters", "named_parameters"):
                found.add(t.code.reads(node.value))
    return found - {""}


def _restores(t: Training, unit: Unit) -> bool:
    """A context manager or decorator that puts the mode back in its own way."""
    return any(isinstance(node, ast.Yield) for node in unit.nodes) or any(
        isinstance(n, ast.Assign) and any(t.code.reads(target) == "training" for target in n.targets)
        for n in unit.nodes
    )


def optimizer_early(t: Training) -> Iterator[Finding]:
    """Made of parameters that are moved, or replaced by a wrapper, later in the same function."""
    if t.helpers:
        return
    for call, unit, _ in t.optimizers:
        models = {
            t.code.reads(n.func.value)
            for n in ast.walk(call)
            if isinstance(n, ast.Call)
            and isinstance(n.func, ast.Attribute)
            and n.func.attr in ("parameters", "named_parameters")
        } - {""}
        if not models or any(isinstance(one, LOOPS) for one in t.code.around(call)):
            continue
        trains = min([t.line(loop) for loop in t.all_loops if t.code.unit_of[loop] is unit], default=1 << 30)
        for later in unit.calls:
            if not t.line(call) < t.line(later) < trains or t.code.loops(later):
                continue
            what = _moves(t, later, models)
            if what:
                yield Finding(
                    "optimizer-early",
                    unit.module.shown,
                    t.line(call),
                    f"the optimizer is made before {what}: it may hold other tensors than those that are trained.",
                )
                break


def _moves(t: Training, call: ast.Call, models: set[str]) -> str | None:
    full = t.code.called(call)
    if call.args and t.code.reads(call.args[0]) in models:
        if "fsdp" in t.kinds.of(call):
            return "the model is wrapped by FSDP"
        if WRAPPED.match(full):
            return "fully_shard"
    if isinstance(call.func, ast.Attribute) and t.code.reads(call.func.value) in models:
        device = argument(call, "device", 0)
        said = ast.unparse(device) if device is not None else ""
        to_device = call.func.attr == "to" and device is not None and not _TYPES.search(said) and said not in ("'cpu'",)
        if call.func.attr == "cuda" or to_device:
            return f"the model is moved to its device ({ast.unparse(call.func)})"
    return None
