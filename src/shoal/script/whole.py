"""Whether a checkpoint that a script has written is whole: torch's files and safetensors, alone or in a folder.

Nothing is unpickled. A file of torch is a zip archive with a checksum for each record; of safetensors the header says
how long the file is. A folder is written file by file, so that all that is there may be whole and the rest not be there
yet: `shoal.script.finished` compares it with others.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import struct
import zipfile
import zlib
from pathlib import Path

from shoal import values
from shoal.plain_file import open_plain, read_object

MOST_HEADER = 100 << 20  # as safetensors has it
MOST_FILES = 10_000  # of a folder
MOST_WORDS = 300  # characters
MOST_PACKED = 4  # times the size of an archive, in it
_LENGTH = struct.Struct("<Q")
_OF_TORCH = (".pt", ".pth", ".bin", ".ckpt", ".tar", ".distcp")
_SAFETENSORS = ".safetensors"
STATES = (*_OF_TORCH, _SAFETENSORS)
_SHARD = re.compile(r"__(\d+)_")  # of torch.distributed.checkpoint: which rank wrote it


def problem(path: Path) -> str | None:
    """Why it cannot be gone on from, in words that follow its name; None: it is whole."""
    try:
        said = _of_folder(path) if path.is_dir() else _of_file(path)
    except (OSError, ValueError, RecursionError) as e:
        said = f"cannot be read ({getattr(e, 'strerror', None) or e})"
    return None if said is None else " ".join(said.split())[:MOST_WORDS]  # names in it may be anybody's


def _of_folder(folder: Path) -> str | None:
    known = 0
    for count, file in enumerate(sorted([folder, *itertools.islice(folder.rglob("*"), MOST_FILES + 1)])):
        if count > MOST_FILES:
            return f"holds more than {MOST_FILES:,} files"
        if any(part.startswith(".") for part in file.relative_to(folder).parts):
            continue
        if file.is_dir() and (said := _unfinished(file)) is not None:
            return f"is not whole: {said}"
        if not file.is_file():
            continue
        if file.name.endswith(".index.json"):
            said = _of_index(file)
        elif file.suffix in STATES:
            known += 1
            said = _of_file(file)
        else:
            continue
        if said is not None:
            return f"is not whole: {file.relative_to(folder)} {said}"
    return None if known else "holds no file of torch or safetensors, so nobody can tell whether it is whole"


def _unfinished(folder: Path) -> str | None:
    """Of shards of torch.distributed.checkpoint. What says where each tensor is comes last: of all, or of each rank."""
    shards = [shard.name for shard in folder.glob("*.distcp")]
    if not shards or (folder / ".metadata").is_file():
        return None
    ranks = {found[1] if (found := _SHARD.match(name)) else None for name in shards}
    if None not in ranks and all((folder / f"__{rank}.metadata").is_file() for rank in ranks):
        return None
    return f".metadata, which torch.distributed.checkpoint writes last, is not in {folder.name}"


def _of_file(file: Path) -> str | None:
    with open(open_plain(file), "rb") as f:
        begin = f.read(8)
        if file.suffix == _SAFETENSORS:
            return _of_safetensors(begin, f.read(_header_bytes(begin)), os.fstat(f.fileno()).st_size)
        f.seek(0)
        if begin[:4] != b"PK\x03\x04":
            return "is no archive of torch: it is half-written, or of a kind that cannot be verified"
        try:
            with zipfile.ZipFile(f) as archive:
                if sum(one.file_size for one in archive.infolist()) > MOST_PACKED * os.fstat(f.fileno()).st_size:
                    return "holds far more than its size: torch packs nothing, so it is none of its files"
                broken = archive.testzip()
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as e:
            return f"is half-written or damaged ({e})"
        return None if broken is None else f"is damaged (the checksum of {broken} is wrong)"


def _header_bytes(begin: bytes) -> int:
    size: int = _LENGTH.unpack(begin)[0] if len(begin) == _LENGTH.size else 0
    return size if size <= MOST_HEADER else 0


def _of_safetensors(begin: bytes, header: bytes, size: int) -> str | None:
    if not header or len(header) != _header_bytes(begin):
        return "has no whole header"
    try:
        said = values.read_object(header)
        ends = [about["data_offsets"][1] for name, about in said.items() if name != "__metadata__"]
        end = _LENGTH.size + len(header) + max([values.whole(end) for end in ends], default=0)
    except (values.BadValue, KeyError, IndexError, TypeError):
        return "has a damaged header"
    return None if end == size else f"has {size:,} bytes, and its header says {end:,}"


def _of_index(file: Path) -> str | None:
    """That all parts which it names are there; they are looked at by themselves."""
    try:
        parts = values.field(read_object(file), "weight_map", values.by_name(values.short))
    except (values.BadValue, json.JSONDecodeError) as e:
        return f"is damaged ({e})"
    missing = next((part for part in sorted(set(parts.values())) if not (file.parent / part).is_file()), None)
    return None if missing is None else f"names {missing}, which is not there"
