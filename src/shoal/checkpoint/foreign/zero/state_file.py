"""One `.pt` file of DeepSpeed's: a table of settings, names and tensors, of which only what is asked for is looked at.

Anybody's objects lie in it (a loss scale, an `argparse.Namespace`, what a program has put beside them): all of them are
records of the inert reader, none is ever made. Tensors stay in the file; some numbers of one are read at a time.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from shoal.checkpoint.foreign.blob import CRC_DIFFERS, Blob, Lies, dims
from shoal.checkpoint.foreign.inert import Anything, Global, Made, Refused
from shoal.checkpoint.grids import Dims
from shoal.checkpoint.layout import TORCH_DTYPES
from shoal.checkpoint.rows import ITEM_BYTES
from shoal.errors import CheckpointError
from shoal.plain_file import open_plain
from shoal.values import BadValue, shown

_MOST_PICKLE = 64 << 20  # bytes: 100,000 parameters on 1,000 processes take a third of it
_MOST_NAME = 1024
_CRC_BYTES = 16 << 20  # read at once
_ORDERED = Global("collections", "OrderedDict")
_PARAMETERS = (
    Global("torch._utils", "_rebuild_parameter"),
    Global("torch._utils", "_rebuild_parameter_with_state"),
)
_WITH_ATTRIBUTES = Global("torch._tensor", "_rebuild_from_type_v2")  # ZeRO 3 gives its flat groups an id
_KINDS = (Global("torch", "Tensor"), Global("torch.nn.parameter", "Parameter"))


class Numbers(Protocol):
    """Numbers in a row, wherever they lie."""

    @property
    def dtype(self) -> str: ...  # safetensors' name

    @property
    def count(self) -> int: ...

    def read(self, begin: int, count: int) -> torch.Tensor: ...  # [count]


class Part:
    """Bytes of a file that were written with one CRC-32. They are compared when the first of them are wanted."""

    def __init__(self, file: Path, at: int, size_bytes: int, crc: int | None) -> None:
        self.file, self._at, self._bytes, self._crc = file, at, size_bytes, crc

    def read(self, begin: int, size_bytes: int) -> bytearray:
        with _descriptor(self.file) as fd:
            if self._crc is not None:
                self._compare(fd)
            return _read(fd, self._at + begin, size_bytes)

    def _compare(self, fd: int) -> None:
        crc = 0
        for at in range(0, self._bytes, _CRC_BYTES):
            crc = zlib.crc32(_read(fd, self._at + at, min(_CRC_BYTES, self._bytes - at)), crc)
        if crc != self._crc:
            raise Refused(CRC_DIFFERS)
        self._crc = None


class Stored:
    """The numbers of one tensor in a file."""

    def __init__(self, lies: Lies, part: Part) -> None:
        self.shape, self.dtype, self.file = lies.shape, lies.dtype, part.file
        self.count = math.prod(lies.shape)
        self._first, self._part = lies.first, part

    def read(self, begin: int, count: int) -> torch.Tensor:
        kind, item = TORCH_DTYPES[self.dtype], ITEM_BYTES[self.dtype]
        if not count:
            return torch.empty(0, dtype=kind)
        return torch.frombuffer(self._part.read((self._first + begin) * item, count * item), dtype=kind)


class StateFile:
    """One that is open. What is wrong with it is `Refused`, half a sentence, to which `opened` adds the file."""

    def __init__(self, file: Path, blob: Blob, size_bytes: int) -> None:
        self.file, self.bytes, self.value = file, size_bytes, blob.value
        self._blob = blob
        self._parts: dict[int, Part] = {}

    def tensor(self, value: Any) -> Stored:
        """Where a tensor of its value lies; its numbers are not looked at."""
        lies = self._blob.lies(_plain(value))
        if lies.at not in self._parts:
            self._parts[lies.at] = Part(self.file, lies.at, lies.bytes, lies.crc)
        return Stored(lies, self._parts[lies.at])


@contextmanager
def opened(file: Path) -> Iterator[StateFile]:
    """Reads its pickle."""
    with _descriptor(file) as fd:
        size_bytes = os.fstat(fd).st_size
        yield StateFile(file, Blob(fd, 0, size_bytes, Anything(), _MOST_PICKLE), size_bytes)


@contextmanager
def about(where: Path) -> Iterator[None]:
    """Whatever is refused within is told with the file or the folder that it is about."""
    try:
        yield
    except OSError as e:
        raise CheckpointError(f"{where} cannot be read ({e.strerror or e}): copy the whole folder again.") from None
    except (Refused, BadValue) as e:
        raise CheckpointError(f"{where} is not read: {e}.") from None


@contextmanager
def _descriptor(file: Path) -> Iterator[int]:
    with about(file):
        fd = open_plain(file)
        try:
            yield fd
        finally:
            os.close(fd)


def table(value: Any, what: str) -> dict[str, Any]:
    """Of names; an OrderedDict is one too."""
    if isinstance(value, Made) and value.what == _ORDERED and not value.args:
        value = value.items
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise Refused(f"its {what} is no table of names")
    if any(not 0 < len(name) <= _MOST_NAME for name in value):
        raise Refused(f"its {what} has a name of more than {_MOST_NAME} characters, or of none")
    return value


def listed(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise Refused(f"its {what} is no list")
    return list(value)


def shape_of(value: Any, what: str) -> Dims:
    try:
        return dims(value)
    except (ValueError, TypeError):
        raise Refused(f"the shape of {shown(what)} is none") from None


def _plain(value: Any) -> Any:
    """The tensor of a parameter, and of one with attributes of its own."""
    if isinstance(value, Made) and value.what in _PARAMETERS and value.args:
        return value.args[0]
    if isinstance(value, Made) and value.what == _WITH_ATTRIBUTES and len(value.args) == 4:
        function, kind, args, _ = value.args
        if kind in _KINDS and isinstance(function, Global) and isinstance(args, tuple):
            return _plain(Made(function, args))
    return value


def _read(fd: int, at: int, count: int) -> bytearray:
    data = bytearray(count)
    done = 0
    while done < count:
        n = os.preadv(fd, [memoryview(data)[done:]], at + done)
        if not n:
            raise Refused("it ends too early")
        done += n
    return data
