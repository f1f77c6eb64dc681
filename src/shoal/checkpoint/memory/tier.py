"""The memory tier: what the nodes of a run hold in RAM, as a store that one can restore from. No torch here.

Each node's ranks leave their newest snapshots in a folder of its memory, and send a copy to the next node: when a node
is lost, no step is. A checkpoint is listed when the parts of all its ranks can be had from somewhere, and put together
when it is asked for. What is read is checked like any checkpoint; what cannot be read is passed over, and the next tier
is used. `shoal.checkpoint.memory.keeper` serves the other nodes' memory.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from shoal import values
from shoal.checkpoint import ledger
from shoal.checkpoint.manifest import Corrupt, encode
from shoal.checkpoint.memory.generations import Generation, Here, open_folder, read_extra, remember, room_bytes, settle
from shoal.checkpoint.memory.ram import Hold, forget, hold, memory_folder, sweep
from shoal.checkpoint.names import MANIFEST, RANK_FILE, Name, rank_file
from shoal.checkpoint.part import Part, decode_part
from shoal.checkpoint.publish import manifest_of
from shoal.checkpoint.store import Store
from shoal.errors import CheckpointError

__all__ = [
    "Hold", "Memory", "forget", "hold", "memory_folder", "open_folder", "remember", "room_bytes", "settle", "sweep",
]  # fmt: skip

_AT_ONCE = 8
Taken = TypeVar("Taken")
Names = list[str]


class Source(Protocol):
    """One node's memory: `Here`, or the `Peer` that asks its keeper."""

    @property
    def where(self) -> str: ...
    def kept(self) -> dict[Name, Generation]: ...
    def part(self, name: Name, rank: int) -> bytes: ...
    def extra(self, name: Name) -> bytes: ...
    def read_into(self, name: Name, rank: int, at: int, into: memoryview) -> None: ...


@dataclass(frozen=True)
class _Spread:
    """A generation over all nodes: who has which rank's file."""

    ranks: dict[int, list[Source]]
    bytes: dict[int, int]
    extra: list[Source]


