"""Who calls whom in a project, what is reached from the script, and which loops stand around a line through calls."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cached_property

from shoal.adopt.code import Class, Code, Loop, Unit

MOST_SAME = 4  # methods of one name: with more, nobody can tell which is called
_DEEP = 6


class Graph:
    def __init__(self, code: Code) -> None:
        self.code = code
        self.callees: dict[ast.AST, list[Unit]] = {}  # of a call, or of a name that stands for a function
        self.callers: dict[Unit, list[tuple[Unit, ast.AST]]] = {}
        self._methods: dict[str, list[Unit]] = {}
        self._loops: dict[Unit, list[Loop]] = {}
        for classes in code.classes.values():
            for one in classes:
                for name, method in one.methods.items():
                    self._methods.setdefault(name, []).append(method)
        for unit in code.units:
            for node in unit.nodes:
                for callee in self._of(node, unit):
                    self.callees.setdefault(node, []).append(callee)
                    self.callers.setdefault(callee, []).append((unit, node))

    def _of(self, node: ast.AST, unit: Unit) -> list[Unit]:
        if isinstance(node, ast.Call):
            return self.functions(node.func, unit)
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            around = self.code.parents.get(node)
            if isinstance(around, ast.Call) and around.func is node:
                return []
            if isinstance(around, ast.Attribute):
                return []
            return self.functions(node, unit) if isinstance(node, ast.Name) or self._is_self(node) else []
        return []

    def _is_self(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"

    def functions(self, node: ast.AST, unit: Unit) -> list[Unit]:
        """Those of the project that an expression may stand for."""
        if isinstance(node, ast.Name):
            at: Unit | None = unit
            while at is not None:
                if node.id in at.children:
                    return [at.children[node.id]]
                if node.id in at.params or node.id in at.bound:
                    break
                at = at.above
        full = self.code.dotted(node, unit)
        if (found := self.class_named(full)) is not None:
            return [m for name in ("__init__", "__post_init__") if (m := self.method(found, name))]
        module, _, last = full.rpartition(".")
        if module in self.code.of_module and last in self.code.of_module[module].children:
            return [self.code.of_module[module].children[last]]
        if isinstance(node, ast.Attribute):
            if self._is_self(node) and (owner := _class_of(unit)):
                found_here = [m for c in self.code.classes.get(owner, ()) if (m := self.method(c, node.attr))]
                if found_here:
                    return found_here
            foreign = full and not full.startswith(".") and full.split(".")[0] not in ("self", "super")
            if not (foreign and not self._ours(full)):
                same = self._methods.get(node.attr, [])
                return same if len(same) <= MOST_SAME else []
        return []

    def _ours(self, full: str) -> bool:
        return any(full.startswith(f"{name}.") for name in self.code.of_module)

    def class_named(self, full: str) -> Class | None:
        module, _, last = full.rpartition(".")
        for one in self.code.classes.get(last, ()):
            if one.unit.module.name == module:
                return one
        return None

    def method(self, one: Class, name: str, depth: int = 0) -> Unit | None:
        if name in one.methods:
            return one.methods[name]
        for base in one.node.bases if depth < _DEEP else ():
            above = self.class_named(self.code.dotted(base, one.unit))
            if above is not None and (found := self.method(above, name, depth + 1)):
                return found
        return None

    def bases(self, one: Class, depth: int = 0) -> Iterator[str]:
        """In full, with those of its own bases."""
        for base in one.node.bases:
            full = self.code.dotted(base, one.unit)
            yield full
            above = self.class_named(full)
            if above is not None and depth < _DEEP:
                yield from self.bases(above, depth + 1)

    @cached_property
    def reached(self) -> set[Unit]:
        """From the script: the code of all modules, and what is called or handed on from there. Methods that a
        framework calls (`forward`, `training_step`) are reached with their class."""
        found = set[Unit]()
        wanted = list(self.code.of_module.values())
        named = {n.attr for u in self.code.units for n in u.nodes if isinstance(n, ast.Attribute)}
        for classes in self.code.classes.values():
            for one in classes:
                foreign = [base for base in self.bases(one) if self.class_named(base) is None]
                wanted += [m for name, m in one.methods.items() if foreign or name in named or name.startswith("__")]
        while wanted:
            unit = wanted.pop()
            if unit in found:
                continue
            found.add(unit)
            wanted += [callee for node in unit.nodes for callee in self.callees.get(node, ())]
            wanted += [u for u in self.code.units if u.above is unit and isinstance(u.node, ast.Lambda)]
        return found

    def loops(self, node: ast.AST) -> list[Loop]:
        """Around it, innermost first; then those around the calls of its function."""
        unit = self.code.unit_of[node]
        found = self.code.loops(node)
        return found + [one for one in self._around(unit) if one not in found]

    def _around(self, unit: Unit) -> list[Loop]:
        """The loops around all calls of a function, the nearest callers first."""
        if unit not in self._loops:
            found, seen, wanted = list[Loop](), {unit}, deque([unit])
            while wanted:
                for caller, place in self.callers.get(wanted.popleft(), ()):
                    if caller in self.reached:
                        found += [one for one in self.code.loops(place) if one not in found]
                        if caller not in seen:
                            seen.add(caller)
                            wanted.append(caller)
            self._loops[unit] = found
        return self._loops[unit]

    def inside(self, nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
        """All that runs where these do: they, and what is in the functions that they call."""
        done, wanted = set[Unit](), deque(nodes)
        while wanted:
            node = wanted.popleft()
            yield node
            for callee in self.callees.get(node, ()):
                if callee not in done:
                    done.add(callee)
                    wanted += callee.nodes

    def below(self, tree: ast.AST) -> Iterator[ast.AST]:
        """Its own nodes, without those of functions that are defined there and what a `for` reads."""
        stack: list[ast.AST] = (
            [*tree.body, *tree.orelse] if isinstance(tree, ast.For | ast.AsyncFor | ast.While) else [tree]
        )
        stack.reverse()
        found: list[ast.AST] = [tree.test] if isinstance(tree, ast.While) else []
        while stack:
            node = stack.pop()
            found.append(node)
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                stack.extend(reversed(list(ast.iter_child_nodes(node))))
        yield from found


def _class_of(unit: Unit) -> str | None:
    at: Unit | None = unit
    while at is not None:
        if at.owner is not None:
            return at.owner
        at = at.above
    return None
