"""What `torch.save` writes, read without torch's unpickler: a zip file of a pickle and of the bytes of tensors.

None of it is compressed. Each part has a CRC-32, which torch writes and does not look at when it loads (measured: one
flipped bit, one weight 1.0 → 1.0078, without a word); here it is compared.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch

from shoal import values
from shoal.checkpoint.foreign import inert
from shoal.checkpoint.foreign.inert import Global, Made, Persistent, Refused
from shoal.checkpoint.grids import Dims
from shoal.checkpoint.layout import DTYPES, TORCH_DTYPES
from shoal.checkpoint.rows import ITEM_BYTES

# ("torch", "float32") → "F32", and the same for the classes that torch names the bytes of a tensor by
DTYPE_NAMES = {("torch", str(dtype).removeprefix("torch.")): name for dtype, name in DTYPES.items()}
_STORAGES = {
    ("torch", f"{kind}Storage"): DTYPES[dtype]
    for kind, dtype in {
        "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
        "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
        "Bool": torch.bool,
    }.items()
}  # fmt: skip
_REBUILD = ("_rebuild_tensor_v2", "_rebuild_tensor_v3")
_NAMES = {
    *(("torch._utils", name) for name in _REBUILD), ("torch", "Size"),
    ("torch.storage", "UntypedStorage"), ("collections", "OrderedDict"), *_STORAGES, *DTYPE_NAMES,
}  # fmt: skip
MOST_DIMS = 64
CRC_DIFFERS = "its bytes are not those that were written (their CRC-32 does not match)"
MOST_PICKLE = 1 << 30  # bytes
_MOST_NODES = 10_000  # of a plain value: a pickle can name one list a thousand times, in a thousand lists
_DAMAGED = (
    zipfile.BadZipFile, EOFError, AttributeError, KeyError, TypeError, ValueError, OverflowError, NotImplementedError,
    RecursionError, struct.error,
)  # fmt: skip


@dataclass(frozen=True)
class Lies:
    """Where the numbers of a tensor are, one after the other: `first` of those of a part, which is bytes of a file."""

    dtype: str
    shape: Dims
    first: int
    at: int  # of the part, in the file
    bytes: int
    crc: int | None  # None: it was written without


class Blob:
    """One of them, somewhere in a file. What is wrong with it is `Refused`, half a sentence. `names`: what its pickle
    may name; more than those of tensors where somebody's settings lie beside them."""

    def __init__(
        self, fd: int, at: int, size_bytes: int, names: Container[tuple[str, str]] = _NAMES, most: int = MOST_PICKLE
    ) -> None:
        self._window = _Window(fd, at, size_bytes)
        try:
            with zipfile.ZipFile(self._window) as archive:
                self._entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            # With `torch.serialization.set_crc32_options(False)` all are zero; that of the pickle never is by chance.
            self.has_crc = self._entries["data.pkl"].CRC != 0
            if "byteorder" in self._entries and self._bytes("byteorder") != b"little":
                raise Refused("its numbers are big-endian")
            if self._entries["data.pkl"].file_size > most:
                raise Refused(f"its pickle has more than {most:,} bytes, which is no checkpoint's")
            self.value = inert.read(bytes(self._bytes("data.pkl")), names)
        except _DAMAGED as e:
            raise Refused(f"it is damaged, or not what torch.save writes ({type(e).__name__})") from e

    def tensor(self) -> torch.Tensor:
        """The one that it holds, contiguous."""
        try:
            return self._tensor(self.value)
        except _DAMAGED as e:
            raise Refused(f"it holds something else than a plain tensor ({type(e).__name__})") from e

    def table(self) -> dict[str, tuple[torch.dtype, Dims]]:
        """Names of tensors, as a state dict is saved, with what each is; no bytes are read."""
        try:
            return {name: self._described(value) for name, value in self._items().items()}
        except _DAMAGED as e:
            raise Refused(f"it holds something else than a table of tensors ({type(e).__name__})") from e

    def of_table(self, name: str) -> torch.Tensor:
        """One of them, contiguous. Tensors that share their bytes (tied weights) are read one by one."""
        try:
            return self._tensor(self._items()[name], shared=True)
        except _DAMAGED as e:
            raise Refused(f"it is no plain tensor ({type(e).__name__})") from e

    def _items(self) -> dict[str, Any]:
        value = self.value
        if isinstance(value, Made) and value.what == Global("collections", "OrderedDict") and not value.args:
            value = value.items
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise Refused("it holds something else than a table of tensors")
        return value

    def _described(self, value: Any) -> tuple[torch.dtype, Dims]:
        if not isinstance(value, Made) or value.what.name != "_rebuild_tensor_v2":
            raise Refused("it holds something else than plain tensors")
        storage, _, size, *_ = value.args
        return TORCH_DTYPES[_STORAGES[storage.key[1].module, storage.key[1].name]], dims(size)

    def plain(self) -> Any:
        """What it holds, if that is numbers, texts, and lists and tables of them. Tensors become lists."""
        left = _MOST_NODES

        def convert(value: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Refused("it holds a value of too many parts")
            if value is None or isinstance(value, bool | int | float | str):
                return value
            if isinstance(value, list | tuple):
                return [convert(v) for v in value]
            if isinstance(value, dict) and all(isinstance(key, str | int) for key in value):
                return {str(key): convert(v) for key, v in value.items()}
            if isinstance(value, Made) and value.what == Global("collections", "OrderedDict") and not value.args:
                return convert(value.items)
            return convert(self._tensor(value).tolist())

        try:
            return convert(self.value)
        except _DAMAGED as e:
            raise Refused(f"it holds no plain value ({type(e).__name__})") from e

    def _tensor(self, value: Any, shared: bool = False) -> torch.Tensor:
        if not isinstance(value, Made) or not value.what.name.startswith("_rebuild_tensor_v"):
            raise Refused("it holds something else than a plain tensor")
        key, dtype, size, stride, first = self._laid(value)
        count = self._entries[key].file_size // ITEM_BYTES[dtype]
        last = first + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        # DCP writes no bytes that are not the tensor's; strides are those of a transposed one at most.
        fits = math.prod(size) <= count if shared else math.prod(size) == count
        if not fits or min([first, *stride]) < 0 or (count and math.prod(size) and last >= count):
            raise Refused("its tensor does not fit its bytes")
        numbers = torch.frombuffer(self._bytes(key), dtype=TORCH_DTYPES[dtype]) if count else torch.empty(0)
        return numbers.to(TORCH_DTYPES[dtype]).as_strided(size, stride, first).contiguous()

    def lies(self, value: Any) -> Lies:
        """Where a tensor of its value is, so that some of its numbers can be read. They are not looked at."""
        try:
            if not isinstance(value, Made) or value.what.module != "torch._utils" or value.what.name not in _REBUILD:
                raise Refused("it holds something else where a tensor should be")
            key, dtype, size, stride, first = self._laid(value)
            at, length = self._where(key)
            step = 1
            for n, said in zip(reversed(size), reversed(stride), strict=True):
                if n > 1 and said != step:
                    raise Refused("a tensor's numbers do not follow each other")
                step *= max(n, 1)
            if (first + math.prod(size)) * ITEM_BYTES[dtype] > length:
                raise Refused("a tensor does not fit its bytes")
            return Lies(dtype, size, first, at, length, self._entries[key].CRC if self.has_crc else None)
        except _DAMAGED as e:
            raise Refused(f"it holds something else where a tensor should be ({type(e).__name__})") from e

    def _laid(self, value: Made) -> tuple[str, str, Dims, Dims, int]:
        """What a tensor says of itself: its bytes' name, dtype, shape, strides and first number."""
        storage, first, size, stride, _, hooks, *rest = value.args
        dtype = None
        if value.what.name == "_rebuild_tensor_v3":
            of, *rest = rest
            dtype = DTYPE_NAMES[of.module, of.name]
        if any(rest) or not isinstance(hooks, Made) or hooks.items or not isinstance(storage, Persistent):
            raise Refused("it holds a tensor with hooks, or with conjugated or negated bits")
        _, kind, key, _, _ = storage.key
        return f"data/{key}", dtype or _STORAGES[kind.module, kind.name], dims(size), dims(stride), whole(first)

    def _bytes(self, name: str) -> bytearray:
        data = self._window.bytes(*self._where(name))
        if self.has_crc and zlib.crc32(data) != self._entries[name].CRC:
            raise Refused(CRC_DIFFERS)
        return data

    def _where(self, name: str) -> tuple[int, int]:
        info = self._entries[name]
        if info.compress_type != zipfile.ZIP_STORED or info.file_size > self._window.size:
            raise Refused("it is compressed, or shorter than it says")
        head = self._window.bytes(info.header_offset, 30)
        of_name, of_extra = struct.unpack("<HH", head[26:])
        return info.header_offset + 30 + of_name + of_extra, info.file_size


class _Window(io.RawIOBase):
    """Some bytes of a file, as a file."""

    def __init__(self, fd: int, begin: int, size: int) -> None:
        self.fd, self.begin, self.size = fd, begin, size
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence])
        return self._at

    def readinto(self, into: Any) -> int:
        view = memoryview(into)[: max(0, self.size - self._at)]
        n = os.preadv(self.fd, [view], self.begin + self._at) if view.nbytes else 0
        self._at += n
        return n

    def bytes(self, at: int, count: int) -> bytearray:
        data = bytearray(count)
        self.seek(at)
        done = 0
        while done < count:
            n = self.readinto(memoryview(data)[done:])
            if not n:
                raise EOFError
            done += n
        return data


def dims(value: Any) -> Dims:
    """A torch.Size, or the tuple it is made of."""
    if isinstance(value, Made):
        (value,) = value.args
    return tuple(values.each(values.whole, MOST_DIMS)(value))


def whole(value: Any) -> int:
    return values.whole(value)
