"""A folder as one blob: a manifest that names its files, their lengths and their blobs.

Manifests come from the network, so a path in one may not leave the folder it is unpacked into.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from shoal.errors import DataError
from shoal.net.identity import canonical
from shoal.swarm.blob_store import MOST_PIECES, PIECE, Store
from shoal.values import BadValue, items, name, read_object, text, whole

MOST_FILES = 20_000
MOST_MANIFEST = 8 << 20
_FORMAT = "shoal folder 1"


@dataclass(frozen=True)
class File:
    path: str  # with slashes, below the folder
    size: int
    blob: str


def manifest(files: list[File]) -> bytes:
    held = [[f.path, f.size, f.blob] for f in sorted(files, key=lambda f: f.path)]
    return canonical({"format": _FORMAT, "files": held})


def parse(data: bytes) -> list[File]:
    """DataError for what is no manifest, or names what lies outside."""
    try:
        held = read_object(data)
        if held.get("format") != _FORMAT:
            raise BadValue("another format")
        files = [_file(items(entry, 3)) for entry in items(held.get("files"), MOST_FILES)]
    except BadValue as e:
        raise DataError(f"a folder's manifest cannot be used ({e}); fetch it from other peers.") from None
    if len({f.path for f in files}) != len(files):
        raise DataError("a folder's manifest names a file twice; fetch it from other peers.")
    return files


def add_folder(store: Store, folder: Path, outside: bool = False) -> tuple[str, int]:
    """The manifest's name and length; the files are in the store, or (`outside`) offered from where they are."""
    files = []
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        blob, size = store.add_file(file, outside)
        files.append(File(file.relative_to(folder).as_posix(), size, blob))
    added = store.add_bytes(manifest(files))
    store.mark_folder(added[0])
    return added


def within(store: Store, name: str) -> list[File]:
    """The files of a folder whose manifest is here."""
    path = store.path(name)
    if path is None or path.stat().st_size > MOST_MANIFEST:
        return []
    return parse(path.read_bytes())


def _file(said: list[object]) -> File:
    if len(said) != 3:
        raise BadValue("a file that is none")
    path, size, blob = text(said[0], 1024), whole(said[1], MOST_PIECES * PIECE), name(said[2])
    parts = PurePosixPath(path).parts
    odd = any(p in ("", ".", "..") or "\\" in p or ":" in p or not p.isprintable() for p in parts)
    if not parts or odd or path.startswith("/") or "/".join(parts) != path:
        raise BadValue(f"a file called {path[:80]!r}")
    return File(path, size, blob)
