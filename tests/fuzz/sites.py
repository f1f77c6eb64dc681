"""Where the product turns bytes of others into values: every call of a parser in src, found by reading the source.

`read_by` says which generator reaches a place (measured: `python -m tests.fuzz reach`), `OURS` why a place needs none.
A place in neither, or an entry for a place that is gone, fails a test; `python -m tests.fuzz sites` lists both.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

from tests.fuzz.own_places import OURS

TABLE = Path(__file__).parent / "read_by.json"
SOURCE = Path(__file__).parents[2] / "src" / "shoal"
# Called by these names, whatever stands before the dot.
PARSERS = frozenset(
    {
        *("loads", "read_json", "read_object", "read_plain", "raw_decode", "literal_eval"),
        *("unpack", "unpack_from", "iter_unpack", "frombuffer", "fromfile", "memmap"),
        *("safe_open", "load_file", "from_str", "from_file", "from_buffer", "ParquetFile", "load_from_disk"),
        *("load_dataset", "DictReader", "ZipFile", "decompress", "decompressobj", "ZstdDecompressor", "Unpickler"),
        *("compose", "safe_load", "parse_squeue", "parse_sacct", "fromstring"),
    }
)
# Called by these names only after these: `load` alone is said of many things.
WITH_MODULE = frozenset(
    {
        *(("json", "load"), ("np", "load"), ("torch", "load"), ("yaml", "load"), ("pickle", "load"), ("csv", "reader")),
        *(("tarfile", "open"), ("gzip", "open"), ("tomllib", "load"), ("safetensors", "load")),
    }
)


def found() -> dict[str, set[str]]:
    """`module:function` → the parsers that are called there."""
    places: dict[str, set[str]] = {}
    for file in sorted(SOURCE.rglob("*.py")):
        module = ".".join(file.relative_to(SOURCE).with_suffix("").parts)
        for function, called in _calls(ast.parse(file.read_bytes()), ""):
            if (name := _parser(called)) is not None:
                places.setdefault(f"{module}:{function}", set()).add(name)
    return places


def read_by() -> dict[str, str]:
    return dict(json.loads(TABLE.read_bytes()))


def missing() -> dict[str, set[str]]:
    known = {*read_by(), *OURS}
    return {place: names for place, names in found().items() if place not in known}


def stale() -> list[str]:
    there = found()
    return sorted(place for place in {*read_by(), *OURS} if place not in there)


def _calls(node: ast.AST, within: str) -> Iterator[tuple[str, ast.expr]]:
    for child in ast.iter_child_nodes(node):
        inner = within
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{within}.{child.name}" if within else child.name
        elif isinstance(child, ast.Call):
            yield within, child.func
            for argument in (*child.args, *(k.value for k in child.keywords)):  # partial(json.loads), map(read_json, …)
                if isinstance(argument, ast.Attribute | ast.Name):
                    yield within, argument
        yield from _calls(child, inner)


def _parser(called: ast.expr) -> str | None:
    if isinstance(called, ast.Attribute):
        before = called.value.id if isinstance(called.value, ast.Name) else ""
        if called.attr in PARSERS or (before, called.attr) in WITH_MODULE:
            return f"{before}.{called.attr}" if before else called.attr
    elif isinstance(called, ast.Name) and called.id in PARSERS:
        return called.id
    return None
