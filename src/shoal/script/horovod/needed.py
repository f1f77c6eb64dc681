"""Whether a script needs the stand-in: it imports Horovod, and there is none. Nothing is imported or run; no torch."""

from __future__ import annotations

import ast
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from shoal.plain_file import read_plain

MOST_BYTES = 16 << 20
PATH = Path(__file__).parents[1] / "horovod_path"  # what stands in PYTHONPATH: a folder with a `horovod`


def needed(script: Path, python_path: str) -> bool:
    """`python_path` is the script's PYTHONPATH. A script that imports Horovod and can do without has said how."""
    folders = [str(script.resolve().parent), *[f for f in python_path.split(os.pathsep) if f], *sys.path]
    return _imports(script) and PathFinder.find_spec("horovod", folders) is None


def _imports(script: Path) -> bool:
    try:
        waiting: list[ast.AST] = [ast.parse(read_plain(script, MOST_BYTES))]
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # look_at says so
        return False
    while waiting:
        node = waiting.pop()
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        if any(name.split(".")[0] == "horovod" for name in names):
            return True
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.Try) and any(_catches_imports(handler) for handler in node.handlers):
            children = [child for child in children if child not in node.body]
        waiting += children
    return False


def _catches_imports(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    caught = ("ImportError", "ModuleNotFoundError", "Exception", "BaseException")
    return any(kind is None or (isinstance(kind, ast.Name) and kind.id in caught) for kind in kinds)
