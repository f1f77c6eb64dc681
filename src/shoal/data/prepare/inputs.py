"""What the user named (files, folders, patterns, Hugging Face datasets) becomes a list of inputs in a fixed order."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.data.broken import shown, some
from shoal.errors import DataError
from shoal.plain_file import read_object
from shoal.values import items, text

Kind = Literal["text", "jsonl", "parquet", "hf-disk", "hf-stream"]
FORMATS = ("auto", "text", "jsonl", "parquet", "hf")
HUB = "hf:"

PACKINGS = {".gz": "gz", ".zst": "zst", ".zstd": "zst"}
OTHER_PACKINGS = {
    ".bz2": "bunzip2",
    ".xz": "unxz",
    ".lz4": "unlz4",
    ".zip": "unzip",
    ".7z": "7z x",
    ".tar": "tar -x",
    ".tgz": "tar -x",
}
KINDS: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
# What is taken as text when a whole folder is named; a file that is named itself is text whatever it is called.
TEXT_SUFFIXES = {".txt", ".text", ".md", ".rst", ".tex", ".htm", ".html"}
# They lie in folders of data and are about the data.
ABOUT = ("readme", "license", "licence", "notice", "changelog", "dataset_info", "dataset_dict.json", "state.json")


@dataclass(frozen=True)
class Input:
    """One file, or one split of a Hugging Face dataset."""

    path: str
    kind: Kind
    packing: str = ""  # or "gz", "zst"
    size_bytes: int = 0
    mtime_ns: int = 0
    """With the size, how a rerun knows that it is still the same file."""


def expand(
    named: Sequence[str], format: str = "auto", split: str = "train", leave_out: Path | None = None
) -> tuple[list[Input], list[str]]:
    """The inputs in the order they were named, folders sorted; and the files of folders that were passed over."""
    passed_over: list[str] = []
    inputs = [one for name in named for one in _expand(name, format, split, leave_out, passed_over)]
    seen: set[str] = set()
    for one in inputs:
        same = one.path if one.kind == "hf-stream" else os.path.realpath(one.path)
        if same in seen:
            raise DataError(f"{shown(one.path)} is named twice; name each file once (weights are set in the run file).")
        seen.add(same)
    if not inputs:
        other = f" ({len(passed_over)} files have other endings; --format text takes them all)" if passed_over else ""
        raise DataError(f"there is no text in {', '.join(map(shown, named))}{other}.")
    return inputs, passed_over


def _expand(name: str, format: str, split: str, leave_out: Path | None, passed_over: list[str]) -> Iterator[Input]:
    if name.startswith(HUB):
        local = name.removeprefix(HUB)
        if os.path.isdir(local):
            yield from _expand(local, "hf", split, leave_out, passed_over)
        else:
            yield Input(local, "hf-stream")
    elif os.path.isdir(name):
        if saved := _saved_by_datasets(Path(name), split):
            yield saved
        elif format == "hf":
            files = [p.stat() for p in Path(name).rglob("*") if p.is_file()]
            newest_ns = max((f.st_mtime_ns for f in files), default=0)
            yield Input(name, "hf-stream", "", sum(f.st_size for f in files), newest_ns)
        else:
            yield from _folder(Path(name), format, leave_out, passed_over)
    elif os.path.lexists(name):
        yield _file(Path(name), _kind(Path(name), format) or "text")
    elif glob.has_magic(name):
        found = _matches(name)
        if not found:
            raise DataError(f"no file matches {shown(name)}.")
        for path in found:
            # A pattern like **/* matches folders and also what is in them.
            if not os.path.isdir(path) or _saved_by_datasets(Path(path), split):
                yield from _expand(path, format, split, leave_out, passed_over)
    else:
        raise DataError(
            f"there is no file or folder {shown(name)} (a dataset of the Hugging Face hub is written hf:NAME)."
        )


def _matches(pattern: str) -> list[str]:
    """In order. `**` goes into no linked folder, as a folder that is named itself is not read through links either: two
    links to the folder that they are in make 2^40 ways through it."""
    if "**" not in pattern:
        return sorted(glob.glob(pattern))
    parts = Path(pattern).parts
    fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    root, rest = Path(*parts[:fixed]), "/".join(parts[fixed:])
    found = root.glob(rest + "/*" if rest.endswith("**") else rest)
    shown = [p for p in found if "/." in rest or not any(n.startswith(".") for n in p.relative_to(root).parts)]
    return sorted(map(str, shown))


def _folder(folder: Path, format: str, leave_out: Path | None, passed_over: list[str]) -> Iterator[Input]:
    out = leave_out.resolve() if leave_out else None
    files: list[Path] = []

    def unreadable(e: OSError) -> None:
        raise DataError(f"the folder {e.filename} cannot be read: {e.strerror}.")

    for parent, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = [d for d in folders if not d.startswith(".") and (Path(parent) / d).resolve() != out]
        files += [Path(parent) / n for n in names if not n.startswith(".")]
    for path in sorted(files):
        kind = None if path.name.lower().startswith(ABOUT) else _kind(path, format, in_folder=True)
        if kind is None:
            passed_over.append(str(path))
        else:
            yield _file(path, kind)


def _kind(path: Path, format: str, in_folder: bool = False) -> Kind | None:
    """By what is asked for, else by the ending; None: nothing that can be told."""
    asked: dict[str, Kind] = {"text": "text", "jsonl": "jsonl", "parquet": "parquet"}
    if format in asked:
        return asked[format]
    suffix = Path(path.stem).suffix if path.suffix.lower() in PACKINGS else path.suffix
    suffix = suffix.lower()
    if suffix in KINDS:
        return KINDS[suffix]
    return "text" if suffix in TEXT_SUFFIXES or not in_folder else None


def _file(path: Path, kind: Kind) -> Input:
    try:
        stat = path.stat()
    except OSError as e:  # a link to nowhere, a folder that may not be entered
        raise DataError(f"{shown(path)} cannot be read: {e.strerror}.") from None
    if not path.is_file():
        raise DataError(f"{shown(path)} is no regular file; write what it gives into a file first.")
    if not os.access(path, os.R_OK):
        raise DataError(f"{shown(path)} cannot be read: permission denied.")
    if kind != "parquet" and (tool := OTHER_PACKINGS.get(path.suffix.lower())):
        raise DataError(
            f"{shown(path)} is packed in a way that is not read; unpack it first ({tool}), or pack it with zstd."
        )
    packing = "" if kind == "parquet" else PACKINGS.get(path.suffix.lower(), "")
    return Input(str(path), kind, packing, stat.st_size, stat.st_mtime_ns)


def _saved_by_datasets(folder: Path, split: str) -> Input | None:
    """The folder that `datasets` wrote with save_to_disk, or the split of it that is wanted."""
    if (folder / "dataset_dict.json").is_file():
        try:
            said = read_object(folder / "dataset_dict.json").get("splits")
            splits = [text(one, 256) for one in items(said, 10_000)]
        except (OSError, ValueError):
            raise DataError(f"{folder}/dataset_dict.json is not what `datasets` writes; save it again.") from None
        if split not in splits:
            raise DataError(f"the dataset {folder} has no split '{split}'; --split names one of {some(splits)}.")
        folder = folder / split
    if not ((folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()):
        return None
    files = sorted(folder.glob("*.arrow"))
    size = sum(f.stat().st_size for f in files)
    return Input(str(folder), "hf-disk", "", size, (folder / "state.json").stat().st_mtime_ns)
