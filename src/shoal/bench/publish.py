"""The entry as a file: written as TOML, read back before it counts, put in its place in one move."""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

from shoal.errors import SetupError, UsageError
from shoal.plan import catalogue
from shoal.plan.hardware_types import Device, Measured

MARK = "# Written by `shoal bench`"
_HEAD = (
    f"{MARK}, which replaces it: put what you want to say yourself (prices, networks) into a file of your own.\n"
    "# Rows: matmul m, n, k, precision, TFLOP/s; attention batch, heads, kv_heads, seq, head_dim, precision, TFLOP/s\n"
    "# forwards and backwards (the causal half); memory and norm bytes, GB/s; collectives operation, devices, bytes,\n"
    "# seconds; disk GB/s.\n\n"
)


def file_name(name: str) -> str:
    return (re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or "machine") + ".toml"


def is_ours(file: Path) -> bool:
    return file.read_text("utf-8", errors="replace").startswith(MARK)


def check_place(folder: Path) -> Path:
    """The folder, or what there is of its path: somebody may write there."""
    there = next(p for p in (folder, *folder.parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            return there
    except OSError as e:
        raise SetupError(
            f"{folder} cannot be written ({e.strerror}), and the result would go there; choose another --workspace "
            "or --out."
        ) from None


def check_free(file: Path, force: bool) -> None:
    """A file that somebody wrote by hand stays."""
    if file.is_dir():
        raise UsageError(f"{file} is a folder; --out takes the name of a file in it, such as {file / 'ours.toml'}.")
    if force or not file.exists() or is_ours(file):
        return
    raise UsageError(
        f"{file} was not written by `shoal bench`; give another place (--out {file.with_stem(file.stem + '-bench')}), "
        "or --force to overwrite it."
    )


def text_of(table: dict[str, Any]) -> str:
    lines = ["[[device]]"]
    lines += [f"{name} = {_value(value)}" for name, value in table.items() if not isinstance(value, Measured)]
    measured: Measured = table["measured"]
    lines.append("\n[device.measured]")
    for field in fields(Measured):
        value = getattr(measured, field.name)
        if isinstance(value, tuple) and value:
            lines.append(f"{field.name} = [\n" + "".join(f"  {_value(list(row))},\n" for row in value) + "]")
        elif value:
            lines.append(f"{field.name} = {_value(value)}")
    return _HEAD + "\n".join(lines) + "\n"


def read_back(name: str, text: str, folders: list[Path]) -> Device:
    """The device as the planner will see it."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as place:
        (Path(place) / "entry.toml").write_text(text, encoding="utf-8")
        return catalogue.find(name, [*folders, Path(place)])


def put(file: Path, text: str) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, file)
    except OSError as e:
        raise SetupError(f"{file} cannot be written ({e.strerror}); choose another --workspace or --out.") from None
    finally:
        temporary.unlink(missing_ok=True)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(name)} = {_value(inner)}" for name, inner in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float):
        return repr(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    return json.dumps(value, ensure_ascii=False)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)
