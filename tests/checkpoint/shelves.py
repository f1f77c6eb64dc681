"""The bytes of a store seen from outside, and a history of checkpoints to lay out there and to damage.

The history is written by real saves of two ranks. Term 1 saved 10, 20 and 30; term 2 went on from 30 and saved 40, 50
and 55. A zombie of term 1 published its own 40 and 60 after term 2 had begun, whole and recorded. 55 is damaged and
quarantined. So the newest good one is 50 of term 2, and everything above it must stay unseen.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from tests.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shoal import checkpoint
from shoal.checkpoint import Name, ledger
from shoal.checkpoint.store import Folder, Store, store_of
from shoal.parallel import agree

GOOD = [Name(50, 2), Name(40, 2), Name(30, 1), Name(20, 1), Name(10, 1)]  # newest first
ZOMBIES = [Name(40, 1), Name(60, 1)]
KNOWN_BAD = Name(55, 2)
WORLD = 2
BLOCK = 4096  # what a disk writes at once
Tensors = dict[str, torch.Tensor]


class Shelf(Protocol):
    """Named bytes, read and written behind the back of the code under test."""

    on_disk: bool

    @property
    def store(self) -> Store: ...
    def names(self) -> list[str]: ...
    def read(self, name: str) -> bytes: ...
    def write(self, name: str, data: bytes) -> None: ...
    def delete(self, name: str) -> None: ...

    def lay(self, pristine: dict[str, bytes]) -> None:
        """Exactly these are there afterwards."""
        ...


class Disk:
    on_disk = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = Folder(root)

    def names(self) -> list[str]:
        return sorted(str(p.relative_to(self.root)) for p in self.root.rglob("*") if p.is_symlink() or not p.is_dir())

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_bytes(data)

    def delete(self, name: str) -> None:
        (self.root / name).unlink()
        if not os.listdir((self.root / name).parent):
            (self.root / name).parent.rmdir()

    def lay(self, pristine: dict[str, bytes]) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        for name, data in pristine.items():
            self.write(name, data)


class InBucket:
    """Through boto3, where the code under test uses another client."""

    on_disk = False

    def __init__(self, client: Any, url: str) -> None:
        self._client = client
        self._bucket, _, self._prefix = url.removeprefix("s3://").partition("/")
        self.store = store_of(url)
        self._touched: set[str] = set()

    def names(self) -> list[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=f"{self._prefix}/")
        keys = [item["Key"] for page in pages for item in page.get("Contents", [])]
        return sorted(key.removeprefix(f"{self._prefix}/") for key in keys)

    def read(self, name: str) -> bytes:
        return bytes(self._client.get_object(Bucket=self._bucket, Key=f"{self._prefix}/{name}")["Body"].read())

    def write(self, name: str, data: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=f"{self._prefix}/{name}", Body=data)
        self._touched.add(name)

    def delete(self, name: str) -> None:
        self._client.delete_object(Bucket=self._bucket, Key=f"{self._prefix}/{name}")
        self._touched.add(name)

    def lay(self, pristine: dict[str, bytes]) -> None:
        there = set(self.names())
        for name in there - pristine.keys():
            self.delete(name)
        for name in pristine.keys() - (there - self._touched):
            self.write(name, pristine[name])
        self._touched.clear()


@dataclass(frozen=True)
class History:
    pristine: dict[str, bytes]  # what is laid out
    foreign: dict[str, bytes]  # the newest checkpoint of another run, under the same names
    spare: dict[str, bytes]  # zombies' checkpoints that are not laid out: steps 70 and 80 of term 1
    salt: int = 0

    def truth(self, name: Name) -> Tensors:
        return state(name, self.salt)


def state(name: Name, salt: int = 0) -> Tensors:
    """What is saved under a name: numbers that no other name has."""
    rng = torch.Generator().manual_seed((name.step * 100 + name.term) * 100 + salt)
    return {
        "model.embed": torch.randn(96, 64, generator=rng),
        "model.w": torch.randn(64, 48, generator=rng),
        "model.b": torch.randn(7, generator=rng).bfloat16(),
        "optim.w.exp_avg": torch.randn(64, 48, generator=rng),
        "count": torch.tensor(name.step),
    }


def empty() -> Tensors:
    return {name: torch.zeros_like(tensor) for name, tensor in state(Name(0, 0)).items()}


def sharded(tensors: Tensors) -> Tensors:
    """As two ranks hold them: matrices cut by rows, the rest on both."""
    mesh = init_device_mesh("cpu", (WORLD,))
    return {n: distribute_tensor(t, mesh, [Shard(0)]) if t.ndim == 2 else t for n, t in tensors.items()}


def write_history(root: str | Path, salt: int = 0) -> None:
    """By real saves of two ranks, into a folder or a bucket."""

    def work(rank: int, world: int) -> None:
        store = store_of(root)

        def claim(from_step: int) -> int:
            return agree.from_rank_0(ledger.claim([store], from_step) if rank == 0 else 0)

        def save(name: Name) -> None:
            checkpoint.save(store, name.step, sharded(state(name, salt)), about(name), name.term, piece_bytes=8192)

        assert claim(-1) == 1
        for name in reversed(GOOD[2:]):
            save(name)
        assert claim(30) == 2
        for name in (*reversed(GOOD[:2]), KNOWN_BAD):
            save(name)
        ledger.check_term = lambda store, term: None  # a zombie that has looked just before term 2 began
        for name in (*ZOMBIES, Name(70, 1), Name(80, 1)):
            save(name)

    run_ranks(work, WORLD)


def about(name: Name) -> dict[str, Any]:
    return {"step": name.step, "term": name.term}


def make_history(scratch: Path) -> History:
    write_history(scratch / "run")
    write_history(scratch / "another run", salt=1)
    return taken_from(Disk(scratch / "run"), Disk(scratch / "another run"))


def taken_from(shelf: Shelf, other: Shelf) -> History:
    bad = f"{KNOWN_BAD}/rank-00000.safetensors"
    shelf.write(bad, flipped(shelf.read(bad), 8 * len(shelf.read(bad)) - 1))
    ledger.quarantine(shelf.store, KNOWN_BAD, "the reason of then")
    spare = [n for n in shelf.names() if "step-00000070" in n or "step-00000080" in n]
    return History(
        pristine={name: shelf.read(name) for name in shelf.names() if name not in spare},
        foreign={name: other.read(name) for name in other.names() if name.startswith(f"{GOOD[0]}/")},
        spare={name: shelf.read(name) for name in spare},
    )


def files_of(pristine: dict[str, bytes], name: Name) -> list[str]:
    return sorted(file for file in pristine if file.startswith(f"{name}/"))


def flipped(data: bytes, bit: int) -> bytes:
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


def some(rng: random.Random, below: int) -> int:
    """A number from 1 to `below`, small ones as likely as large ones."""
    return min(below, 1 + int(below ** rng.random()))


if __name__ == "__main__":  # a process of its own: what talks to a bucket must not have been forked
    for salt, url in enumerate(sys.argv[1:]):
        write_history(url, salt)
