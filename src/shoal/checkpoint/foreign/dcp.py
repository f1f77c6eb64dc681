"""A checkpoint of torch's own kind (`torch.distributed.checkpoint`), opened without running anything that is in it.

Its `.metadata` is a pickle. It is read as plain data (`inert`), by the few names that torch writes;
whatever else one asks for is refused before anything happens. The tensors lie in `.distcp` files, each shard as a blob
that `torch.save` has written, which is read in the same way (`blob`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.foreign import inert
from shoal.checkpoint.foreign.blob import DTYPE_NAMES, Blob, dims, whole
from shoal.checkpoint.foreign.inert import Made, Refused
from shoal.checkpoint.grids import Dims, tiles
from shoal.checkpoint.layout import DTYPES
from shoal.errors import CheckpointError
from shoal.plain_file import NotPlain, is_plain, open_plain, read_plain
from shoal.values import BadValue, below

METADATA = ".metadata"
MOST_BYTES = 1 << 30  # of it: ten million shards
_THEIRS = "torch.distributed.checkpoint"
_NAMES = {
    *((f"{_THEIRS}.metadata", name) for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    (f"{_THEIRS}.filesystem", "_StorageInfo"), ("torch", "Size"), ("torch.serialization", "_get_layout"),
    ("torch", "complex64"), ("torch", "complex128"),  # known, so that they are refused by the name of the tensor
    ("builtins", "getattr"),  # how Python 3.11.0 writes a member of an enumeration; a record like all else
    ("collections", "OrderedDict"), ("pathlib", "PosixPath"), ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"), ("pathlib._local", "WindowsPath"),  # Python 3.13's name for the same
    *DTYPE_NAMES,
}  # fmt: skip


@dataclass(frozen=True)
class Shard:
    """A box of a tensor, as a blob in one file."""

    offset: Dims
    shape: Dims
    file: str
    at: int
    bytes: int


@dataclass(frozen=True)
class Stored:
    """One tensor."""

    dtype: str  # safetensors' name
    shape: Dims
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Dcp:
    """An opened folder: every file that it names is there, and long enough."""

    folder: Path
    tensors: dict[str, Stored]
    values: dict[str, Shard]  # what is no tensor: numbers, texts, whatever a program has put there

    def read(self, name: str, shard: Shard) -> torch.Tensor:
        """The numbers of one shard, contiguous, compared with their CRC-32 where they have one."""
        with self._blob(name, shard) as blob:
            tensor, expected = blob.tensor(), self.tensors[name].dtype
            if (tuple(tensor.shape), DTYPES[tensor.dtype]) != (shard.shape, expected):
                found = f"{DTYPES[tensor.dtype]} {list(tensor.shape)}"
                raise Refused(f"it holds {found} where {METADATA} says {expected} {list(shard.shape)}")
            return tensor

    def value(self, name: str) -> Any:
        """A number, a text, or lists and tables of them; `CheckpointError` where it is anything else."""
        with self._blob(name, self.values[name]) as blob:
            return blob.plain()

    def has_crc(self) -> bool:
        """Whether torch was told to write checksums, as it does unless told otherwise; the first shard tells."""
        for name, stored in self.tensors.items():
            for shard in stored.shards:
                with self._blob(name, shard) as blob:
                    return blob.has_crc
        return True

    @contextmanager
    def _blob(self, name: str, shard: Shard) -> Iterator[Blob]:
        try:
            with open(open_plain(self.folder / shard.file), "rb", buffering=0) as f:
                yield Blob(f.fileno(), shard.at, shard.bytes)
        except Refused as e:
            raise CheckpointError(
                f"'{name}' cannot be read from byte {shard.at:,} of {self.folder / shard.file}: {e}."
            ) from e


def is_dcp(folder: Path) -> bool:
    return (folder / METADATA).is_file()


def open_dcp(folder: Path) -> Dcp:
    """Reads `.metadata` and looks that all files are there. Nothing of the tensors is read."""
    try:
        data = read_plain(folder / METADATA, MOST_BYTES)
    except NotPlain as e:
        raise CheckpointError(f"{e}.") from None
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no {METADATA}: it is no DCP checkpoint, or one whose save never ended."
        ) from None
    try:
        tensors, values = _understood(inert.read(data, _NAMES))
    except Refused as e:
        raise CheckpointError(f"{folder / METADATA} is not read: {e}.") from e
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as e:
        raise CheckpointError(
            f"{folder / METADATA} is not that of a checkpoint as torch writes it ({type(e).__name__}: {e})."
        ) from e
    dcp = Dcp(folder, tensors, values)
    _check_files(dcp)
    return dcp


def _understood(metadata: Any) -> tuple[dict[str, Stored], dict[str, Shard]]:
    fields = _state(metadata, "Metadata")
    placed: dict[str, dict[Dims | None, tuple[str, int, int]]] = {}
    for index, info in fields["storage_data"].items():
        key, where = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
        name, offset = _text(key["fqn"]), key.get("offset")
        if where.get("transform_descriptors"):
            raise Refused(f"'{name}' was written through an extension of DCP, which Shoal does not have")
        at = (_text(where["relative_path"]), whole(where["offset"]), whole(where["length"]))
        placed.setdefault(name, {})[None if offset is None else dims(offset)] = at
    tensors, values = {}, {}
    for name, entry in fields["state_dict_metadata"].items():
        if isinstance(entry, Made) and entry.what.name == "BytesStorageMetadata":
            values[_text(name)] = Shard((), (), *placed[name][None])
        else:
            tensors[_text(name)] = _stored(name, _state(entry, "TensorStorageMetadata"), placed.get(name, {}))
    return tensors, values


def _stored(name: str, fields: Mapping[str, Any], placed: Mapping[Dims | None, tuple[str, int, int]]) -> Stored:
    shape = dims(fields["size"])
    dtype = fields["properties"].state[0]
    if (dtype.module, dtype.name) not in DTYPE_NAMES:
        raise Refused(f"'{name}' is of {dtype}, which a checkpoint of Shoal cannot hold")
    shards = []
    for chunk in fields["chunks"]:
        of = _state(chunk, "ChunkStorageMetadata")
        offset, size = dims(of["offsets"]), dims(of["sizes"])
        if math.prod(size):  # a rank that has nothing of a tensor writes an empty shard
            where = placed.get(offset) or placed.get(None)
            if where is None:
                raise Refused(f"no file holds the shard of '{name}' that begins at {list(offset)}")
            shards.append(Shard(offset, size, *where))
    if not tiles(shape, [(s.offset, s.shape) for s in shards]):
        raise Refused(f"the shards of '{name}' do not cover it exactly once")
    return Stored(DTYPE_NAMES[dtype.module, dtype.name], shape, tuple(shards))


def _check_files(dcp: Dcp) -> None:
    needed: dict[str, int] = {}
    for shard in [*dcp.values.values(), *(s for stored in dcp.tensors.values() for s in stored.shards)]:
        try:
            _beside(shard.file)
        except BadValue:
            raise CheckpointError(
                f"{dcp.folder / METADATA} names {shard.file[:80]!r}, which lies outside of its folder, or is no file's "
                "name."
            ) from None
        needed[shard.file] = max(needed.get(shard.file, 0), shard.at + shard.bytes)
    for file, count in sorted(needed.items()):
        if (dcp.folder / file).exists() and not is_plain(dcp.folder / file):
            raise CheckpointError(f"{dcp.folder / file} is no plain file: copy the whole folder again.")
        try:
            size = (dcp.folder / file).stat().st_size
        except FileNotFoundError:
            raise CheckpointError(
                f"{dcp.folder} lacks {file}, which its {METADATA} names: copy the whole folder again."
            ) from None
        if size < count:
            raise CheckpointError(
                f"{dcp.folder / file} has {size:,} bytes where its {METADATA} needs {count:,}: it was cut off, so copy "
                "it again."
            )


def _beside(file: str) -> None:
    if "/" in below(file) or len(file.encode()) > 255 or file == ".":
        raise BadValue("no name of a file")


def _state(value: Any, name: str) -> Mapping[str, Any]:
    """The attributes that an object of torch's would have."""
    if not isinstance(value, Made) or value.what.name != name or not isinstance(value.state, dict):
        raise TypeError(f"something else where a {name} should be")
    return value.state


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("something else where a text should be")
    return value
