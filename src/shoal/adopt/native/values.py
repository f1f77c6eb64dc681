"""What an expression of a script is, as far as its text tells: a number with the lines it came from, or the call that
made it. Nothing is run, and where there are several answers there is none."""

from __future__ import annotations

import ast
import math
import operator
import posixpath
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.adopt.code import Bound, Unit, argument, is_open
from shoal.adopt.native import told
from shoal.adopt.native.frameworks import SETTINGS, short
from shoal.adopt.training import Training

_DEEP, _MOST_ENDS, _MOST_ASKED = 12, 8, 20_000
_MOST_POWER, _MOST_TEXT = 1 << 53, 4096
_SAME = ("to", "cuda", "cpu", "train", "float", "compile", "resolve", "absolute", "expanduser")
_WRAPS = ("prepare", "prepare_model", "setup", "setup_model", "compile", "DistributedDataParallel",
          "FullyShardedDataParallel", "DataParallel", "unwrap_model", "fully_shard", "replicate")  # fmt: skip
_TEN: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_CALLED: dict[str, Callable[..., Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "round": round,
    "abs": abs,
    "max": max,
    "min": min,
    "math.ceil": math.ceil,
    "math.floor": math.floor,
    "pathlib.Path": str,
    "os.path.join": posixpath.join,
    "tuple": tuple,
    "list": tuple,
    "os.path.expanduser": str,
    "os.fspath": str,
}


@dataclass(frozen=True)
class Known:
    """A value, and by which words it is shown where it came from."""

    value: Any
    where: tuple[str, ...] = ()

    @property
    def said(self) -> str:
        return ", ".join(dict.fromkeys(self.where))


@dataclass(frozen=True)
class End:
    """What an object was made by; `index`: the item of what a call gives."""

    expr: ast.expr
    index: int | None = None


class Values:
    """Of one script; `words` are what it would be started with."""

    def __init__(self, training: Training, words: Sequence[str]) -> None:
        self.training, self.words = training, tuple(words)
        self.code, self.graph = training.code, training.graph
        self._left = _MOST_ASKED

    def line(self, node: ast.AST) -> str:
        unit = self.code.unit_of.get(node)
        shown = unit.module.shown if unit is not None else self.training.project.script.shown
        return f"{shown}:{getattr(node, 'lineno', 1)}"

    def made_by(self, end: End) -> str:
        return self.code.called(end.expr) if isinstance(end.expr, ast.Call) else ""

    # Values

    def read(self, node: ast.AST | None, depth: int = 0) -> Known | None:
        self._left -= 1
        if node is None or depth > _DEEP or self._left < 0:
            return None
        more = depth + 1
        if isinstance(node, ast.Constant):
            return Known(node.value, (self.line(node),))
        if isinstance(node, ast.Name):
            return self._agreed([self.read(e, more) for e in found] if (found := self._given(node)) else [])
        if isinstance(node, ast.Attribute):
            return self._attribute(node, more)
        if isinstance(node, ast.Tuple | ast.List):
            return _joined([self.read(e, more) for e in node.elts], lambda *items: items)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
            does: Callable[..., Any] = operator.neg if isinstance(node.op, ast.USub) else operator.not_
            return _joined([self.read(node.operand, more)], does)
        if isinstance(node, ast.BinOp) and type(node.op) in _TEN:
            sides = [self.read(node.left, more), self.read(node.right, more)]
            return _joined(sides, _bounded(_TEN[type(node.op)]))
        if isinstance(node, ast.BoolOp):
            return self._either(node, more)
        if isinstance(node, ast.IfExp):
            test = self.read(node.test, more)
            both = [node.body, node.orelse] if test is None else [node.body if test.value else node.orelse]
            return self._agreed([self.read(e, more) for e in both])
        if isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.FormattedValue) else p for p in node.values]
            return _joined([self.read(p, more) for p in parts], lambda *items: "".join(map(str, items)))
        if isinstance(node, ast.Subscript):
            return self._item(node, more)
        if isinstance(node, ast.Call):
            return self._call(node, more)
        return None

    def _either(self, node: ast.BoolOp, depth: int) -> Known | None:
        for value in node.values:
            found = self.read(value, depth)
            if found is None or value is node.values[-1] or bool(found.value) == isinstance(node.op, ast.Or):
                return found
        return None

    def _call(self, node: ast.Call, depth: int) -> Known | None:
        name = self.code.called(node)
        if name in _CALLED and not node.keywords:
            return _joined([self.read(a, depth) for a in node.args], _bounded(_CALLED[name]))
        found = [v for unit in self.graph.callees.get(node, ()) for v in unit.returned]
        if found and self.graph.class_named(name) is None:
            return self._agreed([self.read(v, depth) for v in found])
        return None

    def _item(self, node: ast.Subscript, depth: int) -> Known | None:
        key = self.read(node.slice, depth)
        ends = self.ends(node.value, depth)
        if key is None or len(ends) != 1 or not isinstance(ends[0].expr, ast.Dict):
            return None
        table = ends[0].expr
        found = [v for k, v in zip(table.keys, table.values, strict=True) if self._is(k, key.value, depth)]
        unseen = None in table.keys  # of another table that is laid into it
        return self.read(found[-1], depth) if found and not unseen else None

    def _is(self, node: ast.AST | None, value: object, depth: int) -> bool:
        found = self.read(node, depth)
        return found is not None and found.value == value

    def _agreed(self, found: Sequence[Known | None]) -> Known | None:
        known = [one for one in found if one is not None]
        if not known or len(known) != len(found) or any(one.value != known[0].value for one in known):
            return None
        return known[0]

    def _attribute(self, node: ast.Attribute, depth: int) -> Known | None:
        ends = self.ends(node.value, depth)
        if ends:
            return self._agreed([self.field(end, node.attr, depth) for end in ends])
        unit = self.code.unit_of.get(node)
        if unit is not None and (of := self.graph.class_named(self.code.dotted(node.value, unit))) is not None:
            return self._agreed([self.read(told.of_class(of.node, node.attr), depth)])
        if self._is_self(node.value):
            bounds = self.code.attributes.get(node.attr, [])
            if any(isinstance(self.code.parents.get(b.value), ast.AugAssign) or b.index is not None for b, _ in bounds):
                return None
            return self._agreed([self.read(b.value, depth) for b, _ in bounds if not b.each])
        return None

    def field(self, end: End, name: str, depth: int = 0) -> Known | None:
        """What an object has under a name: parsed arguments, settings of a trainer, a dataclass."""
        if depth > _DEEP or not isinstance(end.expr, ast.Call) or self._is_changed(name):
            return None
        call, made = end.expr, self.made_by(end)
        if told.is_parsed(call):
            return self._parsed(call, end.index, name, depth)
        if (given := argument(call, name)) is not None:
            return self.read(given, depth + 1)
        if is_open(call):
            return None
        if made in SETTINGS:
            if name == "output_dir" and call.args:
                return self.read(call.args[0], depth + 1)
            known = SETTINGS[made]
            return Known(known[name], (f"the default of {short(made)}",)) if name in known else None
        if (of := self.graph.class_named(made)) is not None:
            fields = told.fields(of.node)
            if name in fields and fields.index(name) < len(call.args) and "__init__" not in of.methods:
                return self.read(call.args[fields.index(name)], depth + 1)
            return self.read(told.of_class(of.node, name), depth + 1)
        return None

    def _is_changed(self, name: str) -> bool:
        """Whether somewhere `x.name = …` gives an object another value than it was made with."""
        for bound, _ in self.code.attributes.get(name, []):
            at = self.code.parents.get(bound.value)
            targets = at.targets if isinstance(at, ast.Assign) else [getattr(at, "target", None)]
            if any(isinstance(t, ast.Attribute) and not self._is_self(t.value) for t in targets):
                return True
        return False

    def _parsed(self, call: ast.Call, index: int | None, name: str, depth: int) -> Known | None:
        """Of the command line: the words, else the default."""
        if told.parser_of_classes(call):
            parsers = self.ends(call.func.value, depth) if isinstance(call.func, ast.Attribute) else []
            if len(parsers) != 1 or not isinstance(parsers[0].expr, ast.Call) or index is None:
                return None
            of = parsers[0].expr.args[0] if parsers[0].expr.args else None
            classes = of.elts if isinstance(of, ast.Tuple | ast.List) else [of]
            if index >= len(classes) or classes[index] is None:
                return None
            return self._of_settings(classes[index], name, depth)
        adding = [(c, u) for c, u, _ in self.training.calls if told.adds(c) and told.destination(c) == name]
        if len(adding) != 1:
            return None
        one = adding[0][0]
        if (said := told.said(self.words, told.spellings(one))) is not None:
            kind = argument(one, "type")
            typed = told.typed(said, kind.id if isinstance(kind, ast.Name) else "")
            return None if typed is None else Known(typed, (f"{told.spellings(one)[0]} on the command line",))
        if not told.spellings(one)[0].startswith("-"):
            return None  # by its place
        if (action := self.read(argument(one, "action"), depth + 1)) is not None:
            switch = {"store_true": False, "store_false": True}.get(str(action.value))
            if switch is not None and argument(one, "default") is None:
                return Known(switch, (f"{self.line(one)}, its default",))
        default = argument(one, "default")
        if default is None:
            return Known(None, (f"{self.line(one)}, no default",))
        found = self.read(default, depth + 1)
        return None if found is None else Known(found.value, (f"{self.line(one)}, its default",))

    def _of_settings(self, which: ast.expr | None, name: str, depth: int) -> Known | None:
        """Of a class that HfArgumentParser or TrlParser makes options of."""
        unit = self.code.unit_of.get(which) if which is not None else None
        if which is None or unit is None:
            return None
        full = self.code.dotted(which, unit)
        of = self.graph.class_named(full)
        default = told.of_class(of.node, name) if of is not None else None
        known = SETTINGS.get(full, {})
        if default is None and name not in known:
            return None
        usual = self.read(default, depth + 1) if default is not None else Known(known[name])
        said = told.said(self.words, [f"--{name}", f"--{name.replace('_', '-')}"])
        if said is not None:
            like = usual.value if usual is not None else None
            return Known(told.as_like(said, like), (f"--{name} on the command line",))
        if usual is None:
            return None
        return Known(usual.value, (f"the default of {short(full)}",) if of is None else usual.where)

    # Objects

    def ends(self, node: ast.AST, depth: int = 0) -> list[End]:
        """What made the object, through names, parameters, attributes, functions of the project and wrappers."""
        self._left -= 1
        if depth > _DEEP or self._left < 0:
            return []
        more = depth + 1
        if isinstance(node, ast.Name):
            found = [e for b in self.bounds(node) for e in self._of_bound(b, more)]
        elif isinstance(node, ast.Attribute):
            if node.attr == "module":
                return self.ends(node.value, more)
            if not self._is_self(node.value) and any(told.is_parsed(e.expr) for e in self.ends(node.value, more)):
                return []
            found = [e for b, _ in self.code.attributes.get(node.attr, []) for e in self._of_bound(b, more)]
        elif isinstance(node, ast.IfExp):
            found = [*self.ends(node.body, more), *self.ends(node.orelse, more)]
        elif isinstance(node, ast.Call):
            found = self._ends_of_call(node, more)
        elif isinstance(node, ast.expr):
            found = [End(node)]
        else:
            found = []
        return list(dict.fromkeys(found))[:_MOST_ENDS]

    def _ends_of_call(self, call: ast.Call, depth: int) -> list[End]:
        last = self.code.reads(call.func)
        if self._wraps(call) and call.args:
            return self.ends(call.args[0], depth)
        if last in _SAME and isinstance(call.func, ast.Attribute):
            return self.ends(call.func.value, depth)
        units = self.graph.callees.get(call, ())
        if units and self.graph.class_named(self.code.called(call)) is None:
            found = [e for unit in units for v in unit.returned for e in self.ends(v, depth)]
            return found or [End(call)]
        return [End(call)]

    def _of_bound(self, bound: Bound, depth: int) -> list[End]:
        value = bound.value
        if bound.each or isinstance(self.code.parents.get(value), ast.AugAssign):
            return []
        if bound.index is None:
            return self.ends(value, depth)
        if not isinstance(value, ast.Call):
            return []
        if self._wraps(value) and bound.index < len(value.args):
            return self.ends(value.args[bound.index], depth)
        units = self.graph.callees.get(value, ())
        found = [
            e
            for unit in units
            for v in unit.returned
            if isinstance(v, ast.Tuple) and bound.index < len(v.elts)
            for e in self.ends(v.elts[bound.index], depth)
        ]
        return found or [End(value, bound.index)]

    def bounds(self, node: ast.Name) -> list[Bound]:
        """What a name may have been given where it stands."""
        unit = self.code.unit_of.get(node)
        if unit is None:
            return []
        if (owner := self.code.owner_of(node.id, unit)) is not None:
            local = [b for b in owner.bound.get(node.id, ()) if not _is_named(b.value, node.id)]
            return [*map(Bound, self._passed(owner, node.id)), *local]
        if (found := self.code.binding(node.id, unit)) is not None:
            own = [b for b in found[1] if not self._is_itself(b, node.id)]
            reaching = [b for b in self.code.reaching(node, found[1]) if not self._is_itself(b, node.id)]
            return reaching or own
        module, _, last = self.code.dotted(node, unit).rpartition(".")
        there = self.code.of_module.get(module)
        return there.bound.get(last, []) if there is not None else []

    def _is_itself(self, bound: Bound, name: str) -> bool:
        """`model = wrap(model)` is still what the model was."""
        value = bound.value
        if not isinstance(value, ast.Call):
            return False
        wraps = self._wraps(value)
        if wraps and bound.index is not None and bound.index < len(value.args):
            return _is_named(value.args[bound.index], name)
        inner = value.args[0] if wraps and value.args else None
        if self.code.reads(value.func) in _SAME and isinstance(value.func, ast.Attribute):
            inner = value.func.value
        return inner is not None and _is_named(inner, name)

    def _passed(self, unit: Unit, name: str) -> list[ast.expr]:
        """What callers give for a parameter; its default only where one of them gives nothing."""
        at = unit.params.index(name) - (1 if unit.owner is not None else 0)
        found, left_out = list[ast.expr](), False
        for _, call in self.graph.callers.get(unit, ()):
            if not isinstance(call, ast.Call) or is_open(call):
                return []  # what it is given cannot be seen
            given = argument(call, name, at if at >= 0 else None)
            found += [] if given is None else [given]
            left_out |= given is None
        default = told.default_of(unit.node, name)
        return [*found, default] if default is not None and (left_out or not found) else found

    def _given(self, node: ast.Name) -> list[ast.expr]:
        """The expressions that a name may stand for; none where one of them cannot be followed."""
        bounds = self.bounds(node)
        if any(
            b.index is not None or b.each or isinstance(self.code.parents.get(b.value), ast.AugAssign) for b in bounds
        ):
            return []
        unit = self.code.unit_of.get(node)
        at = self.code.binding(node.id, unit) if unit is not None else None
        changed = at is not None and any(isinstance(self.code.parents.get(b.value), ast.AugAssign) for b in at[1])
        return [] if changed else [b.value for b in bounds]

    def _wraps(self, call: ast.Call) -> bool:
        """What it gives is what it was given; by its full name, for many import it under a short one."""
        return self.code.called(call).rpartition(".")[2] in _WRAPS or self.code.reads(call.func) in _WRAPS

    def _is_self(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _joined(parts: Sequence[Known | None], does: Callable[..., Any]) -> Known | None:
    known = [part for part in parts if part is not None]
    if len(known) != len(parts):
        return None
    try:
        value = does(*(part.value for part in known))
    except (ArithmeticError, TypeError, ValueError):
        return None
    return Known(value, tuple(where for part in known for where in part.where))


def _bounded(does: Callable[..., Any]) -> Callable[..., Any]:
    """Sums of a script, without those that would take all memory."""

    def bounded(*values: Any) -> Any:
        if any(isinstance(v, int | float) and abs(v) > _MOST_POWER for v in values):
            raise ValueError
        if does is operator.pow and (abs(values[1]) > 64 or abs(values[0]) > 1 << 20):
            raise ValueError
        if does in (operator.mul, operator.mod) and not all(isinstance(v, int | float) for v in values):
            raise ValueError
        found = does(*values)
        if isinstance(found, str | tuple) and len(found) > _MOST_TEXT:
            raise ValueError
        return found

    return bounded


def _is_named(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
