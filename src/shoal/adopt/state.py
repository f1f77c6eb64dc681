"""What is in a checkpoint: followed through dicts, dataclasses, pieces that are added, and functions of the project."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import cached_property

from shoal.adopt.code import Unit
from shoal.adopt.training import Training

_DEEP = 10
_MOST_ASKED = 2000
MODEL, OPTIMIZER, SCHEDULE, SCALER, RNG, POSITION = "model", "optimizer", "schedule", "scaler", "rng", "position"
_BY_NAME = (
    (RNG, re.compile(r"rng|random_state|seed_state|generator")),
    (SCALER, re.compile(r"scaler")),
    (SCHEDULE, re.compile(r"sched|lr_state|warmup")),
    (OPTIMIZER, re.compile(r"optim|(^|_)opts?(_|$)")),
    (POSITION, re.compile(
        r"epoch|(^|_)(step|steps|iter|iters|iteration|iterations|it|position|batch|batches|progress|update|updates)(_|$)"
        r"|iter_num|samples_seen|tokens_seen"
    )),
    (MODEL, re.compile(
        r"model|(^|_)(net|network|weights|module|state_dict|ema|gen|disc|critic|encoder|decoder)(_|$|[gd]$)|net[gd]"
    )),
)  # fmt: skip
_ANYTHING = re.compile(
    r"extra|state|other|misc|train|rest|ckpt|checkpoint|app|all|everything"
)  # keys that tell nothing
_DRAWS = re.compile(
    r"(torch(\.cuda|\.random|\.mps)?\.get_rng_state(_all)?|random\.getstate|(numpy|np)\.random\.get_state"
    r"|torch\.cuda\.random\.get_rng_state(_all)?)$"
)
_BOTH = re.compile(r"torch\.distributed\.checkpoint(\.\w+)*\.get_state_dict$")
_COPIES = re.compile(
    r"(dict|copy\.deepcopy|copy\.copy|dataclasses\.asdict|asdict|vars|collections\.OrderedDict|OrderedDict)$"
)


@dataclass
class Held:
    """What a checkpoint holds. `open`: and perhaps more, that could not be followed."""

    parts: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)  # of the objects whose states are in it
    keys: dict[str, ast.expr] = field(default_factory=dict)
    open: bool = False

    def add(self, other: Held) -> None:
        self.parts |= other.parts
        self.names |= other.names
        self.keys |= other.keys
        self.open |= other.open


def by_name(name: str) -> str | None:
    return next((part for part, pattern in _BY_NAME if pattern.search(name.lower())), None)


class Reader:
    def __init__(self, training: Training) -> None:
        self._t, self._code, self._left = training, training.code, _MOST_ASKED

    def held(self, value: ast.expr, depth: int = 0, key: str = "") -> Held:
        """`key`: under which it stands, where it stands in a dict."""
        self._left -= 1
        if depth > _DEEP or self._left < 0 or (unit := self._code.unit_of.get(value)) is None:
            return Held(open=True)
        found = self._of(value, unit, depth + 1)
        if not key or found.parts:
            return found
        part = by_name(key)
        if found.open:
            if part is not None:
                return Held({part}, {self._code.reads(value)} - {""})
            found.open = bool(_ANYTHING.search(key.lower()))
        elif part in (POSITION, RNG):
            found.parts.add(part)
        return found

    def _of(self, value: ast.expr, unit: Unit, depth: int) -> Held:
        if isinstance(value, ast.Dict):
            found = Held()
            for key, item in zip(value.keys, value.values, strict=True):
                if key is None:
                    found.add(self.held(item, depth))
                elif isinstance(key, ast.Constant) and isinstance(key.value, str):
                    found.add(self.held(item, depth, key.value))
                    found.keys[key.value] = item
                else:
                    found.add(self.held(item, depth, self._code.reads(key)))
            return found
        if isinstance(value, ast.Tuple | ast.List | ast.Set):
            return self._all(list(value.elts), depth)
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr):
            return self._all([value.left, value.right], depth)
        if isinstance(value, ast.IfExp):
            return self._all([value.body, value.orelse], depth)
        if isinstance(value, ast.BoolOp):
            return self._all(value.values, depth)
        if isinstance(value, ast.Call):
            return self._call(value, unit, depth)
        if isinstance(value, ast.Name):
            return self._name(value, unit, depth)
        if isinstance(value, ast.Attribute):
            return self._attribute(value, depth)
        if isinstance(value, ast.DictComp):
            found = self.held(value.generators[0].iter, depth)
            return Held(found.parts, found.names, open=True)
        if isinstance(value, ast.ListComp | ast.GeneratorExp):
            return self.held(value.elt, depth)
        if isinstance(value, ast.Starred | ast.Await):
            return self.held(value.value, depth)
        if isinstance(value, ast.Subscript):
            return Held(open=True)
        return Held()  # a number, a text

    def _all(self, values: list[ast.expr], depth: int) -> Held:
        found = Held()
        for one in values:
            found.add(self.held(one, depth))
        return found

    def _call(self, call: ast.Call, unit: Unit, depth: int) -> Held:
        full, last = self._code.called(call), self._code.reads(call.func)
        if _DRAWS.match(full) or last in ("get_rng_state", "get_rng_state_all", "getstate", "get_state"):
            return Held({RNG})
        if _BOTH.match(full):
            return Held({MODEL, OPTIMIZER})
        if last in ("get_model_state_dict", "get_optimizer_state_dict", "optim_state_dict", "full_optim_state_dict"):
            return Held({MODEL if "model" in last else OPTIMIZER})
        if last in ("state_dict", "save_pretrained") and isinstance(call.func, ast.Attribute):
            return self._state(call, call.func.value, depth)
        if _COPIES.match(full.lstrip(".")):
            found = self._all([*call.args], depth)
            for keyword in call.keywords:
                found.add(self.held(keyword.value, depth, keyword.arg or ""))
                if keyword.arg:
                    found.keys[keyword.arg] = keyword.value
            return found
        if self._t.graph.class_named(full) is not None:
            found = self._all([*call.args], depth)
            for keyword in call.keywords:
                found.add(self.held(keyword.value, depth, keyword.arg or ""))
            return found
        if callees := self._t.graph.callees.get(call):
            found = Held(open=not any(unit.returned for unit in callees))
            for callee in callees:
                for value in callee.returned:
                    found.add(self.held(value, depth))
            return found
        if isinstance(call.func, ast.Attribute) and last in ("cpu", "clone", "detach", "copy", "item", "to"):
            return self.held(call.func.value, depth)
        if full in ("int", "float", "str", "len", "bool", "max", "min", "round") or full.startswith(("time.", "os.")):
            return Held()
        return Held(open=True)

    def _state(self, call: ast.Call, of: ast.expr, depth: int) -> Held:
        """`X.state_dict()`: of what kind X is, how it is used, or what it is called."""
        kinds, name = self._t.kinds.of(of), self._code.reads(of)
        for kind in (OPTIMIZER, SCHEDULE, SCALER, MODEL):
            if kind in kinds:
                return Held({kind}, {name})
        if kinds & {"loader", "stateful", "shares", "random"}:
            return Held({POSITION, RNG}, {name})
        if "engine" in kinds:
            return Held({MODEL}, {name})
        mine = [u for u in self._t.graph.callees.get(call, ()) if u.returned]
        if mine and not (by_name(name) == MODEL and not kinds):
            found = Held()
            for unit in mine:
                for value in unit.returned:
                    found.add(self.held(value, depth))
            return found
        if (part := by_name(name)) is not None:
            return Held({part}, {name})
        if name in self._models:
            return Held({MODEL}, {name})
        return Held(open=True)

    @cached_property
    def _models(self) -> set[str]:
        found = self._t.methods("parameters", "train", "eval", "named_parameters")
        return {self._code.reads(target) for _, _, target in found}

    def _name(self, value: ast.Name, unit: Unit, depth: int) -> Held:
        kinds = self._t.kinds.of(value)
        for kind in (OPTIMIZER, SCHEDULE, SCALER, MODEL):
            if kind in kinds:
                return Held({kind}, {value.id})
        if (takes := self._takes_rest(value.id, unit)) is not None:
            return self._rest(takes, depth)
        if (owner := self._code.owner_of(value.id, unit)) is not None:
            given = self._t.kinds.given(owner, value.id)
            found = self._all(given, depth) if given else Held(open=True)
            found.add(self._pieces(value.id, owner, depth))
            return found
        if (where := self._code.binding(value.id, unit)) is None:
            module, _, last = self._code.dotted(value, unit).rpartition(".")
            there = self._code.of_module.get(module)
            if there is None or last not in there.bound:
                return Held(open=True)
            where = there, there.bound[last]
        found = Held()
        for bound in self._code.reaching(value, where[1])[:8]:
            if bound.each or bound.index is not None:
                part = by_name(value.id)
                found.add(Held({part}) if part else Held(open=not bound.each))
            elif not _is_number(bound.value):
                found.add(self.held(bound.value, depth))
        if self._counts(value.id, where[0]) and by_name(value.id) in (POSITION, None):
            found = Held({POSITION})
        found.add(self._pieces(value.id, where[0], depth))
        return found

    def _takes_rest(self, name: str, unit: Unit) -> Unit | None:
        at: Unit | None = unit
        while at is not None and at.rest != name:
            at = at.above
        return at

    def _rest(self, unit: Unit, depth: int) -> Held:
        """What its callers give beside its parameters, by name."""
        found = Held()
        for _, call in self._t.graph.callers.get(unit, ()):
            for keyword in call.keywords if isinstance(call, ast.Call) else ():
                if keyword.arg not in unit.params:
                    found.add(self.held(keyword.value, depth, keyword.arg or ""))
        return found

    def _counts(self, name: str, unit: Unit) -> bool:
        """A counter, or what a `for` over numbers counts."""
        for node in unit.nodes:
            if isinstance(node, ast.AugAssign) and self._code.reads(node.target) == name:
                return True
            if isinstance(node, ast.For) and isinstance(node.iter, ast.Call):
                target = node.target.elts[0] if isinstance(node.target, ast.Tuple) else node.target
                over = self._code.called(node.iter).rpartition(".")[2]
                if over in ("range", "trange", "count", "enumerate") and self._code.reads(target) == name:
                    return True
        return False

    def _pieces(self, name: str, unit: Unit, depth: int) -> Held:
        """What is added to it: `state["x"] = …`, `state.update(…)`, `state.x = …`."""
        found = Held()
        self._left -= 1
        if self._left < 0:
            return Held(open=True)
        for node in unit.nodes:
            if isinstance(node, ast.Assign | ast.AugAssign):
                targets: list[ast.expr] = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Subscript) and self._code.reads(target.value) == name:
                        key = target.slice
                        said = key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else ""
                        found.add(self.held(node.value, depth, said or self._code.reads(key)))
                        if said:
                            found.keys[said] = node.value
                    elif isinstance(target, ast.Attribute) and self._code.reads(target.value) == name:
                        found.add(self.held(node.value, depth, target.attr))
                if isinstance(node, ast.AugAssign) and self._code.reads(node.target) == name:
                    found.add(self.held(node.value, depth))
            elif isinstance(node, ast.Call):
                if isinstance(node.func, ast.Attribute) and self._code.reads(node.func.value) == name:
                    if node.func.attr in ("update", "setdefault", "append", "extend"):
                        for one in node.args:
                            found.add(self.held(one, depth))
                        for keyword in node.keywords:
                            found.add(self.held(keyword.value, depth, keyword.arg or ""))
                elif any(self._code.reads(a) == name for a in node.args):
                    found.add(self._handed(node, name, depth))
        return found

    def _handed(self, call: ast.Call, name: str, depth: int) -> Held:
        """To a function of the project, which may add to it."""
        found = Held()
        for unit in self._t.graph.callees.get(call, ()):
            at = next(i for i, a in enumerate(call.args) if self._code.reads(a) == name) + (unit.owner is not None)
            if at < len(unit.params) and depth < _DEEP:
                found.add(self._pieces(unit.params[at], unit, depth + 1))
        return found

    def _attribute(self, value: ast.Attribute, depth: int) -> Held:
        kinds = self._t.kinds.of(value)
        for kind in (OPTIMIZER, SCHEDULE, SCALER, MODEL):
            if kind in kinds:
                return Held({kind}, {value.attr})
        if value.attr == "__dict__":
            return self.held(value.value, depth)
        if (part := by_name(value.attr)) == POSITION:
            return Held({part})
        bounds = self._code.attributes.get(value.attr, [])
        if not bounds:
            return Held(open=self._code.reads(value.value) not in ("args", "cfg", "config", "opts", "hparams"))
        found = Held()
        for bound, _ in bounds[:6]:
            if bound.index is None and not _is_number(bound.value):
                found.add(self.held(bound.value, depth))
        found.add(self._added(value.attr, depth))
        return found

    def _added(self, attr: str, depth: int) -> Held:
        """To an attribute of that name, anywhere."""
        found = Held()
        for unit in self._t.units:
            found.add(self._pieces(attr, unit, depth))
        return found


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or (isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant))
