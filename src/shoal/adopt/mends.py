"""How a finding is mended where that follows from the code alone. What is not plain is left to a person."""

from __future__ import annotations

import ast
from collections.abc import Callable

from shoal.adopt.code import LOOPS, Unit, argument, constant
from shoal.adopt.edits import Edit, Text
from shoal.adopt.finding import Finding
from shoal.adopt.training import Training

Edits = list[Edit] | None
SEED = 0


def edits_for(t: Training, finding: Finding) -> Edits:
    make = MENDS.get(finding.rule)
    return None if make is None else make(t, finding)


def _seed(t: Training, finding: Finding) -> Edits:
    """Behind the imports of the script: all that is random comes later."""
    script = t.code.of_module["__main__"]
    torch = next((here for here, full in script.imports.items() if full == "torch" and _is_top(script, here)), None)
    statements = t.project.script.tree.body
    imports = [i for i, s in enumerate(statements) if isinstance(s, ast.Import | ast.ImportFrom)]
    if not imports:
        return None
    at = imports[0]
    while at + 1 < len(statements) and isinstance(statements[at + 1], ast.Import | ast.ImportFrom):
        at += 1
    lines = ["", *([] if torch else ["import torch", ""]), f"{torch or 'torch'}.manual_seed({SEED})"]
    lines += [f"random.seed({SEED})"] * (script.imports.get("random") == "random" and _is_top(script, "random"))
    edit = Text(t.project.script).behind(statements[at], lines)
    return None if edit is None else [edit]


def _is_top(unit: Unit, name: str) -> bool:
    """Whether a module imports it at its top, and not in a branch further down."""
    return any(
        isinstance(s, ast.Import) and any((a.asname or a.name.split(".")[0]) == name for a in s.names)
        for s in getattr(unit.node, "body", [])
    )


def _set_epoch(t: Training, finding: Finding) -> Edits:
    """Before the loop that reads the batches, with the number of the epoch that is known there."""
    for loop in t.step_loops:
        if not isinstance(loop, ast.For):
            continue
        unit, loader = t.code.unit_of[loop], _read_by(t, loop)
        numbers = [o.target.id for o in t.code.loops(loop) if isinstance(o, ast.For) and isinstance(o.target, ast.Name)]
        numbers += [name for name in unit.params if name in ("epoch", "epoch_num", "ep")]
        if loader is None or not numbers or "loader" not in t.kinds.of(loader):
            continue
        edit = Text(unit.module).before(loop, [f"{ast.unparse(loader)}.sampler.set_epoch({numbers[0]})"])
        return None if edit is None else [edit]
    return None


def _read_by(t: Training, loop: ast.For) -> ast.expr | None:
    node: ast.expr = loop.iter
    while isinstance(node, ast.Call) and node.args:
        node = node.args[0]
    return node if isinstance(node, ast.Name | ast.Attribute) else None


def _atomic(t: Training, finding: Finding) -> Edits:
    edits = list[Edit]()
    for call, unit in t.saves:
        if unit.module.shown != finding.file or t.line(call) not in (finding.line, *finding.also):
            continue
        path, statement, text = argument(call, "f", 1), t.code.parents.get(call), Text(unit.module)
        if path is None or not isinstance(statement, ast.Expr) or "file" in t.kinds.of(path):
            return None
        lines, name = list[str](), text.of(path)
        if not isinstance(path, ast.Name | ast.Constant):
            lines.append(f"save_path = {name}")
            name = "save_path"
        source, start = text.of(call), text.start(call)
        begin, end = text.start(path) - start, text.end(path) - start
        aside = f'f"{{{name}}}.tmp"' if isinstance(path, ast.Name) or lines else repr(f"{constant(path)}.tmp")
        lines += [source[:begin] + aside + source[end:], f"os.replace({aside}, {name})"]
        edit = text.instead(statement, lines)
        if edit is None:
            return None
        edits.append(edit)
    return _with_os(t, finding, edits)


def _with_os(t: Training, finding: Finding, edits: list[Edit]) -> Edits:
    """`import os`, where the module has none."""
    module = next(m for m in t.project.modules.values() if m.shown == finding.file)
    unit = t.code.of_module[module.name]
    if unit.imports.get("os") == "os" and _is_top(unit, "os"):
        return edits
    if "os" in unit.bound or any("os" in u.bound or "os" in u.params for u in t.code.units if u.module is module):
        return None  # somebody else's name
    first = next((s for s in module.tree.body if isinstance(s, ast.Import | ast.ImportFrom)), None)
    future = isinstance(first, ast.ImportFrom) and first.module == "__future__"
    if first is None:
        return None
    edit = Text(module).behind(first, ["import os"]) if future else Text(module).before(first, ["import os"])
    return None if edit is None else [*edits, edit]


def _safe_load(t: Training, finding: Finding) -> Edits:
    """Where nothing is in the file that a safe load refuses, as far as the script has written it."""
    if any(full.endswith("random.get_state") for _, _, full in t.calls):
        return None
    if any(t.kinds.of(value) & {"model", "optimizer"} for call, _ in t.saves if (value := argument(call, "obj", 0))):
        return None
    edits = list[Edit]()
    for call, unit in t.loads:
        given = argument(call, "weights_only")
        if unit.module.shown == finding.file and t.line(call) in (finding.line, *finding.also) and given is not None:
            if constant(given) is not False:
                return None
            text = Text(unit.module)
            edits.append(Edit(unit.module.name, text.start(given), text.end(given), "True"))
    return edits or None


