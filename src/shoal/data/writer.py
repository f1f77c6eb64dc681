"""Writes one shard of tokens, document by document, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from shoal.data.index import PIECE_BYTES, ShardInfo, fsync_folder

Array: TypeAlias = npt.NDArray[Any]
_BUFFER_BYTES = 1 << 20


class ShardWriter:
    """Writes one shard. Its files appear, complete and on disk, when `close` returns; until then they end in `.tmp`.

    As a context manager it closes on success and removes what it wrote on an error.
    """

    def __init__(self, folder: str | os.PathLike[str], name: str, dtype: str, with_mask: bool = False) -> None:
        self.folder = Path(folder)
        self.name = name
        self.tokens = 0
        self.documents = 0
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._largest = int(np.iinfo(self._dtype).max)
        self._files = {"tokens": _Hashed(self._temporary("tokens")), "docs": _Hashed(self._temporary("docs"))}
        if with_mask:
            self._files["mask"] = _Hashed(self._temporary("mask"))
        self._with_mask = with_mask

    def add(self, token_ids: Array | Sequence[int], mask: Array | Sequence[int] | None = None) -> None:
        """One document, its end-of-document token included."""
        ids = np.asarray(token_ids)
        self.add_many(ids, np.array([ids.size]), mask)

    def add_many(self, token_ids: Array, ends: Array, mask: Array | Sequence[int] | None = None) -> None:
        """Many documents at once: their tokens laid end to end, and where each ends in that array (exclusive)."""
        ids, ends = np.asarray(token_ids), np.asarray(ends)
        if not ends.size:
            return
        if ends[-1] != ids.size or ends[0] < 1 or np.any(ends[1:] <= ends[:-1]):
            raise ValueError("document ends must rise from 1 or more to the number of tokens: no document is empty")
        if ids.dtype.kind not in "iu" or int(ids.min()) < 0 or int(ids.max()) > self._largest:
            raise ValueError(f"token ids must be integers from 0 to {self._largest}")
        if (mask is not None) != self._with_mask:
            raise ValueError("a shard has a mask for all of its documents or for none")
        bits = None if mask is None else np.asarray(mask).astype(np.uint8)
        if bits is not None and (bits.size != ids.size or bits.max() > 1):
            raise ValueError("a mask has one 0 or 1 a token")
        self._files["tokens"].write(ids.astype(self._dtype, copy=False))
        self._files["docs"].write((ends.astype(np.int64) + self.tokens).astype("<u8"))
        if bits is not None:
            self._files["mask"].write(bits)
        self.tokens += ids.size
        self.documents += ends.size

    def close(self) -> ShardInfo:
        sums = _Hashed(self._temporary("sums"))
        sums.write(np.array([s for k in ("tokens", "mask") if k in self._files for s in self._files[k].sums()], "<u8"))
        self._files["sums"] = sums
        for file in self._files.values():
            file.close()
        # .tokens comes last, so that a shard whose .tokens is there is whole even without an index.
        for suffix in reversed(self._files):
            os.replace(self._temporary(suffix), self.folder / f"{self.name}.{suffix}")
        fsync_folder(self.folder)
        mask = self._files.get("mask")
        return ShardInfo(
            name=self.name,
            tokens=self.tokens,
            documents=self.documents,
            tokens_xxh3=self._files["tokens"].hash.hexdigest(),
            docs_xxh3=self._files["docs"].hash.hexdigest(),
            mask_xxh3=None if mask is None else mask.hash.hexdigest(),
            sums_xxh3=sums.hash.hexdigest(),
            tokens_bytes=self.tokens * self._dtype.itemsize,
        )

    def abort(self) -> None:
        """Give up: nothing of this shard stays on disk."""
        for suffix, file in self._files.items():
            file.file.close()
            self._temporary(suffix).unlink(missing_ok=True)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.abort()
        elif not self._files["tokens"].file.closed:
            self.close()

    def _temporary(self, suffix: str) -> Path:
        return self.folder / f"{self.name}.{suffix}.tmp"


class _Hashed:
    """A file that knows the checksum of what was written to it, of the whole and of each piece."""

    def __init__(self, path: Path) -> None:
        self.file: BinaryIO = open(path, "wb", buffering=_BUFFER_BYTES)  # noqa: SIM115 - closed by its writer
        self.hash = xxhash.xxh3_128()
        self._piece = xxhash.xxh3_64()
        self._room = PIECE_BYTES
        self._sums: list[int] = []

    def write(self, array: Array) -> None:
        if not array.size:
            return
        data = np.ascontiguousarray(array).data.cast("B")
        self.hash.update(data)
        self.file.write(data)
        while data:
            part, data = data[: self._room], data[self._room :]
            self._piece.update(part)
            self._room -= len(part)
            if not self._room:
                self._sums.append(self._piece.intdigest())
                self._piece.reset()
                self._room = PIECE_BYTES

    def sums(self) -> list[int]:
        return self._sums + ([self._piece.intdigest()] if self._room < PIECE_BYTES else [])

    def close(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
