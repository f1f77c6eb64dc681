"""Whether a loss is the one that Shoal trains by: the cross-entropy of the next token."""

from __future__ import annotations

import ast
import re

from shoal.adopt.native.values import Values

_CROSS = re.compile(r"torch\.nn\.(functional\.)?(cross_entropy|CrossEntropyLoss)$")
_CAUSAL = re.compile(r"transformers(\.\w+)*\.(AutoModelForCausalLM|\w+ForCausalLM|\w+LMHeadModel)(\.\w+)?$")
_PLAIN = ("ignore_index", "reduction", "input", "target")
_DEEP = 10


def own_loss(values: Values, node: ast.expr, depth: int = 0) -> tuple[ast.expr, str] | None:
    """Where and why it is another one; None where it is not."""
    if depth > _DEEP:
        return node, "has a loss that cannot be followed"
    more = depth + 1
    if isinstance(node, ast.Name):
        bounds = values.bounds(node)
        if not bounds:
            return node, "has a loss that cannot be followed"
        for bound in bounds:
            if bound.index is not None and _of_model(values, bound.value):
                continue
            if found := own_loss(values, bound.value, more):
                return found
        return None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Mult):
        return own_loss(values, node.left, more)  # by the number of micro-batches
    if isinstance(node, ast.Attribute) and node.attr == "loss":
        ends = [end.expr for end in values.ends(node.value)]
        bad = [e for e in ends if not _of_model(values, e)]
        return (node, "takes the loss of something else than the model") if bad or not ends else None
    if isinstance(node, ast.Subscript):
        return None if _of_model(values, node.value) else (node, "has a loss of its own")
    if isinstance(node, ast.Call):
        return _called(values, node, more)
    return node, "has a loss of its own"


def _called(values: Values, call: ast.Call, depth: int) -> tuple[ast.expr, str] | None:
    names = [values.code.called(call), *(values.made_by(end) for end in values.ends(call.func))]
    if any(_CROSS.match(name) for name in names):
        makers = [call, *(end.expr for end in values.ends(call.func) if isinstance(end.expr, ast.Call))]
        odd = [k.arg for one in makers for k in one.keywords if k.arg not in _PLAIN]
        if odd:
            return call, f"has a cross-entropy with {odd[0]}"
        return None
    if values.code.reads(call.func) in ("mean", "sum", "scale") and isinstance(call.func, ast.Attribute):
        return own_loss(values, call.args[0] if call.args else call.func.value, depth)
    returned = [v for unit in values.graph.callees.get(call, ()) for v in unit.returned]
    for value in returned:
        for one in value.elts if isinstance(value, ast.Tuple) else [value]:
            if (found := own_loss(values, one, depth)) is None:
                return None
        return found
    return call, "has a loss of its own"


def _of_model(values: Values, node: ast.expr) -> bool:
    """Whether it is a call of the causal model."""
    if isinstance(node, ast.Name | ast.Attribute):
        return any(_of_model(values, end.expr) for end in values.ends(node) if end.expr is not node)
    if not isinstance(node, ast.Call):
        return False
    return any(_CAUSAL.match(values.made_by(end)) for end in values.ends(node.func))
