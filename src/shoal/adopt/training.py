"""The training in a project: where its steps, losses, loops and saves are, and what a framework does in its place."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from shoal.adopt.code import Code, Loop, Unit, argument
from shoal.adopt.graph import Graph
from shoal.adopt.guards import Guards
from shoal.adopt.kinds import WRAPPED, Kinds
from shoal.adopt.project import Project

# Who has the loop, by the class that is used; what it does by itself is none of the script's.
OWNERS = {
    "Trainer of transformers": re.compile(r"transformers(\.\w+)*\.\w*Trainer$"),
    "a trainer of TRL": re.compile(r"trl(\.\w+)*\.\w+Trainer$"),
    "a trainer of sentence-transformers": re.compile(r"sentence_transformers(\.\w+)*\.\w*Trainer$"),
    "Lightning": re.compile(r"(lightning|pytorch_lightning)(\.\w+)*\.(Trainer|LightningModule|LightningCLI)$"),
    "Composer": re.compile(r"composer(\.\w+)*\.Trainer$"),
    "fastai": re.compile(r"fastai\."),
    "Ignite": re.compile(r"ignite\.engine\."),
    "Keras": re.compile(r"(keras|tensorflow\.keras)\."),
}
HELPERS = {"accelerator": "Accelerate", "fabric": "Lightning Fabric", "engine": "DeepSpeed", "booster": "Colossal-AI"}
_OPTIMIZER = re.compile(r"^(opt|optim|optimizer|optimiser)s?(_?[a-zA-Z0-9]+)?$|_(opt|optim|optimizer|optimiser)s?$")
_SAVES = re.compile(r"(torch\.save|torch\.serialization\.save)$")
_LOADS = re.compile(r"(torch\.load|torch\.serialization\.load)$")
_DCP = re.compile(r"torch\.distributed\.checkpoint(\.\w+)*\.(save|async_save|save_state_dict)$")


@dataclass(frozen=True, eq=False)
class Step:
    call: ast.Call
    unit: Unit
    optimizer: str  # the last name of its expression
    managed: bool  # by DeepSpeed's engine


@dataclass(frozen=True, eq=False)
class Backward:
    call: ast.Call
    unit: Unit
    loss: ast.expr
    managed: bool  # given to a helper, which divides it


class Training:
    def __init__(self, project: Project) -> None:
        self.project = project
        self.code = Code(project)
        self.graph = Graph(self.code)
        self.kinds = Kinds(self.code, self.graph)
        self.guards = Guards(self.code, self.graph)
        self._made: dict[str, list[tuple[ast.Call, Unit]]] = {}

    @cached_property
    def units(self) -> list[Unit]:
        return [unit for unit in self.code.units if unit in self.graph.reached]

    @cached_property
    def calls(self) -> list[tuple[ast.Call, Unit, str]]:
        """All that are reached, with the full name of what is called."""
        return [(call, unit, self.code.called(call)) for unit in self.units for call in unit.calls]

    def methods(self, *names: str) -> Iterator[tuple[ast.Call, Unit, ast.expr]]:
        """Calls of methods by their names: the call, its unit, the object."""
        for call, unit, _ in self.calls:
            if isinstance(call.func, ast.Attribute) and call.func.attr in names:
                yield call, unit, call.func.value

    @cached_property
    def names(self) -> set[str]:
        """All that is meant anywhere, in full."""
        found = {full for _, _, full in self.calls}
        for unit in self.units:
            found |= set(unit.imports.values())
            found |= {self.code.dotted(n, unit) for n in unit.nodes if isinstance(n, ast.Attribute | ast.Name)}
        for classes in self.code.classes.values():
            found |= {base for one in classes for base in self.graph.bases(one)}
        return found - {""}

    @cached_property
    def used(self) -> set[str]:
        """As `names`, without what is only imported."""
        found = {full for _, _, full in self.calls}
        for classes in self.code.classes.values():
            found |= {base for one in classes for base in self.graph.bases(one)}
        return found

    @cached_property
    def owner(self) -> str | None:
        """The framework that has the loop, if the script has none of its own."""
        if self.steps:
            return None
        return next((who for who, pattern in OWNERS.items() if any(pattern.match(name) for name in self.used)), None)

    @cached_property
    def helpers(self) -> set[str]:
        """Objects of frameworks that help a loop of the script's own."""
        found = {kind for call, _, full in self.calls if full for kind in self.kinds.of(call) if kind in HELPERS}
        for unit in self.units:
            for bounds in unit.bound.values():
                found |= {k for b in bounds if isinstance(b.value, ast.Call) for k in self.kinds.of(b.value)} & set(
                    HELPERS
                )
        return found

    @cached_property
    def has_torch(self) -> bool:
        return any(name.split(".")[0] in ("torch", "lightning", "accelerate", "transformers") for name in self.names)

    @cached_property
    def steps(self) -> list[Step]:
        found = []
        for call, unit, target in self.methods("step"):
            kinds = self.kinds.of(target)
            if "scaler" in kinds and call.args:
                found.append(Step(call, unit, self.code.reads(call.args[0]), False))
            elif "engine" in kinds:
                found.append(Step(call, unit, self.code.reads(target), True))
            elif "schedule" in kinds and "optimizer" not in kinds:
                continue
            elif "optimizer" in kinds or (not kinds and _OPTIMIZER.search(self.code.reads(target))):
                found.append(Step(call, unit, self.code.reads(target), False))
        return [step for step in found if not self._of_framework(step.unit)]

    def _of_framework(self, unit: Unit) -> bool:
        """A method of a module of Lightning (or the like) is called by its trainer."""
        at: Unit | None = unit
        while at is not None:
            for one in self.code.classes.get(at.owner or "", ()):
                if any(pattern.match(base) for base in self.graph.bases(one) for pattern in OWNERS.values()):
                    return True
            at = at.above
        return False

    @cached_property
    def backwards(self) -> list[Backward]:
        found = []
        for call, unit, target in self.methods("backward"):
            kinds = self.kinds.of(target)
            if kinds & HELPERS.keys():
                if call.args:
                    found.append(Backward(call, unit, call.args[0], True))
                continue
            loss = target
            if isinstance(target, ast.Call) and isinstance(target.func, ast.Attribute) and target.func.attr == "scale":
                loss = target.args[0] if target.args else target
            found.append(Backward(call, unit, loss, False))
        return found

    @cached_property
    def step_loops(self) -> list[Loop]:
        """The innermost loop around each step of an optimizer."""
        found = list[Loop]()
        for step in self.steps:
            around = self.graph.loops(step.call)
            if around and around[0] not in found:
                found.append(around[0])
        return found

    @cached_property
    def all_loops(self) -> list[Loop]:
        """All loops around steps."""
        found = list[Loop]()
        for step in self.steps:
            found += [loop for loop in self.graph.loops(step.call) if loop not in found]
        return found

    @cached_property
    def optimizers(self) -> list[tuple[ast.Call, Unit, str]]:
        """Where they are made, and the name that each gets there."""
        found = []
        for call, unit, _ in self.calls:
            if "optimizer" in self.kinds.of(call) and self._is_made(call, "optimizer"):
                found.append((call, unit, self.target(call)))
        return found

    def made(self, kind: str) -> list[tuple[ast.Call, Unit]]:
        """Calls that make such an object."""
        if kind not in self._made:
            found = [(c, u) for c, u, _ in self.calls if kind in self.kinds.of(c) and self._is_made(c, kind)]
            self._made[kind] = found
        return self._made[kind]

    def _is_made(self, call: ast.Call, kind: str) -> bool:
        """Here, not by a function of the project that is called, and not handed on."""
        if self.graph.callees.get(call) and self.graph.class_named(self.code.called(call)) is None:
            return False
        wrapped = any(kind in self.kinds.of(a) for a in call.args)
        if isinstance(call.func, ast.Attribute) and kind in self.kinds.of(call.func.value):
            return False
        return not (wrapped and kind != "schedule")

    def target(self, node: ast.AST) -> str:
        """The name that a value is bound to, if it is bound to one alone."""
        for one in self.code.around(node):
            if isinstance(one, ast.Assign | ast.AnnAssign | ast.AugAssign):
                target = one.targets[0] if isinstance(one, ast.Assign) else one.target
                return self.code.reads(target)
            if not isinstance(one, ast.IfExp | ast.BoolOp):
                return ""
        return ""

    @cached_property
    def saves(self) -> list[tuple[ast.Call, Unit]]:
        return [(call, unit) for call, unit, full in self.calls if _SAVES.match(full) and argument(call, "obj", 0)]

    @cached_property
    def shared_saves(self) -> list[tuple[ast.Call, Unit]]:
        return [(call, unit) for call, unit, full in self.calls if _DCP.match(full)]

    @cached_property
    def loads(self) -> list[tuple[ast.Call, Unit]]:
        return [(call, unit) for call, unit, full in self.calls if _LOADS.match(full)]

    @cached_property
    def cuda(self) -> bool:
        """Whether it goes to a GPU where there is one."""
        for unit in self.units:
            for node in unit.nodes:
                if (
                    isinstance(node, ast.Constant)
                    and isinstance(node.value, str)
                    and re.match(r"cuda(:\d+)?$", node.value)
                ):
                    return True
                if isinstance(node, ast.Attribute) and node.attr == "cuda" and self._called(node):
                    return True
        return bool(self.helpers)

    def _called(self, node: ast.AST) -> bool:
        above = self.code.parents.get(node)
        return isinstance(above, ast.Call) and above.func is node

    @cached_property
    def spreads(self) -> bool:
        """Whether it trains on several processes by torch's own means."""
        return any(
            re.match(r"torch\.distributed\.init_process_group$", name) or WRAPPED.match(name) for name in self.used
        ) or bool(self.made("ddp") or self.made("fsdp"))

    def line(self, node: ast.AST) -> int:
        return int(getattr(node, "lineno", 1))

    def first_line(self) -> tuple[Unit, int]:
        """Where the training begins: of what is missing as a whole."""
        if self.optimizers:
            call, unit, _ = self.optimizers[0]
            return unit, self.line(call)
        step = self.steps[0]
        return step.unit, self.line(step.call)