class Memory:
    """The read side of a store; what it cannot do raises.

    `folder` is this node's, `peers` are the other nodes'. `durable` are the stores whose ledgers say which terms there
    have been: what an earlier life of a run of the same name has left in memory is none of this run's.
    """

    readers = 4
    compares = False

    def __init__(
        self,
        folder: Path,
        peers: Sequence[Source],
        durable: Sequence[Store],
        second: bool = False,
        address: str = "",
    ) -> None:
        """`address` is that of this node's own keeper, by which the other nodes know it."""
        self._sources: list[Source] = [Here(folder), *peers]
        self._addresses = [address, *(getattr(peer, "address", "") for peer in peers)]
        self._durable = durable
        self._second = second
        self._seen: dict[Name, _Spread] = {}

    @classmethod
    def tiers(cls, folder: Path, peers: Sequence[Source], durable: Sequence[Store], address: str = "") -> list[Memory]:
        """Twice: the second reads the other copy of everything, should one be damaged."""
        return [cls(folder, peers, durable, second, address) for second in (False, True)]

    @property
    def where(self) -> str:
        return "memory (second copies)" if self._second else "memory"

    def __repr__(self) -> str:
        return f"Memory({', '.join(source.where for source in self._sources)})"

    def list(self, folder: str = "") -> list[str]:
        if folder:
            return self._files(folder)
        self._look()
        terms = {claim.term for store in self._durable for claim in ledger.read(store).claims}
        return [str(name) for name in self._seen if name.term in terms and self._whole(name)]

    def sizes(self, folder: str) -> dict[str, int]:
        try:
            _, spread = self._spread(folder)
        except FileNotFoundError:
            return {}
        return {rank_file(rank): size for rank, size in spread.bytes.items()}

    def size(self, name: str) -> int:
        _, spread, rank = self._file(name)
        return spread.bytes[rank]

    def read(self, name: str) -> bytes:
        if name.endswith(f"/{MANIFEST}"):
            return self._manifest(name.removesuffix(f"/{MANIFEST}"))
        data = bytearray(self.size(name))
        self.read_into(name, 0, memoryview(data))
        return bytes(data)

    def read_into(self, name: str, at: int, into: memoryview) -> None:
        of, spread, rank = self._file(name)
        _first(spread.ranks[rank], lambda source: source.read_into(of, rank, at, into))

    def put(self, name: str, data: bytes) -> None:
        raise _read_only()

    def write(self, name: str, chunks: Iterable[memoryview]) -> None:
        raise _read_only()

    def staging(self, name: str) -> str:
        return name  # what has no manifest any more has been replaced by a newer one, which is no damage

    def publish(self, name: str) -> None:
        raise _read_only()

    def remove(self, name: str) -> None:
        raise _read_only()

    def sweep(self) -> None:
        raise _read_only()

    # Between ranks

    def tell(self, name: Name) -> str:
        """Who has what of a checkpoint, for `hear` on another rank: one rank asks the keepers, not each of a thousand
        ranks each of a hundred keepers. Nothing where a node has no address."""
        if len(self._addresses) > 1 and "" in self._addresses:
            return ""
        spread = self._seen[name]
        where = {source: i for i, source in enumerate(self._sources)}
        ranks = [(rank, spread.bytes[rank], [where[s] for s in sources]) for rank, sources in spread.ranks.items()]
        return json.dumps({"addresses": self._addresses, "ranks": ranks})

    def hear(self, name: Name, said: str) -> None:
        """What `tell` said on rank 0; where it said nothing, this rank looks by itself. FileNotFoundError where
        something is out of this node's reach."""
        if not said:
            self._look()
            if name not in self._seen or not self._whole(name):
                raise FileNotFoundError(errno.ENOENT, "it is in memory no more", str(name))
            return
        try:
            self._heard(name, values.read_object(said.encode()))
        except values.BadValue as e:
            raise FileNotFoundError(errno.ENOENT, f"what is said of it cannot be understood ({e})", str(name)) from None

    def _heard(self, name: Name, fields: dict[str, Any]) -> None:
        mine = dict(zip(self._addresses, self._sources, strict=True))
        sources = [mine.get(address) for address in values.field(fields, "addresses", values.each(values.short))]
        holder = values.each(lambda i: values.whole(i, len(sources) - 1))
        spread = _Spread({}, {}, [])
        for told in values.field(fields, "ranks", values.each(_three)):
            rank, size, holders = values.whole(told[0]), values.whole(told[1]), holder(told[2])
            reached = [source for i in holders if (source := sources[i]) is not None]
            if not reached:
                raise FileNotFoundError(errno.ENOENT, f"{rank_file(rank)} is in no memory that this node knows")
            # Its own memory is the nearest, and has been tried when second copies are asked for.
            reached.sort(key=lambda source: (source is self._sources[0]) == self._second)
            spread.ranks[rank], spread.bytes[rank] = reached, size
        self._seen[name] = spread

    # What there is

    def _look(self) -> None:
        """Asks all nodes at once. One that does not answer is lost, and what it had may be with another."""

        def ask(source: Source) -> dict[Name, Generation]:
            with contextlib.suppress(OSError):
                return source.kept()
            return {}

        with ThreadPoolExecutor(min(32, len(self._sources)), "shoal-memory") as pool:
            answers = list(zip(self._sources, pool.map(ask, self._sources), strict=True))
        seen: dict[Name, _Spread] = {}
        for source, kept in reversed(answers) if self._second else answers:
            for name, one in kept.items():
                spread = seen.setdefault(name, _Spread({}, {}, []))
                for rank, size in one.ranks.items():
                    spread.ranks.setdefault(rank, []).append(source)
                    spread.bytes.setdefault(rank, size)
                spread.extra.extend([source] if one.extra else [])
        self._seen = seen

    def _whole(self, name: Name) -> bool:
        spread = self._seen[name]
        if not spread.extra or 0 not in spread.ranks:
            return False
        if self._second and all(len(sources) < 2 for sources in spread.ranks.values()):
            return False
        try:
            return set(spread.ranks) >= set(range(self._part(name, 0).world))
        except Corrupt:
            return True  # whoever opens it hears what is wrong
        except OSError:
            return False

    def _spread(self, name: str) -> tuple[Name, _Spread]:
        of = Name.of(name)
        if of is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such checkpoint in memory", name)
        if of not in self._seen:
            self._look()  # rank 0 has, and told this one the name
        if of not in self._seen:
            raise FileNotFoundError(errno.ENOENT, "it is in memory no more", name)
        return of, self._seen[of]

    def _file(self, name: str) -> tuple[Name, _Spread, int]:
        checkpoint, _, file = name.partition("/")
        of, spread = self._spread(checkpoint)
        rank = int(file.removeprefix("rank-").removesuffix(".safetensors")) if RANK_FILE.fullmatch(file) else -1
        if rank not in spread.ranks:
            raise FileNotFoundError(errno.ENOENT, "it is in memory no more", name)
        return of, spread, rank

    def _files(self, folder: str) -> Names:
        try:
            _, spread = self._spread(folder)
        except FileNotFoundError:
            return []
        return [MANIFEST, *(rank_file(rank) for rank in sorted(spread.ranks))]

    # What it says

    def _manifest(self, checkpoint: str) -> bytes:
        name, spread = self._spread(checkpoint)
        world = self._part(name, 0).world
        if missing := sorted(set(range(world)) - set(spread.ranks)):
            raise Corrupt(f"the file of rank {missing[0]} is in no memory any more")
        with ThreadPoolExecutor(_AT_ONCE, "shoal-memory") as pool:
            parts = list(pool.map(lambda rank: self._part(name, rank), range(world)))
        if odd := [part.rank for rank, part in enumerate(parts) if (part.rank, part.world) != (rank, world)]:
            raise Corrupt(f"the part of rank {odd[0]} is of another checkpoint")
        extra = _first(spread.extra, lambda source: read_extra(source.extra(name)))
        try:
            return encode(manifest_of(name, parts, extra))
        except CheckpointError as e:  # elsewhere that is a reason to stop; here another tier may do
            raise Corrupt(str(e)) from e

    def _part(self, name: Name, rank: int) -> Part:
        sources = self._seen[name].ranks.get(rank, [])
        return _first(sources, lambda source: decode_part(source.part(name, rank)))


def _first(sources: Iterable[Source], take: Callable[[Source], Taken]) -> Taken:
    """From the first source that can give it."""
    wrong: Exception = FileNotFoundError(errno.ENOENT, "it is in memory no more")
    for source in sources:
        try:
            return take(source)
        except (OSError, EOFError, Corrupt) as e:
            wrong = e
    raise wrong


def _read_only() -> OSError:
    return io.UnsupportedOperation("a checkpoint in memory is what the ranks left there; nobody writes it through this")


def _three(said: object) -> list[Any]:
    found = values.items(said, 3)
    if len(found) != 3:
        raise values.BadValue("no rank, size and holders")
    return found
