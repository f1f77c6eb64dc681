"""What ties a script to one machine, or trusts a file too much: paths, numbers of devices, pickles."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shoal.adopt.code import Unit, argument, constant, is_open
from shoal.adopt.finding import Finding
from shoal.adopt.training import Training

_ROOTS = (
    *("home", "Users", "root", "data", "data1", "data2", "datasets", "dataset", "mnt", "media", "scratch", "work"),
    *("nfs", "gpfs", "lustre", "raid", "workspace", "shared", "storage", "ssd", "nvme", "fsx", "efs", "content", "vol"),
    *("volumes", "checkpoints", "projects", "project", "cluster", "beegfs", "fast", "private", "kaggle"),
)
_ABSOLUTE = re.compile(rf"^(/({'|'.join(_ROOTS)})(/[\w.\-/ {{}}*]*)?|[A-Za-z]:[\\/][\w.\\/ \-]+)$")
_UNPICKLES = re.compile(r"((c?pickle|cPickle|_pickle|dill|cloudpickle|joblib)\.(load|loads)|pandas\.read_pickle)$")
_COLLECTIVE_START = "torch.distributed.init_process_group"
_CUDA = re.compile(r"cuda:(\d+)$")


def unsafe_load(t: Training) -> Iterator[Finding]:
    for call, unit in t.loads:
        given = argument(call, "weights_only")
        if _follow(t, given, unit) is False:
            yield _at(
                t, "unsafe-load", call, unit, "torch.load with weights_only=False runs whatever code is in the file."
            )
    for call, unit, full in t.calls:
        if _UNPICKLES.match(full) and not _own_copy(t, call):
            yield _at(t, "unsafe-load", call, unit, f"{full} runs whatever code is in the file.")
        elif full == "numpy.load" and constant(argument(call, "allow_pickle", 2)) is True:
            yield _at(
                t, "unsafe-load", call, unit, "numpy.load with allow_pickle=True runs whatever code is in the file."
            )


def _own_copy(t: Training, call: ast.Call) -> bool:
    """`pickle.loads(pickle.dumps(x))` copies an object."""
    return bool(call.args) and isinstance(call.args[0], ast.Call) and t.code.reads(call.args[0].func) == "dumps"


def _follow(t: Training, node: ast.AST | None, unit: Unit) -> object:
    """A constant, also through one name that is bound to it alone."""
    if isinstance(node, ast.Name) and (found := t.code.binding(node.id, unit)) and len(found[1]) == 1:
        bound = found[1][0]
        return constant(bound.value) if bound.index is None and not bound.each else None
    return constant(node)


def absolute_path(t: Training) -> Iterator[Finding]:
    for unit in t.units:
        for node in unit.nodes:
            if not (isinstance(node, ast.Constant) and isinstance(node.value, str) and _ABSOLUTE.match(node.value)):
                continue
            if not _is_text(t, node, unit):
                shown = node.value if len(node.value) < 60 else node.value[:57] + "…"
                yield _at(t, "absolute-path", node, unit, f"{shown!r} is a path of one machine.")


def _is_text(t: Training, node: ast.AST, unit: Unit) -> bool:
    """Whether it is no path to be opened: a docstring, help, part of a message, what an environment variable overrides,
    or a text that others are compared with."""
    above = t.code.parents.get(node)
    if isinstance(above, ast.Expr | ast.Compare | ast.JoinedStr | ast.FormattedValue):
        return not isinstance(above, ast.JoinedStr) or not _ABSOLUTE.match(str(constant(node)) + "x")
    if isinstance(above, ast.keyword):
        return above.arg in ("help", "description", "epilog", "usage", "metavar")
    if isinstance(above, ast.Call):
        name = t.code.called(above)
        return name in ("os.environ.get", "os.getenv", "print", "os.environ.setdefault") or t.code.reads(
            above.func
        ) in (*("startswith", "replace", "strip", "removeprefix", "info", "debug", "warning", "error", "route"),)
    return False


def fixed_world(t: Training) -> Iterator[Finding]:
    for call, unit, full in t.calls:
        if is_open(call):
            continue
        if full == _COLLECTIVE_START:
            if _follow(t, argument(call, "world_size", 3), unit) == 1:
                continue  # a group of one
            for name, position in (("world_size", 3), ("rank", 4)):
                given = _follow(t, argument(call, name, position), unit)
                if (
                    isinstance(given, int)
                    and not isinstance(given, bool)
                    and given >= (2 if name == "world_size" else 0)
                ):
                    yield _at(
                        t, "fixed-world", call, unit, f"{name} of the process group is {given}, whatever is started."
                    )
                    break
        elif full.endswith(("multiprocessing.spawn", "multiprocessing.spawn.spawn")):
            given = _follow(t, argument(call, "nprocs", 2), unit)
            if isinstance(given, int) and given > 1:
                yield _at(t, "fixed-world", call, unit, f"it starts {given} processes, whatever the machine has.")
        elif full.endswith(".DistributedSampler"):
            for name, position in (("num_replicas", 1), ("rank", 2)):
                given = _follow(t, argument(call, name, position), unit)
                if isinstance(given, int) and not isinstance(given, bool):
                    yield _at(t, "fixed-world", call, unit, f"{name} of the sampler is {given}, whatever is started.")
                    break
        elif full == "torch.cuda.set_device":
            given = _index(_follow(t, argument(call, "device", 0), unit))
            if given is not None and (given > 0 or t.spreads):
                yield _at(t, "fixed-world", call, unit, f"every process takes GPU {given}.")
        elif full.endswith(("DataParallel", "DistributedDataParallel")):
            given = argument(call, "device_ids", 1)
            if isinstance(given, ast.List) and given.elts and all(isinstance(e, ast.Constant) for e in given.elts):
                yield _at(
                    t, "fixed-world", call, unit, f"device_ids is {ast.unparse(given)}, whatever the machine has."
                )
        elif full.endswith("init_device_mesh"):
            shape = argument(call, "mesh_shape", 1)
            sizes = [_follow(t, e, unit) for e in shape.elts] if isinstance(shape, ast.Tuple) else [None]
            if all(isinstance(size, int) and size > 0 for size in sizes) and sizes != [1]:
                said = f"the mesh has the shape {tuple(sizes)}, whatever is started."
                yield _at(t, "fixed-world", call, unit, said)
        elif isinstance(call.func, ast.Attribute) and call.func.attr == "cuda" and not full.startswith("torch.cuda"):
            given = _index(_follow(t, argument(call, "device", 0), unit))
            if given is not None and (given > 0 or t.spreads):
                yield _at(t, "fixed-world", call, unit, f"every process takes GPU {given}.")
    yield from _device_names(t)
    yield from _environment(t)


def _index(value: object) -> int | None:
    if isinstance(value, str) and (found := _CUDA.match(value)):
        return int(found[1])
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _device_names(t: Training) -> Iterator[Finding]:
    """`cuda:0` of one process is the first GPU that it sees, and harmless; of several it is the same for all."""
    for unit in t.units:
        for node in unit.nodes:
            if not (
                isinstance(node, ast.Constant) and isinstance(node.value, str) and (said := _CUDA.match(node.value))
            ):
                continue
            if any(isinstance(one, ast.Compare | ast.JoinedStr) for one in t.code.around(node)):
                continue
            asked = any(isinstance(one, ast.IfExp) for one in t.code.around(node)) or bool(t.guards.around(node))
            above = t.code.parents.get(node)
            if isinstance(above, ast.Call) and t.code.called(above) == "torch.cuda.set_device":
                continue  # told already
            if int(said[1]) > 0 or t.spreads or not asked:
                if t.spreads and t.guards.around(node) and int(said[1]) == 0:
                    continue  # perhaps the branch of a single process
                yield _at(t, "fixed-world", node, unit, f"{node.value!r} names one GPU, whatever the process is given.")
        for call in unit.calls:
            if t.code.called(call) == "torch.device" and constant(argument(call, "type", 0)) == "cuda":
                given = _follow(t, argument(call, "index", 1), unit)
                if isinstance(given, int) and (given > 0 or t.spreads):
                    yield _at(t, "fixed-world", call, unit, f"every process takes GPU {given}.")


def _environment(t: Training) -> Iterator[Finding]:
    for unit in t.units:
        for node in unit.nodes:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
                target, value = node.targets[0], node.value
                key = constant(target.slice)
                fixed = isinstance(value, ast.Constant) or _is_text_of_number(t, value)
                if t.code.dotted(target.value, unit) != "os.environ" or not fixed or t.guards.around(node):
                    continue
                if key in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES"):
                    yield _at(t, "fixed-world", node, unit, f"it sets {key} itself, over what it was started with.")


def _is_text_of_number(t: Training, value: ast.AST) -> bool:
    """`str(4)`."""
    if not (isinstance(value, ast.Call) and t.code.reads(value.func) == "str"):
        return False
    return all(isinstance(a, ast.Constant) for a in value.args)


def _at(t: Training, rule: str, node: ast.AST, unit: Unit, reason: str) -> Finding:
    return Finding(rule, unit.module.shown, t.line(node), reason)
