"""An epoch: a numbered list of members. It comes to be by the exclusive creation of a file, so there is one of each."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import SetupError
from shoal.plain_file import read_object
from shoal.values import MOST_ITEMS, BadValue, fields, items, real, table, text, whole

TOKEN_BYTES = 32
MOST_TEXT, MOST_WHY, MOST_RANKS, MOST_SHARDS = 1024, 1 << 14, 1 << 16, 1 << 20
MOST_EPOCH = 64 << 20  # bytes of its file


@dataclass(frozen=True)
class Card:
    """A member: one life of an island. Who comes back has another key."""

    key: str
    island: int
    control: str  # address of its first rank
    data: tuple[str, ...]  # … and of each rank
    host: str  # `machine`
    pid: int

    @staticmethod
    def of(said: object) -> Card:
        """BadValue for what is none."""
        s = fields(said, Card.__dataclass_fields__)
        data = tuple(text(at, MOST_TEXT) for at in items(s.get("data"), MOST_RANKS))
        where = text(s.get("key"), MOST_TEXT), whole(s.get("island"), MOST_RANKS), text(s.get("control"), MOST_TEXT)
        return Card(*where, data, text(s.get("host"), MOST_TEXT), whole(s.get("pid")))


@dataclass(frozen=True)
class Epoch:
    number: int
    members: tuple[Card, ...]  # the first one says COMMIT, writes the journal and saves; nobody: the end of a life
    base: int  # steps that are decided
    have: dict[str, list[int]] = field(default_factory=dict)  # shards of step `base` (from 0) that are computed
    left: dict[str, str] = field(default_factory=dict)  # key of a former member → why
    joined: tuple[str, ...] = ()
    by: str = ""
    life: int = 1  # counts up whenever all had died and the run went on from a checkpoint
    noticed: float = 0.0  # Unix time at which the reason for this epoch was noticed
    back: dict[str, Any] | None = None  # at the end of a life: what the next one has to go back to

    @property
    def keys(self) -> list[str]:
        return [card.key for card in self.members]

    @property
    def ends_life(self) -> bool:
        """All islands restore the state anew, as `back` tells, and gather again."""
        return not self.members

    @property
    def first(self) -> Card:
        return self.members[0]

    def index(self, key: str) -> int:
        return self.keys.index(key)

    @staticmethod
    def of(said: object) -> Epoch:
        """BadValue for what is none."""
        s = fields(said, Epoch.__dataclass_fields__)
        have, left, back = table(s.get("have"), MOST_RANKS), table(s.get("left"), MOST_RANKS), s.get("back")
        return Epoch(
            number=whole(s.get("number")),
            members=tuple(Card.of(card) for card in items(s.get("members"), MOST_RANKS)),
            base=whole(s.get("base")),
            have={key: [whole(n) for n in items(shards, MOST_SHARDS)] for key, shards in have.items()},
            left={key: text(why, MOST_WHY) for key, why in left.items()},
            joined=tuple(text(key, MOST_TEXT) for key in items(s.get("joined"), MOST_RANKS)),
            by=text(s.get("by"), MOST_TEXT),
            life=whole(s.get("life")),
            noticed=real(s.get("noticed")),
            back=None if back is None else table(back, MOST_RANKS),
        )


def machine() -> str:
    """Where process ids mean the same: containers may share a host's name and not its processes."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # Linux
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


class Fence:
    """The epochs of a run, in a folder that all islands can reach."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._epochs = folder / "epochs"

    def create(self, epoch: Epoch) -> bool:
        """Whether this one came to be; False where another of that number was there before."""
        self._epochs.mkdir(parents=True, exist_ok=True)
        return create(self._path(epoch.number), json.dumps(asdict(epoch), indent=1) + "\n")

    def end(self, life: int, back: dict[str, Any]) -> None:
        """Ends a life, unless it is over: whoever is the first to say so decides where all go back to."""
        while (newest := self.newest()) and newest.life == life and not newest.ends_life:
            self.create(Epoch(newest.number + 1, (), newest.base, life=life, back=back))

    def read(self, number: int) -> Epoch | None:
        try:
            return Epoch.of(read_object(self._path(number), MOST_EPOCH, MOST_ITEMS))
        except FileNotFoundError:
            return None
        except BadValue as e:
            raise SetupError(
                f"{self._path(number)} is damaged ({e}): end all islands of the run, and delete it."
            ) from None

    def is_over(self, number: int) -> bool:
        return self._path(number + 1).exists()

    def newest(self) -> Epoch | None:
        try:
            numbers = [int(name[:-5]) for name in os.listdir(self._epochs) if name[0] != "." and name.endswith(".json")]
        except FileNotFoundError:
            return None
        return self.read(max(numbers)) if numbers else None

    def token(self) -> bytes:
        """The secret by which the islands of a run know each other. Whoever can read the run's files can have it."""
        path = self.folder / "token"
        self.folder.mkdir(parents=True, exist_ok=True)
        create(path, secrets.token_hex(TOKEN_BYTES), mode=0o600)
        text = path.read_text()
        try:
            return bytes.fromhex(text)
        except ValueError as e:
            raise SetupError(f"{path} is damaged: delete it while no island of the run is alive.") from e

    def _path(self, number: int) -> Path:
        return self._epochs / f"{number:06d}.json"


def create(path: Path, text: str, mode: int = 0o644) -> bool:
    """A whole file or none, and only if there is none yet: a link fails where the name is taken, on NFS too."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(fd, "w") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.link(temporary, path)
        return True
    except FileExistsError:
        return False
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
