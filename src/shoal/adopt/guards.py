"""Under which condition a line runs: on one rank only, now and then, or always."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from shoal.adopt.code import LOOPS, Code, Unit
from shoal.adopt.graph import Graph

ZERO, OTHERS = "zero", "others"  # ranks that a branch is for
_RANK = re.compile(r"^(\w*_)?rank$|^process_(index|rank)$|^(global|local)_?rank_?id$|^rank_?id$")
_MAIN = re.compile(
    r"^_?(is_|am_|on_)?(\w*_)?(main|master|primary|chief|rank_?zero|rank_?0|global_zero|coordinator|lead(er)?)"
    r"(_process|_rank|_node|_only)?$"
)
_DEEP = 5


@dataclass(frozen=True, eq=False)
class Guard:
    test: ast.expr
    holds: bool  # the line runs where it is true


class Guards:
    def __init__(self, code: Code, graph: Graph) -> None:
        self._code, self._graph = code, graph

    def around(self, node: ast.AST, until: ast.AST | None = None) -> list[Guard]:
        """Innermost first, within its unit, and within `until`. `if done: continue` before it counts."""
        found, before = list[Guard](), node
        for one in self._code.around(node):
            if isinstance(one, ast.If | ast.IfExp) and before is not one.test:
                body = one.body if isinstance(one.body, list) else [one.body]
                found.append(Guard(one.test, before in body))
            if isinstance(one, ast.BoolOp) and isinstance(one.op, ast.And) and before in one.values:
                found += [Guard(v, True) for v in _before(one.values, before)]
            found += _skipped(one, before)
            if one is until:
                return found
            before = one
        return [*found, *_skipped(self._code.unit_of[node].node, before)]

    def ranks(self, guard: Guard, unit: Unit) -> str | None:
        """ZERO or OTHERS where it lets only some ranks through."""
        said = self._of_test(guard.test, unit, 0)
        return said if guard.holds or said is None else (OTHERS if said == ZERO else ZERO)

    def interval(self, guard: Guard, unit: Unit) -> bool:
        """Whether it is about something else than ranks and settings that hold for a whole run: then the line does not
        run on every step, as far as anybody can tell."""
        test = guard.test
        if isinstance(test, ast.BoolOp):
            said = [self.interval(Guard(value, guard.holds), unit) for value in test.values]
            return any(said) if isinstance(test.op, ast.And) == guard.holds else all(said)
        return self.ranks(guard, unit) is None and not self._always(guard, unit)

    def _always(self, guard: Guard, unit: Unit) -> bool:
        test = guard.test
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test = test.operand
        name = self._code.reads(test.func if isinstance(test, ast.Call) else test)
        return name in ("is_available", "is_initialized", "distributed", "is_distributed", "ddp", "use_cuda", "use_amp")

    def _of_test(self, test: ast.AST, unit: Unit, depth: int) -> str | None:
        if depth > _DEEP:
            return None
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            if self._is_rank(test.operand):
                return ZERO
            said = self._of_test(test.operand, unit, depth + 1)
            return None if said is None else OTHERS if said == ZERO else ZERO
        if isinstance(test, ast.BoolOp):
            return next((s for v in test.values if (s := self._of_test(v, unit, depth + 1))), None)
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return self._compare(test, test.ops[0], test.comparators[0])
        if self._is_rank(test):
            return OTHERS
        name = self._code.reads(test.func if isinstance(test, ast.Call) else test)
        if not name:
            return None
        if isinstance(test, ast.Call):
            for callee in self._graph.callees.get(test, ()):
                for value in callee.returned:
                    if said := self._of_test(value, callee, depth + 1):
                        return said
        elif isinstance(test, ast.Name) and (found := self._code.binding(name, unit)):
            for bound in found[1][:4]:
                if bound.index is None and (said := self._of_test(bound.value, found[0], depth + 1)):
                    return said
        elif isinstance(test, ast.Attribute):
            for bound, where in self._code.attributes.get(name, [])[:4]:
                if said := self._of_test(bound.value, where, depth + 1):
                    return said
        return ZERO if _MAIN.match(name) else None

    def _compare(self, test: ast.Compare, op: ast.cmpop, other: ast.expr) -> str | None:
        if not self._is_rank(test.left):
            return None
        if isinstance(op, ast.In | ast.NotIn) and isinstance(other, ast.Tuple | ast.List | ast.Set):
            values = {ast.unparse(e) for e in other.elts}
            if not values <= {"-1", "0"}:
                return None
            return ZERO if isinstance(op, ast.In) else OTHERS
        value = ast.unparse(other) if isinstance(other, ast.Constant | ast.UnaryOp) else ""
        if isinstance(op, ast.Eq):
            return ZERO if value == "0" else None
        if isinstance(op, ast.NotEq):
            return OTHERS if value == "0" else None
        if isinstance(op, ast.Gt):
            return OTHERS if value == "0" else None
        return ZERO if (isinstance(op, ast.LtE) and value == "0") or (isinstance(op, ast.Lt) and value == "1") else None

    def _is_rank(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Call):
            name = self._code.reads(node.func)
            if name in ("get_rank", "get_global_rank", "get_local_rank", "get_process_index"):
                return True
            if name == "int" and node.args:
                return self._is_rank(node.args[0])
            return name in ("getenv", "get") and bool(node.args) and _says_rank(node.args[0])
        if isinstance(node, ast.Subscript):
            return _says_rank(node.slice)
        return bool(_RANK.match(self._code.reads(node).lower()))


def _before(values: list[ast.expr], last: ast.AST) -> list[ast.expr]:
    return values[: next(i for i, value in enumerate(values) if value is last)]


def _says_rank(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID")


def _skipped(block: ast.AST, before: ast.AST) -> list[Guard]:
    """What stands before it in a block and leaves the block: `if step % 10: continue`."""
    for name in ("body", "orelse", "finalbody"):
        statements = getattr(block, name, None)
        if isinstance(statements, list) and before in statements:
            return [
                Guard(one.test, False)
                for one in statements[: statements.index(before)]
                if isinstance(one, ast.If)
                and not one.orelse
                and isinstance(one.body[-1], ast.Continue | ast.Return | ast.Break | ast.Raise)
                and (isinstance(one.body[-1], ast.Continue | ast.Return) or not isinstance(block, LOOPS))
            ]
    return []
