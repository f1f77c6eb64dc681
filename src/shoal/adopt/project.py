"""The files of a script: itself, and the modules of its own project that it imports. Read, never imported.

Followed within one folder: that of the script, or the one above it which holds the whole project. What leads out of it
(a link, `..`), is too large or is no Python is left out, and the report says so.
"""

from __future__ import annotations

import ast
import os
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

from shoal.plain_file import NotPlain, read_plain
from shoal.script.file import look_at

MOST_FILES = 200
MOST_BYTES = 2 << 20  # of one module
MOST_TOTAL = 16 << 20
MOST_NODES = 400_000  # of all of them, as Python reads them
MOST_ABOVE = 3  # folders between the script and its project
# Judged by nobody, also where they lie beside the script.
# fmt: off
FRAMEWORKS = frozenset((
    "torch", "torchvision", "torchaudio", "torchdata", "transformers", "accelerate", "lightning", "pytorch_lightning",
    "lightning_fabric", "datasets", "trl", "deepspeed", "diffusers", "peft", "timm", "numpy", "shoal", "composer",
    "megatron", "colossalai", "horovod", "fairscale", "apex", "ignite", "fastai", "tqdm", "wandb", "ray", "jax",
))
# fmt: on
_MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg")


@dataclass(frozen=True, eq=False)
class Module:
    name: str  # as an import names it; the script is `__main__`
    path: Path
    shown: str  # its path in the report
    source: str
    tree: ast.Module
    package: str  # that its relative imports begin at


@dataclass
class Project:
    root: Path
    modules: dict[str, Module] = field(default_factory=dict)  # the script first
    left_out: list[str] = field(default_factory=list)  # why, in words

    @property
    def script(self) -> Module:
        return self.modules["__main__"]


def read_project(script: Path) -> Project:
    look_at(script)
    project = Project(_root_of(script))
    folders = _folders(script, project.root)
    project.modules["__main__"] = _module("__main__", script, "")
    nodes = sum(1 for _ in ast.walk(project.script.tree))
    total = len(project.script.source)
    wanted, seen = list(_imports(project.script)), {script.resolve()}
    tried = set[str]()
    while wanted:
        name = wanted.pop(0)
        if name in tried:
            continue
        tried.add(name)
        found = _find(name, folders, project.root)
        if found is None or found.resolve() in seen:
            continue
        seen.add(found.resolve())
        if len(project.modules) > MOST_FILES or total > MOST_TOTAL or nodes > MOST_NODES:
            project.left_out.append(f"more than {MOST_FILES} files or {MOST_TOTAL >> 20} MiB: the rest is not read")
            break
        package = name if found.name == "__init__.py" else name.rpartition(".")[0]
        try:
            module = _module(name, found, package)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as e:
            project.left_out.append(f"{_shown(found)} is not read ({_why(e)})")
            continue
        project.modules[name] = module
        total += len(module.source)
        nodes += sum(1 for _ in ast.walk(module.tree))
        wanted += _imports(module)
    return project


def parse(source: bytes | str, name: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its strings and comparisons: not what was asked
        return ast.parse(source, name)


def text_of(data: bytes) -> str:
    """As Python decodes it, with the line ends that it has."""
    encoding, _ = tokenize.detect_encoding(BytesIO(data).readline)
    return data.decode(encoding)


def _module(name: str, path: Path, package: str) -> Module:
    data = read_plain(path, MOST_BYTES if name != "__main__" else MOST_TOTAL)
    return Module(name, path, _shown(path), text_of(data), parse(data, str(path)), package)


def _shown(path: Path) -> str:
    here = os.path.relpath(path)
    return here if not here.startswith("..") else str(path)


def _why(e: BaseException) -> str:
    if isinstance(e, NotPlain | OSError):
        return str(e.strerror or e)
    return f"line {e.lineno}: {e.msg}" if isinstance(e, SyntaxError) else str(e)[:100]


def _root_of(script: Path) -> Path:
    """The folder above that looks like a project, if it is near; else the script's own."""
    folder = script.resolve().parent
    above = [folder, *folder.parents][: MOST_ABOVE + 1]
    marked = [f for f in above if any((f / mark).exists() for mark in _MARKS) and f != Path.home()]
    return marked[0] if marked else folder


def _folders(script: Path, root: Path) -> list[Path]:
    """Where an import may be found: first beside the script, as Python looks."""
    folder = script.resolve().parent
    return [f for f in (folder, *folder.parents) if f.is_relative_to(root)] + [root / "src"]


def _imports(module: Module) -> Iterator[str]:
    """The names of modules that it may mean: `from a import b` is `a`, and may be `a.b`."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(module, node)
            if base:
                yield base
            yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names if alias.name != "*")


def absolute(module: Module, node: ast.ImportFrom) -> str:
    """What it imports from, in full."""
    if not node.level:
        return node.module or ""
    parts = module.package.split(".") if module.package else []
    parts = parts[: len(parts) - (node.level - 1)] if node.level > 1 else parts
    return ".".join([*parts, *([node.module] if node.module else [])])


def _find(name: str, folders: list[Path], root: Path) -> Path | None:
    parts = name.split(".")
    if parts[0] in FRAMEWORKS or not all(part.isidentifier() for part in parts):
        return None
    for folder in folders:
        place = folder.joinpath(*parts)
        for file in (place / "__init__.py", place.with_suffix(".py")):
            try:
                if file.is_file() and file.resolve().is_relative_to(root):
                    return file
            except (OSError, RuntimeError):  # a link that leads back to itself
                continue
    return None
