"""What makes a GPU wait: values that are read on every step, loaders without workers, float32 where bf16 would do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from shoal.adopt.code import Loop, Unit, argument, constant, is_open
from shoal.adopt.finding import Finding
from shoal.adopt.rules.ranks import reads
from shoal.adopt.training import Training

_LOWER = re.compile(
    r"autocast|bf16|bfloat16|fp16|float16|\bamp\b|half$|mixed_?precision|matmul_precision|allow_tf32|fp8|use_amp|^amp$"
)
_READS_FILES = re.compile(
    r"(open|PIL\.Image\.open|Image\.open|cv2\.imread|numpy\.load|torch\.load|torchaudio\.load|soundfile\.read"
    r"|imageio\.\w*imread|torchvision\.io\.\w+|h5py\.File|librosa\.load|decord\.\w+|rasterio\.open|nibabel\.load)$"
)
_SHOWS = ("info", "set_description", "set_postfix", "set_postfix_str", "write", "debug")
_DECODES = re.compile(r"transform|augment|tokeniz|decode|process")
_READ = ("item", "tolist", "numpy")


def host_sync(t: Training) -> Iterator[Finding]:
    if not t.cuda:
        return
    losses = {t.code.reads(b.loss) for b in t.backwards} - {""}
    found: dict[str, Finding] = {}  # one a file: the first line, and the others
    for loop in t.step_loops:
        for node, unit in _each_step(t, loop):
            if not (isinstance(node, ast.Call) and (what := _waits(t, node, unit, losses))):
                continue
            file, line = unit.module.shown, t.line(node)
            first = found.setdefault(
                file, Finding("host-sync", file, line, f"{what} on every step makes the host wait for the GPU.")
            )
            if line != first.line and line not in first.also:
                found[file] = replace(first, also=(*first.also, line))
    yield from found.values()


def _each_step(t: Training, loop: Loop) -> Iterator[tuple[ast.AST, Unit]]:
    """What runs in every turn of the loop, also in functions that it calls."""
    with_step = {g.test for step in t.steps for g in t.guards.around(step.call)}  # what runs with a step runs on each
    wanted: list[tuple[ast.AST, ast.AST]] = [(node, loop) for node in t.graph.below(loop)]
    seen = set[Unit]()
    while wanted:
        node, until = wanted.pop(0)
        unit = t.code.unit_of.get(node)
        if unit is None:
            continue
        if not isinstance(node, ast.Call):
            continue
        inner = t.code.loops(node)
        if any(one not in t.all_loops and not _micro(t, one) for one in _within(inner, until)):
            continue  # a loop of its own, of an evaluation or the like
        if any(t.guards.interval(g, unit) for g in t.guards.around(node, until=until) if g.test not in with_step):
            continue
        yield node, unit
        for callee in t.graph.callees.get(node, ()):
            if callee not in seen and callee.name not in ("forward", "__init__"):
                seen.add(callee)
                wanted += [(one, callee.node) for one in callee.nodes]


def _within(loops: list[Loop], end: ast.AST) -> list[Loop]:
    """Those before it."""
    return loops[: next((i for i, loop in enumerate(loops) if loop is end), len(loops))]


def _micro(t: Training, loop: ast.AST) -> bool:
    """A loop over micro-batches: it has a backward in it."""
    return any(loop in t.code.loops(b.call) for b in t.backwards)


def _waits(t: Training, call: ast.Call, unit: Unit, losses: set[str]) -> str | None:
    full = t.code.called(call)
    if isinstance(call.func, ast.Attribute) and not call.args:
        on = call.func.value
        if call.func.attr in _READ and not _of_numpy(t, on, unit):
            return f"{_short(on)}.{call.func.attr}()"
        if call.func.attr == "cpu" and not call.keywords and "model" not in t.kinds.of(on):
            return None if _read_later(t, call) else f"{_short(on)}.cpu()"
    if full == "torch.cuda.synchronize":
        return "torch.cuda.synchronize()"
    if full == "float" and call.args and t.code.reads(_bare(call.args[0])) in losses:
        return f"float({_short(call.args[0])})"
    if full == "print" or t.code.reads(call.func) in _SHOWS:
        given = [*call.args, *(k.value for k in call.keywords)]
        shown = [n for a in given for n in _printed(a) if t.code.reads(_bare(n)) in losses]
        if shown:
            return f"printing {_short(shown[0])}"
    return None


def _bare(node: ast.AST) -> ast.AST:
    """Without `.detach()` and the like."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("detach", "mean"):
        node = node.func.value
    return node


