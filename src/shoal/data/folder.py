"""What a folder of shards is to its readers, wherever its files are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.data.index import Index, ShardInfo
from shoal.errors import DataError

Array: TypeAlias = npt.NDArray[Any]


class Sliced(Protocol):
    """An array that is read by slices: a file on this machine, or pieces of an object. What a slice returns has been
    compared with the checksums of the data set, at the latest when this process first touched it."""

    def __getitem__(self, part: slice, /) -> Array: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Shard:
    """One open shard. Nothing is read until it is touched."""

    tokens: Sliced  # uint16 or uint32 [tokens]
    ends: Array  # int64 [documents]
    mask: Sliced | None  # uint8 [tokens]


class Folder(Protocol):
    """Where the files of a data set are: `shoal.data.local_folder`, or an object store (`shoal.data.remote`)."""

    where: str

    def read(self, name: str) -> bytes:
        """A small file, whole: the index, the tokenizer."""
        ...

    def holds(self, index: Index) -> None:
        """This is in it: to be known before the first shard is opened."""
        ...

    def look(self, index: Index) -> None:
        """That all files are there and as long as the index says, as far as that costs little."""
        ...

    def open(self, shard: ShardInfo) -> Shard: ...

    def want(self, spans: Callable[[], Sequence[tuple[ShardInfo, int, int]]]) -> None:
        """These tokens [lo, hi) of shards are read next: a chance to fetch them all at once."""
        ...


def first_beyond(ids: Array, vocab_size: int) -> int | None:
    """The place of the first id that is none; None where all are. A checksum says nothing about that, and on a device
    an id that is none ends the process in the midst of a kernel."""
    if vocab_size > np.iinfo(ids.dtype).max or not len(ids) or int(ids.max()) < vocab_size:
        return None
    return int(np.argmax(ids >= vocab_size))


def no_such_id(where: str, ids: Array, at: int, begin: int, vocab_size: int) -> DataError:
    return DataError(
        f"{where} has the id {int(ids[at])} at token {begin + at:,}, outside the vocabulary of {vocab_size}: it was "
        "written with another tokenizer, so prepare the data set again."
    )


def check_ends(where: str, ends: Array, tokens: int) -> None:
    """A checksum says that nothing has changed, not that it was right: places outside the shard would be written to."""
    if ends[-1] != tokens or ends[0] < 1 or bool(np.any(ends[1:] <= ends[:-1])):
        raise DataError(f"{where} does not cut the tokens into documents; prepare the data set again.")
