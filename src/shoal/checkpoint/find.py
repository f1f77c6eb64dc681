"""Finds the checkpoints under a root and tells the good ones from the bad ones. No torch here.

The newest good checkpoint is derived from what is on disk, each time. There is no pointer that could dangle.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.checkpoint.files import digest_of
from shoal.checkpoint.manifest import MANIFEST, Corrupt, Manifest, Slice, decode
from shoal.errors import CheckpointError

PUBLISHED = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that was passed over, and why: for the journal."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path.name}: {self.reason}"


@dataclass(frozen=True)
class Found:
    """A checkpoint that is complete: every file is there, has its size and its header."""

    path: Path
    manifest: Manifest
    skipped: tuple[Skipped, ...] = ()  # newer ones that are bad

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def extra(self) -> dict[str, Any]:
        return self.manifest.extra

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.manifest.files.values())


def folder_of(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def published(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) of everything that was published, good or bad, newest first."""
    return sorted(matching(root, PUBLISHED), reverse=True)


def open_checkpoint(path: Path) -> Found:
    """The cheap check, else `Corrupt`: a whole manifest that fits its folder, every file with its size and header."""
    try:
        manifest = decode((path / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise Corrupt("it has no manifest.json (half-published, or partly deleted)") from None
    except OSError as e:
        raise Corrupt(f"its manifest.json cannot be read ({e.strerror})") from e
    named = PUBLISHED.fullmatch(path.name)
    if named and int(named[1]) != manifest.step:
        raise Corrupt(f"its manifest.json is that of step {manifest.step}")
    for name in manifest.files:
        _check_header(path, manifest, name)
    return Found(path, manifest)


def newest(root: Path, verify: bool = False, before: int | None = None) -> Found | None:
    """The newest good checkpoint (of a step lower than `before`); what is bad and newer is in its `skipped`.

    None when nothing was ever published. When all there is is bad, that is a `CheckpointError`: a run with a history is
    not quietly started from scratch. `verify` reads everything and compares all checksums; loading does so anyway.
    """
    found, skipped = scan(root, verify, before)
    if found is None and skipped:
        raise none_is_good(root, skipped)
    return found


def scan(root: Path, verify: bool = False, before: int | None = None) -> tuple[Found | None, list[Skipped]]:
    """Like `newest`, but what is bad is always returned, too."""
    skipped: list[Skipped] = []
    for step, path in published(root):
        if before is not None and step >= before:
            continue
        try:
            found = open_checkpoint(path)
            if verify and (wrong := damage(found)):
                raise Corrupt(wrong[0])
        except Corrupt as e:
            skipped.append(Skipped(path, str(e)))
            continue
        except CheckpointError as e:
            raise CheckpointError(f"{path} cannot be read: {e}.") from e
        return replace(found, skipped=tuple(skipped)), skipped
    return None, skipped


def none_is_good(root: Path, skipped: Collection[Skipped]) -> CheckpointError:
    reasons = "; ".join(map(str, skipped))
    return CheckpointError(
        f"no checkpoint in {root} can be used ({reasons}): restore one from a copy, "
        "or remove them and start again under another name."
    )


def damage(
    found: Found, files: Collection[str] | None = None, on_bytes: Callable[[int], None] = lambda n: None
) -> list[str]:
    """Reads the files (all unless told) and says what is wrong with them, a sentence for each damaged file or slice.

    `on_bytes` hears how much was read, for a progress bar.
    """
    wrong: list[str] = []
    slices = _slices_by_file(found.manifest)
    for name in found.manifest.files if files is None else files:
        try:
            _check_header(found.path, found.manifest, name)
            wrong += _damaged_slices(found.path, name, slices[name], on_bytes)
        except Corrupt as e:
            wrong.append(str(e))
    return wrong


def verify(found: Found) -> None:
    """Every byte against its checksum; `Corrupt`, which names the file, at the first that differs."""
    if wrong := damage(found):
        raise Corrupt(f"checkpoint {found.path} is damaged: {wrong[0]}.")


def matching(root: Path, pattern: re.Pattern[str]) -> Iterator[tuple[int, Path]]:
    """(the number in the name, folder) of the folders whose name matches; none when there is no root yet."""
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                if (match := pattern.fullmatch(entry.name)) and entry.is_dir():
                    yield int(match[1]), Path(entry.path)
    except FileNotFoundError:
        return


def mismatch(file: str, tensor: str) -> str:
    return f"the bytes of '{tensor}' in {file} are not those that were written (their checksum does not match)"


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A file descriptor to read from; what the system refuses is `Corrupt`, with the name of the file."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        raise Corrupt(f"{path.name} is missing") from None
    except OSError as e:
        raise Corrupt(f"{path.name} cannot be read ({e.strerror})") from e
    try:
        yield fd
    except OSError as e:  # a disk that fails while it is read
        raise Corrupt(f"{path.name} cannot be read ({e.strerror})") from e
    finally:
        os.close(fd)


def _check_header(folder: Path, manifest: Manifest, name: str) -> None:
    file = manifest.files[name]
    with opened(folder / name) as fd:
        size = os.fstat(fd).st_size
        if size != file.bytes:
            raise Corrupt(f"{name} has {size} bytes where {file.bytes} were written")
        if digest_of(fd, 0, file.header_bytes) != file.header_xxh3_128:
            raise Corrupt(f"{name} has another header than was written (damaged, or a file from elsewhere)")


def _damaged_slices(
    folder: Path, name: str, slices: Sequence[tuple[str, int, Slice]], on_bytes: Callable[[int], None]
) -> Iterator[str]:
    with opened(folder / name) as fd:
        for tensor, count, s in slices:
            on_bytes(count)
            if digest_of(fd, s.at, count) != s.xxh3_128:
                yield mismatch(name, tensor)


def _slices_by_file(manifest: Manifest) -> dict[str, list[tuple[str, int, Slice]]]:
    """file → (tensor, bytes, slice), in the order of the file."""
    table: dict[str, list[tuple[str, int, Slice]]] = {name: [] for name in manifest.files}
    for tensor, entry in manifest.tensors.items():
        for s in entry.slices:
            table[s.file].append((tensor, math.prod(s.shape) * entry.item_bytes, s))
    for slices in table.values():
        slices.sort(key=lambda item: item[2].at)
    return table
