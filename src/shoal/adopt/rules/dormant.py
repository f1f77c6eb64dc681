"""Frameworks that are no longer cared for: a script that needs one is tied to an old PyTorch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shoal.adopt.finding import Finding
from shoal.adopt.training import Training

KNOWN = {
    "horovod": "Horovod had its last release in June 2023 and does not work with a PyTorch above 2.3; `shoal run` "
    "stands in for horovod.torch",
    "colossalai": "Colossal-AI had its last release in June 2025; `shoal checkpoint import FOLDER` takes in what its "
    "booster.save_model(…, shard=True) has saved",
    "composer": "Composer had its last release in July 2025 and wants a PyTorch below 2.7.1",
}
_SIGNS = {"composer": "composer.Trainer"}  # others may have a module of that name


def dormant(t: Training) -> Iterator[Finding]:
    """Where it is imported, by a script that uses it."""
    for unit in t.units:
        for node in unit.nodes:
            for name in sorted(set(_imported(node)) & KNOWN.keys()):
                if any(used.startswith(_SIGNS.get(name, f"{name}.")) for used in t.names):
                    reason = KNOWN[name] + (_instead_of_boost(t) if name == "colossalai" else "")
                    yield Finding("dormant", unit.module.shown, t.line(node), f"{reason}.")


def _instead_of_boost(t: Training) -> str:
    """The lines of PyTorch that do what `booster.boost` did, by the names that the script has for both."""
    for call, unit, target in t.methods("boost"):
        if "booster" not in t.kinds.of(target) or not call.args:
            continue
        model = ast.unparse(call.args[0])
        optimizer = ast.unparse(call.args[1]) if len(call.args) > 1 else "optimizer"
        return (
            f"; in the place of line {t.line(call)} of {unit.module.shown} (boost) shard each layer, then the whole, "
            f"before {optimizer} is made: `for layer in {model}.model.layers: fully_shard(layer)` (or by what its "
            f"layers are called) and `fully_shard({model})`, from torch.distributed.fsdp; "
            f"`booster.backward(loss, {optimizer})` is `loss.backward()`"
        )
    return ""


def _imported(node: ast.AST) -> list[str]:
    """The packages that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    return [(node.module or "").split(".")[0]] if isinstance(node, ast.ImportFrom) and not node.level else []
