"""Which files own code is: the modules that a run names, and those beside them that they import. Nothing is run here.

Found by reading, in one folder: `mine.py`, or the whole package `mine/`, and so on for every import that the folder can
answer. What it cannot answer is installed on the machine, or missing; whoever imports it finds out.
"""

from __future__ import annotations

import ast
import fnmatch
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

from shoal.errors import SpecError
from shoal.plain_file import read_plain
from shoal.spec.run import Run

MOST_BYTES = 16 << 20
MOST_FILES = 2000
# What never travels with code: what is made anew, what is large, and what is secret.
NEVER = (".git", ".venv", "venv", "node_modules", "__pycache__", "runs", ".shoal", "*.pyc", ".env", "*.pem", "*.key")


def files_of(run: Run, folder: Path) -> dict[str, bytes]:
    """By their paths in the folder, sorted; empty where all that is named is installed."""
    found: dict[str, bytes] = {}
    wanted, seen = _tops(run.own.modules), set[str]()
    while wanted:
        top = wanted.pop()
        if top in seen:
            continue
        seen.add(top)
        for path in _of_top(folder, top):
            name = path.relative_to(folder).as_posix()
            found[name] = _read(path)
            if len(found) > MOST_FILES or sum(map(len, found.values())) > MOST_BYTES:
                raise SpecError(
                    f"own code: {top} in {folder} is more than {MOST_FILES} files or {MOST_BYTES >> 20} MiB; code is "
                    "copied with the run, data is not: move the data out of the package."
                )
            if path.suffix == ".py":
                wanted += _tops(_imports(found[name], path))
    return dict(sorted(found.items()))


def digest(files: Mapping[str, bytes]) -> str:
    whole = hashlib.sha256()
    for name, data in sorted(files.items()):
        whole.update(f"{name}\0{len(data)}\0".encode() + hashlib.sha256(data).digest())
    return whole.hexdigest()


def in_folder(folder: Path) -> dict[str, bytes]:
    """The files of a copy that was made of `files_of`."""
    return {path.relative_to(folder).as_posix(): _read(path) for path in _inside(folder, "*")}


def _tops(modules: Iterable[str]) -> list[str]:
    return [module.partition(".")[0] for module in modules]


def _of_top(folder: Path, top: str) -> Iterator[Path]:
    """The files of a module, or of a package, of the folder; none where it is neither."""
    package, module = folder / top, folder / f"{top}.py"
    if (package / "__init__.py").is_file():
        yield from _inside(package, "*")
    elif module.is_file():
        yield module
    elif top.isidentifier() and package.is_dir():  # a package without __init__.py: its code alone
        yield from _inside(package, "*.py")


def _inside(folder: Path, pattern: str) -> list[Path]:
    """Its files; what has too many of them is found out by whoever reads them."""
    found = (p for p in folder.rglob(pattern) if p.is_file() and travels(p, folder))
    return sorted(islice(found, MOST_FILES + 1))


def travels(path: Path, folder: Path) -> bool:
    """Whether a file of a folder of code goes along: none that should not, and no link that leads out of it."""
    parts = path.relative_to(folder).parts
    if any(fnmatch.fnmatch(part, never) for part in parts for never in NEVER):
        return False
    return path.resolve().is_relative_to(folder.resolve())


def _read(path: Path) -> bytes:
    try:
        return read_plain(path, MOST_BYTES)
    except (OSError, ValueError) as e:
        raise SpecError(f"own code: {path} cannot be read ({e}).") from None


def _imports(source: bytes, path: Path) -> Iterator[str]:
    """What a module imports, also within functions; relative imports stay in its package."""
    try:
        tree = ast.parse(source, str(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        line = getattr(e, "lineno", None)
        raise SpecError(f"own code: {path}{f':{line}' if line else ''}: {getattr(e, 'msg', None) or e}.") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