def _zero(t: Training, finding: Finding) -> Edits:
    for step in t.steps:
        if step.unit.module.shown == finding.file and t.line(step.call) == finding.line:
            statement = t.code.parents.get(step.call)
            target = step.call.func.value if isinstance(step.call.func, ast.Attribute) else None
            if not isinstance(statement, ast.Expr) or target is None:
                return None
            optimizer = step.call.args[0] if "scaler" in t.kinds.of(target) else target
            edit = Text(step.unit.module).behind(statement, [f"{ast.unparse(optimizer)}.zero_grad()"])
            return None if edit is None else [edit]
    return None


def _in_checkpoint(t: Training, finding: Finding) -> Edits:
    """One more entry of a plain dict that is saved, and its way back where the script loads one."""
    part = finding.rule.removeprefix("checkpoint-")
    call, unit = next(
        (c, u) for c, u in t.saves if u.module.shown == finding.file and t.line(c) == finding.line
    )  # fmt: skip
    value = argument(call, "obj", 0)
    if isinstance(value, ast.Name) and (found := t.code.binding(value.id, unit)) and found[0] is unit:
        bounds = t.code.reaching(value, found[1])
        value = bounds[0].value if len(bounds) == 1 else None
    if not isinstance(value, ast.Dict) or not value.keys or any(key is None for key in value.keys):
        return None
    torch = next((here for here, full in t.code.of_module[unit.module.name].imports.items() if full == "torch"), None)
    if part == "rng":
        if torch is None:
            return None
        key, now = "rng", f"{torch}.get_rng_state()"
    else:
        name = _object(t, part, unit, call)
        if name is None:
            return None
        key, now = part, f"{name}.state_dict()"
    if any(constant(k) == key for k in value.keys):
        return None
    text, first = Text(unit.module), value.keys[0]
    assert first is not None
    gap = text.source[text.start(value) + 1 : text.start(first)]
    between = gap if "\n" in gap else " "
    edits = [Edit(unit.module.name, text.start(first), text.start(first), f'"{key}": {now},{between}')]
    if not t.loads:
        return edits
    back = _loading(t, part, key)
    return None if back is None else [*edits, back]


def _object(t: Training, part: str, unit: Unit, at: ast.AST) -> str | None:
    """How the optimizer (schedule, scaler) is called in a function: the only one that it knows."""
    made = [call for call, _ in t.made(part)]
    names = {t.target(call) for call in made}
    if len(made) != 1 or len(names) != 1 or not (name := names.pop()):
        return None
    where: Unit | None = unit
    while where is not None:
        if name in where.params or (
            name in where.bound and (where is not unit or where.bound[name][0].value.lineno < t.line(at))
        ):
            return name
        where = where.above
    if name in t.code.attributes and unit.params[:1] == ["self"]:
        return f"self.{name}"
    return None


def _loading(t: Training, part: str, key: str) -> Edit | None:
    """Behind the line that loads the model: `model.load_state_dict(saved["model"])`."""
    for call, unit, target in t.methods("load_state_dict"):
        statement, given = t.code.parents.get(call), argument(call, "state_dict", 0)
        if not isinstance(statement, ast.Expr) or not isinstance(given, ast.Subscript):
            continue
        if not isinstance(given.value, ast.Name) or "optimizer" in t.kinds.of(target):
            continue
        saved = given.value.id
        if part == "rng":
            torch = next((h for h, full in t.code.of_module[unit.module.name].imports.items() if full == "torch"), None)
            line = f'{torch}.set_rng_state({saved}["{key}"].cpu())' if torch else None
        else:
            name = _object(t, part, unit, call)
            line = f'{name}.load_state_dict({saved}["{key}"])' if name else None
        if line is None or any(isinstance(one, LOOPS) for one in t.code.around(call)):
            return None
        return Text(unit.module).behind(_last_use(t, statement, saved), [f'if "{key}" in {saved}:', f"    {line}"])
    return None


def _last_use(t: Training, statement: ast.stmt, name: str) -> ast.stmt:
    """Of what was loaded, in the same block: what is set behind it is not drawn from again by the rest."""
    block = getattr(t.code.parents[statement], "body", [])
    after = block[block.index(statement) :] if statement in block else [statement]
    uses = [s for s in after if any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(s))]
    simple = [s for s in uses if isinstance(s, ast.Expr | ast.Assign)]
    return simple[-1] if simple else statement


MENDS: dict[str, Callable[[Training, Finding], Edits]] = {
    "no-seed": _seed,
    "sampler-epoch": _set_epoch,
    "non-atomic-save": _atomic,
    "unsafe-load": _safe_load,
    "zero-grad": _zero,
    "checkpoint-optimizer": _in_checkpoint,
    "checkpoint-schedule": _in_checkpoint,
    "checkpoint-scaler": _in_checkpoint,
    "checkpoint-rng": _in_checkpoint,
}
