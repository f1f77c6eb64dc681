"""The code of a project as the rules ask for it: units (functions, and the code of a module), what is bound to a name,
what a dotted name means, and what stands around a line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from shoal.adopt.project import Module, Project, absolute

Loop = ast.For | ast.AsyncFor | ast.While
LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_MOST_DOTS = 12


@dataclass(frozen=True)
class Bound:
    """A value that a name may have: the expression, or what it gives at `index`, or each of its items."""

    value: ast.expr
    index: int | None = None
    each: bool = False


@dataclass(eq=False)
class Unit:
    """A function, or the code of a module (or class) outside of functions."""

    node: ast.AST
    module: Module
    name: str
    owner: str | None = None  # its class
    above: Unit | None = None
    nodes: list[ast.AST] = field(default_factory=list)  # of it alone, as they stand
    bound: dict[str, list[Bound]] = field(default_factory=dict)
    params: list[str] = field(default_factory=list)
    rest: str = ""  # the parameter that takes all other names
    imports: dict[str, str] = field(default_factory=dict)  # name here → in full
    children: dict[str, Unit] = field(default_factory=dict)

    @property
    def calls(self) -> Iterator[ast.Call]:
        return (node for node in self.nodes if isinstance(node, ast.Call))

    @cached_property
    def returned(self) -> list[ast.expr]:
        if isinstance(self.node, ast.Lambda):
            return [self.node.body]
        return [n.value for n in self.nodes if isinstance(n, ast.Return | ast.Yield) and n.value is not None]


@dataclass(eq=False)
class Class:
    node: ast.ClassDef
    unit: Unit  # in which it stands
    name: str
    methods: dict[str, Unit] = field(default_factory=dict)


class Code:
    def __init__(self, project: Project) -> None:
        self.project = project
        self.parents: dict[ast.AST, ast.AST] = {}
        self.units: list[Unit] = []
        self.classes: dict[str, list[Class]] = {}
        self.attributes: dict[str, list[tuple[Bound, Unit]]] = {}  # of any object, by their names
        self.of_module: dict[str, Unit] = {}
        self.unit_of: dict[ast.AST, Unit] = {}
        for module in project.modules.values():
            unit = Unit(module.tree, module, "")
            self.of_module[module.name] = unit
            self._read(unit)

    def _read(self, first: Unit) -> None:
        """Its nodes in the order of the source, without recursion: a hostile file is deep."""
        self.units.append(first)
        stack: list[tuple[ast.AST, Unit]] = [(child, first) for child in reversed(_children(first.node))]
        for child in _children(first.node):
            self.parents[child] = first.node
        while stack:
            node, unit = stack.pop()
            self.unit_of[node] = unit
            for child in _children(node):
                self.parents[child] = node
            inner = unit
            if isinstance(node, _FUNCTIONS):
                inner = self._function(node, unit)
            else:
                unit.nodes.append(node)
                self._bind(node, unit)
            if isinstance(node, ast.ClassDef):
                made = Class(node, unit, node.name)
                self.classes.setdefault(node.name, []).append(made)
            outside = _outside(node)
            stack.extend((c, unit if c in outside else inner) for c in reversed(_children(node)))

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, unit: Unit) -> Unit:
        name = "" if isinstance(node, ast.Lambda) else node.name
        around = self.parents.get(node)
        owner = around.name if isinstance(around, ast.ClassDef) else None
        made = Unit(node, unit.module, name, owner, unit)
        spec = node.args
        made.params = [a.arg for a in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]
        made.rest = spec.kwarg.arg if spec.kwarg is not None else ""
        self.units.append(made)
        if owner is not None and name:
            for found in self.classes.get(owner, ()):
                if found.node is around:
                    found.methods[name] = made
        elif name:
            unit.children[name] = made
        return made

    def _bind(self, node: ast.AST, unit: Unit) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                unit.imports[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            base = absolute(unit.module, node)
            for alias in node.names:
                unit.imports[alias.asname or alias.name] = f"{base}.{alias.name}".lstrip(".")
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._target(target, Bound(node.value), unit)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
            if isinstance(self.parents.get(node), ast.ClassDef) and isinstance(node.target, ast.Name):
                if node.value is not None:  # a field of a dataclass
                    self.attributes.setdefault(node.target.id, []).append((Bound(node.value), unit))
            elif node.value is not None:
                self._target(node.target, Bound(node.value), unit)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            self._target(node.target, Bound(node.iter, each=True), unit)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._target(node.optional_vars, Bound(node.context_expr), unit)

    def _target(self, target: ast.expr, bound: Bound, unit: Unit) -> None:
        if isinstance(target, ast.Name):
            unit.bound.setdefault(target.id, []).append(bound)
        elif isinstance(target, ast.Attribute):
            self.attributes.setdefault(target.attr, []).append((bound, unit))
        elif isinstance(target, ast.Tuple | ast.List):
            items = bound.value.elts if isinstance(bound.value, ast.Tuple | ast.List) and not bound.each else None
            for i, part in enumerate(target.elts):
                if items is not None and len(items) == len(target.elts):
                    self._target(part, Bound(items[i]), unit)
                else:
                    self._target(part, Bound(bound.value, i, bound.each), unit)

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """What it stands in, innermost first, to the end of its unit."""
        unit = self.unit_of.get(node)
        at = self.parents.get(node)
        while at is not None and not isinstance(at, _FUNCTIONS) and not (unit is not None and at is unit.node):
            yield at
            at = self.parents.get(at)

    def loops(self, node: ast.AST) -> list[Loop]:
        """Around it, innermost first; what a `for` reads stands outside of it."""
        found, before = list[Loop](), node
        for one in self.around(node):
            if isinstance(one, LOOPS) and not (isinstance(one, ast.For | ast.AsyncFor) and before is one.iter):
                found.append(one)
            before = one
        return found

    def binding(self, name: str, unit: Unit) -> tuple[Unit, list[Bound]] | None:
        """Where a name gets its values; None for what no assignment of a unit makes (imports, parameters)."""
        at: Unit | None = unit
        while at is not None:
            if name in at.params:
                return None
            if name in at.bound:
                return at, at.bound[name]
            if name in at.imports or name in at.children:
                return None
            at = at.above
        return None

    def reaching(self, node: ast.Name, bounds: list[Bound]) -> list[Bound]:
        """Those values that the name can still have where it stands: not those that a later one has replaced."""
        here, line = self.unit_of[node], node.lineno
        around = {here.node, *self.around(node)}
        if any(self.unit_of.get(b.value) is not here for b in bounds):
            return bounds
        bounds = [b for b in bounds if not b.value.lineno <= line <= (b.value.end_lineno or 0) or b.each]
        last = 0
        for bound in bounds:
            statement = self.parents.get(bound.value)
            while statement is not None and not isinstance(statement, ast.stmt):
                statement = self.parents.get(statement)
            if bound.value.lineno < line and statement is not None and self.parents.get(statement) in around:
                last = max(last, bound.value.lineno)
        loops = self.loops(node)
        later = [b for b in bounds if b.value.lineno >= last]
        return [b for b in later if b.value.lineno <= line or not last or set(loops) & set(self.loops(b.value))]

    def owner_of(self, name: str, unit: Unit) -> Unit | None:
        """The unit that has a parameter of this name, seen from here."""
        at: Unit | None = unit
        while at is not None:
            if name in at.params:
                return at
            if name in at.bound:
                return None
            at = at.above
        return None

    def dotted(self, node: ast.AST, unit: Unit, depth: int = 0) -> str:
        """In full, with imports resolved: `t.save` is `torch.save`. A name that is bound to something else is itself,
        with a `.` before it. Empty where it is no name."""
        tail = list[str]()
        while isinstance(node, ast.Attribute):
            tail.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        at: Unit | None = unit
        while at is not None:
            if node.id in at.params:
                return ".".join(["", node.id, *tail])
            if node.id in at.imports:
                return ".".join([self._public(at.imports[node.id]), *tail])
            if node.id in at.bound:
                values = at.bound[node.id]
                alias = values[0].value
                if len(values) == 1 and isinstance(alias, ast.Attribute | ast.Name) and depth < _MOST_DOTS:
                    found = self.dotted(alias, at, depth + 1)
                    if found and not found.startswith("."):
                        return ".".join([found, *tail])
                return ".".join(["", node.id, *tail])
            if node.id in at.children:
                return ".".join([at.module.name, node.id, *tail])
            at = at.above
        if node.id in self.classes:
            return ".".join([unit.module.name, node.id, *tail])
        return ".".join([node.id, *tail])  # a builtin

    def _public(self, name: str, depth: int = 0) -> str:
        """A name that a module of the project only hands on is that of where it comes from."""
        module, _, last = name.rpartition(".")
        unit = self.of_module.get(module)
        if unit is not None and last in unit.imports and last not in unit.bound and depth < _MOST_DOTS:
            return self._public(unit.imports[last], depth + 1)
        return name

    def called(self, call: ast.Call) -> str:
        return self.dotted(call.func, self.unit_of[call])

    def reads(self, node: ast.AST) -> str:
        """The last name of an expression: `self.opt_g` is `opt_g`."""
        return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _children(node: ast.AST) -> list[ast.AST]:
    return list(ast.iter_child_nodes(node))


def _outside(node: ast.AST) -> list[ast.AST]:
    """Of a function: what is evaluated where it is defined."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [*node.decorator_list, node.args, *([node.returns] if node.returns else [])]
    return []


def argument(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """That is given by name, or at a position."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if position is not None and len(call.args) > position and not any(isinstance(a, ast.Starred) for a in call.args):
        return call.args[position]
    return None


def is_open(call: ast.Call) -> bool:
    """Whether it is given arguments that cannot be seen (`**settings`)."""
    return any(k.arg is None for k in call.keywords) or any(isinstance(a, ast.Starred) for a in call.args)


def constant(node: ast.AST | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None
