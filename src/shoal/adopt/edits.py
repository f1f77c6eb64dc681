"""Changes of a source text at places that its syntax tree names: all else stays as it was written."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace

from shoal.adopt.project import Module, Project, parse

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|$)")


@dataclass(frozen=True)
class Edit:
    module: str
    start: int
    end: int
    text: str


class Text:
    """Of a module: where its lines and nodes are."""

    def __init__(self, module: Module) -> None:
        self.module, self.source = module, module.source.removeprefix("\ufeff")
        self._starts, at = [0], 0
        while at < len(self.source):
            at = _LINE.match(self.source, at).end()  # type: ignore[union-attr]  # it matches the empty line, too
            self._starts.append(at)
        self.newline = "\r\n" if "\r\n" in self.source else "\n"

    def start(self, node: ast.AST) -> int:
        return self._at(node.lineno, node.col_offset)  # type: ignore[attr-defined]  # of statements and expressions

    def end(self, node: ast.AST) -> int:
        return self._at(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def of(self, node: ast.AST) -> str:
        return self.source[self.start(node) : self.end(node)]

    def _at(self, line: int, column: int) -> int:
        """`column` counts bytes of UTF-8."""
        begin = self._starts[line - 1]
        text = self.source[begin : self._starts[line] if line < len(self._starts) else None]
        return begin + len(text.encode()[:column].decode())

    def indent(self, node: ast.AST) -> str | None:
        """Of a statement that begins its line; None where something else stands before it."""
        start = self.start(node)
        before = self.source[self._starts[node.lineno - 1] : start]  # type: ignore[attr-defined]
        return before if not before.strip() else None

    def after_line(self, node: ast.AST) -> int | None:
        """Where the line after a statement begins; None where something else stands behind it."""
        end = self.end(node)
        rest = _LINE.match(self.source, end)
        assert rest is not None
        if rest[0].strip() and not rest[0].strip().startswith("#"):
            return None
        return rest.end()

    def before(self, node: ast.AST, lines: list[str]) -> Edit | None:
        """Statements in front of another."""
        indent = self.indent(node)
        if indent is None:
            return None
        at = self.start(node) - len(indent)
        return Edit(self.module.name, at, at, "".join(f"{indent}{line}{self.newline}" for line in lines))

    def behind(self, node: ast.AST, lines: list[str]) -> Edit | None:
        indent, at = self.indent(node), self.after_line(node)
        if indent is None or at is None:
            return None
        ends = at == 0 or self.source[at - 1 : at] in ("\n", "\r")
        text = "".join(f"{indent}{line}{self.newline}" for line in lines)
        return Edit(self.module.name, at, at, text if ends else self.newline + text)

    def instead(self, node: ast.AST, lines: list[str]) -> Edit | None:
        """Of a statement that has its lines for itself."""
        indent, at = self.indent(node), self.after_line(node)
        if indent is None or at is None:
            return None
        text = f"{self.newline}{indent}".join(lines)
        return Edit(self.module.name, self.start(node), self.end(node), text)


def changed(project: Project, edits: list[Edit]) -> Project:
    """The same project with other texts; SyntaxError where one is no Python any more."""
    made = Project(project.root, dict(project.modules), list(project.left_out))
    for name in {edit.module for edit in edits}:
        module = project.modules[name]
        mark = "\ufeff" if module.source.startswith("\ufeff") else ""
        text = module.source.removeprefix("\ufeff")
        for edit in sorted((e for e in edits if e.module == name), key=lambda e: e.start, reverse=True):
            text = text[: edit.start] + edit.text + text[edit.end :]
        made.modules[name] = replace(module, source=mark + text, tree=parse(text, str(module.path)))
    return made