def _printed(node: ast.AST) -> list[ast.AST]:
    """Names that are printed as they are."""
    if isinstance(node, ast.JoinedStr):
        return [v.value for v in node.values if isinstance(v, ast.FormattedValue)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return list(node.right.elts) if isinstance(node.right, ast.Tuple) else [node.right]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return list(node.args)
    return [node]


def _read_later(t: Training, call: ast.Call) -> bool:
    """`x.cpu().numpy()`: told once, of its outermost call."""
    above = t.code.parents.get(call)
    return isinstance(above, ast.Attribute) and above.attr in _READ


def _of_numpy(t: Training, node: ast.AST, unit: Unit) -> bool:
    if any(
        t.code.dotted(n, unit).startswith(("numpy.", "random.")) for n in ast.walk(node) if isinstance(n, ast.Attribute)
    ):
        return True
    if isinstance(node, ast.Name) and (found := t.code.binding(node.id, unit)):
        return any(
            t.code.dotted(n, found[0]).startswith("numpy.")
            for b in found[1]
            for n in ast.walk(b.value)
            if isinstance(n, ast.Attribute)
        )
    return False


def _short(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 40 else text[:37] + "…"


def loader_workers(t: Training) -> Iterator[Finding]:
    if not t.cuda:
        return
    for call, unit in t.made("loader"):
        if is_open(call) or (
            argument(call, "num_workers", 5) not in (None,) and constant(argument(call, "num_workers", 5)) != 0
        ):
            continue
        data = argument(call, "dataset", 0)
        if data is None or not _is_read_from_disk(t, data):
            continue
        loops = [loop for loop in t.step_loops if isinstance(loop, ast.For) and reads(t, loop, call)]
        if loops:
            yield Finding(
                "loader-workers",
                unit.module.shown,
                t.line(call),
                "the loader reads and decodes files in the training process itself, while the GPU waits.",
            )


def _is_read_from_disk(t: Training, data: ast.expr) -> bool:
    kinds = t.kinds.of(data)
    if "pictures" in kinds:
        return True
    for name in (kind.removeprefix("class ") for kind in kinds if kind.startswith("class ")):
        for one in t.code.classes.get(name, ()):
            reads = [t.graph.method(one, "__getitem__"), t.graph.method(one, "__iter__")]
            for method in (m for m in reads if m is not None):
                for node in t.graph.inside(method.nodes):
                    if not isinstance(node, ast.Call):
                        continue
                    if _READS_FILES.match(t.code.called(node)) or _DECODES.search(t.code.reads(node.func)):
                        return True
    return False


def no_autocast(t: Training) -> Iterator[Finding]:
    if not t.cuda or t.helpers or not t.steps:
        return
    for unit in t.units:
        for node in unit.nodes:
            said = t.code.reads(node) or (
                node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            )
            said = said or (node.arg or "" if isinstance(node, ast.keyword | ast.arg) else "")
            if isinstance(said, str) and len(said) < 80 and _LOWER.search(said.lower()):
                return
    if any(_LOWER.search(name.lower()) for name in t.names):
        return
    unit, line = t.first_line()
    yield Finding("no-autocast", unit.module.shown, line, "it trains on CUDA in float32 throughout.")
