"""What a value is for a training: an optimizer, a schedule, a model, a loader. It is followed through assignments,
parameters, attributes and what functions of the project return; where that says nothing there is no answer."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from shoal.adopt.code import Bound, Code, Unit
from shoal.adopt.graph import Graph

_DEEP = 8
_MOST_CALLERS = 12
_MOST_ASKED, _MOST_EVER = 500, 500_000  # expressions, for one answer and for all: hostile code leads to many
# By the full name of what makes it; the first that fits counts.
_MADE_BY = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("schedule", r"torch\.optim\.(lr_scheduler\.\w+|swa_utils\.SWALR)$"),
        ("schedule", r"(transformers|diffusers)(\.\w+)*\.get_\w*(schedule|scheduler)\w*$"),
        ("schedule", r"timm\.scheduler(\.\w+)*\.(create_scheduler\w*|\w+Scheduler)$"),
        ("optimizer", r"torch\.optim(\.\w+)*\.[A-Z]\w+$"),
        ("optimizer", r"torch\.distributed\.optim\.\w+$"),
        ("optimizer", r"horovod\.torch\.DistributedOptimizer$"),
        ("optimizer", r"timm\.optim(\.\w+)*\.(create_optimizer\w*|[A-Z]\w+)$"),
        ("optimizer", r"(?!\.)([\w.]+\.)?(Paged|Fused)?(AdamW?(8bit|4bit)?|SGD|Adafactor|RMSprop)$"),
        ("optimizer", r"(lion_pytorch|muon|bitsandbytes|apex|heavyball|schedulefree|torchao)(\.\w+)*\.[A-Z]\w+$"),
        ("optimizer", r"deepspeed\.ops(\.\w+)*\.[A-Z]\w+$"),
        ("scaler", r"torch(\.cuda)?\.amp(\.\w+)*\.(GradScaler|ShardedGradScaler)$"),
        ("scaler", r"torch\.distributed\.fsdp\.sharded_grad_scaler\.ShardedGradScaler$"),
        ("shares", r"torch\.utils\.data(\.distributed)?\.DistributedSampler$"),
        ("random", r"torch\.utils\.data(\.\w+)*\.RandomSampler$"),
        ("loader stateful", r"torchdata(\.\w+)*\.StatefulDataLoader$"),
        ("loader", r"torch\.utils\.data(\.\w+)*\.DataLoader$"),
        ("ddp", r"torch\.nn\.parallel(\.\w+)*\.DistributedDataParallel$"),
        ("fsdp", r"torch\.distributed\.fsdp(\.\w+)*\.FullyShardedDataParallel$"),
        ("accelerator", r"accelerate(\.\w+)*\.Accelerator$"),
        ("fabric", r"(lightning|lightning_fabric)(\.\w+)*\.Fabric$"),
        ("engine", r"deepspeed\.initialize$"),
        ("booster", r"colossalai\.booster\.Booster$"),
        ("memory", r"torch\.utils\.data(\.\w+)*\.TensorDataset$"),
        ("pictures", r"torchvision\.datasets\.(?!FakeData)[A-Z]\w+$"),
        ("model", r"torch\.nn\.(?!functional|utils|init|parallel|Parameter)[A-Z]\w+$"),
        ("model", r"(torchvision\.models(\.\w+)+|timm\.create_model)$"),
        ("model", r"transformers\.\w+\.(from_pretrained|from_config)$"),
        ("buffer", r"io\.BytesIO$"),
        ("file", r"(open|gzip\.open|fsspec\.open)$"),
    )
)  # fmt: skip
_BASES = {
    "torch.optim.Optimizer": "optimizer",
    "torch.optim.optimizer.Optimizer": "optimizer",
    "torch.optim.lr_scheduler.LRScheduler": "schedule",
    "torch.optim.lr_scheduler._LRScheduler": "schedule",
    "torch.nn.Module": "model",
    "torch.utils.data.IterableDataset": "stream",
    "torch.utils.data.Dataset": "dataset",
}
_SAME = ("to", "cuda", "cpu", "half", "bfloat16", "float", "train", "eval", "requires_grad_", "double", "compile")
_HANDS_ON = re.compile(
    r"(torch\.compile|torch\.jit\.script|copy\.deepcopy|iter|enumerate|tqdm(\.\w+)*|zip|cycle|itertools\.\w+)$"
)
WRAPPED = re.compile(r"torch\.distributed(\.\w+)*\.fully_shard$")


class Kinds:
    def __init__(self, code: Code, graph: Graph) -> None:
        self._code, self._graph = code, graph
        self._known: dict[ast.AST, frozenset[str]] = {}
        self._left, self._ever = 0, _MOST_EVER
        # FSDP2 changes a module in place.
        self.sharded = {
            code.reads(call.args[0])
            for unit in code.units
            for call in unit.calls
            if call.args and WRAPPED.match(code.called(call))
        }

    def of(self, node: ast.AST, depth: int = 0) -> frozenset[str]:
        """Of an expression that stands in the code."""
        if node in self._known:
            return self._known[node]
        self._left, self._ever = self._left - 1 if depth else _MOST_ASKED, self._ever - 1
        if depth > _DEEP or self._left < 0 or self._ever < 0 or (unit := self._code.unit_of.get(node)) is None:
            return frozenset()
        self._known[node] = frozenset()  # what is asked for again meanwhile stands in a circle
        found = self._of(node, unit, depth)
        if depth:
            del self._known[node]
        else:
            self._known[node] = found
        return found

    def place(self, call: ast.Call) -> str:
        """By which an object is known: where it is made."""
        return f"made at {self._code.unit_of[call].module.shown}:{call.lineno}"

    def _of(self, node: ast.AST, unit: Unit, depth: int) -> frozenset[str]:
        more = depth + 1
        if isinstance(node, ast.Name):
            return self._name(node, unit, more)
        if isinstance(node, ast.Attribute):
            if node.attr == "module":  # what DDP wraps
                return self.of(node.value, more)
            bounds = self._code.attributes.get(node.attr, [])[:_MOST_CALLERS]
            return _all(self._bound(b, more) for b, _ in bounds)
        if isinstance(node, ast.Call):
            return self._call(node, unit, more)
        if isinstance(node, ast.IfExp):
            return self.of(node.body, more) | self.of(node.orelse, more)
        if isinstance(node, ast.BoolOp):
            return _all(self.of(v, more) for v in node.values)
        if isinstance(node, ast.Tuple | ast.List):
            return _all(self.of(v, more) for v in node.elts[:16])
        if isinstance(node, ast.Dict):
            return _all(self.of(v, more) for v in node.values[:16])
        if isinstance(node, ast.ListComp | ast.GeneratorExp):
            return self.of(node.elt, more)
        if isinstance(node, ast.Subscript | ast.Starred | ast.Await):
            return self.of(node.value, more)
        return frozenset()

    def _name(self, node: ast.Name, unit: Unit, depth: int) -> frozenset[str]:
        if (owner := self._code.owner_of(node.id, unit)) is not None:
            given = [self.of(value, depth) for value in self.given(owner, node.id)]
            local = [self._bound(b, depth) for b in owner.bound.get(node.id, ()) if not _names(b.value, node.id)]
            return _all([*given, *local])
        if (found := self._code.binding(node.id, unit)) is not None:
            return _all(self._bound(b, depth) for b in self._code.reaching(node, found[1])[:_MOST_CALLERS])
        module, _, last = self._code.dotted(node, unit).rpartition(".")
        if (there := self._code.of_module.get(module)) is not None and last in there.bound:
            return _all(self._bound(b, depth) for b in there.bound[last][:_MOST_CALLERS])
        return frozenset()

    def given(self, unit: Unit, name: str) -> list[ast.expr]:
        """What the callers of a function give for a parameter, and what it has by itself."""
        found = list[ast.expr]()
        at = unit.params.index(name) - (1 if unit.owner is not None else 0)
        for _, call in self._graph.callers.get(unit, ())[:_MOST_CALLERS]:
            if isinstance(call, ast.Call):
                by_name = [k.value for k in call.keywords if k.arg == name]
                plain = [] if any(isinstance(a, ast.Starred) for a in call.args) else call.args
                found += by_name or ([plain[at]] if 0 <= at < len(plain) else [])
        spec = getattr(unit.node, "args", None)
        if isinstance(spec, ast.arguments):
            positional = [a.arg for a in (*spec.posonlyargs, *spec.args)]
            defaults = dict(zip(reversed(positional), reversed(spec.defaults), strict=False))
            defaults |= {a.arg: d for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d is not None}
            found += [defaults[name]] if name in defaults else []
        return found

    def _bound(self, bound: Bound, depth: int) -> frozenset[str]:
        value = bound.value
        if bound.index is not None:
            if isinstance(value, ast.Call):
                return self._part(value, bound.index, depth)
            if isinstance(value, ast.Tuple | ast.List) and not bound.each and bound.index < len(value.elts):
                return self.of(value.elts[bound.index], depth)
            return frozenset()
        return self.of(value, depth)

    def _part(self, call: ast.Call, index: int, depth: int) -> frozenset[str]:
        """Of what a call returns as a tuple."""
        name = self._code.called(call)
        if name.endswith("deepspeed.initialize"):
            return frozenset([("engine", "optimizer", "loader", "schedule")[index]] if index < 4 else [])
        last = self._code.reads(call.func)
        if last in ("prepare", "setup", "setup_dataloaders", "boost") and index < len(call.args):
            handed = frozenset(["prepared"]) if last in ("prepare", "setup_dataloaders") else frozenset()
            return self.of(call.args[index], depth) | handed
        if _HANDS_ON.match(name) and call.args:
            return self.of(call.args[0], depth) if index == (1 if name == "enumerate" else 0) else frozenset()
        found = list[frozenset[str]]()
        for unit in self._graph.callees.get(call, ()):
            for value in unit.returned:
                if isinstance(value, ast.Tuple) and index < len(value.elts):
                    found.append(self.of(value.elts[index], depth))
        return _all(found)

    def _call(self, call: ast.Call, unit: Unit, depth: int) -> frozenset[str]:
        name = self._code.called(call)
        if name and not name.startswith("."):
            for kind, pattern in _MADE_BY:
                if pattern.match(name):
                    which = [self.place(call)] if kind == "loader" else []
                    return frozenset(["model", kind] if kind in ("ddp", "fsdp") else [*kind.split(), *which])
        if (made := self._graph.class_named(name)) is not None:
            bases = [_BASES[base] for base in self._graph.bases(made) if base in _BASES]
            return frozenset([*bases[:1], f"class {made.name}"])
        if _HANDS_ON.match(name.lstrip(".")) and call.args:
            return self.of(call.args[0], depth)
        last = self._code.reads(call.func)
        if last in ("prepare", "setup", "setup_dataloaders") and len(call.args) == 1:
            return self.of(call.args[0], depth) | ({"prepared"} if last != "setup" else set())
        if isinstance(call.func, ast.Attribute) and last in _SAME:
            return self.of(call.func.value, depth)
        found = [self.of(value, depth) for f in self._graph.callees.get(call, ()) for value in f.returned]
        if not found and WRAPPED.match(name) and call.args:
            return self.of(call.args[0], depth)
        return _all(found)


def _all(found: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset(kind for one in found for kind in one)


def _names(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
