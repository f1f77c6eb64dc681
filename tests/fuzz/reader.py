"""What a reader of outside data is, and what it may do: return, or say in one sentence what is wrong."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

MOST_CHARACTERS = 700  # of a sentence: a long path and two names fit
MIB = 1 << 20
CASES = Path(__file__).parent / "cases"  # what was found once: READER/NAME


class Finding(AssertionError):
    """What a reader did and may not do, where no exception says it: the message says what."""


class Folder(dict[str, bytes]):
    """A case that is a folder: name (with slashes) → content."""

    def write(self, into: Path) -> Path:
        for name, content in self.items():
            path = into / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return into


@dataclass(frozen=True)
class Target:
    """A reader in one process: `generate` makes a case, `read` gives it to the product's own code."""

    generate: Callable[[Random], Any]
    read: Callable[[Any], object]
    allowed: tuple[type[BaseException], ...] = ()  # with a message that passes `objection`
    silent: tuple[type[BaseException], ...] = ()  # whatever they say: callers show none of it to anybody
    lines: bool = False  # a message may list several things, a line each
    refuses_all: bool = False  # what it generates must never be taken: no case of it has a valid signature


@dataclass(frozen=True)
class Reader:
    name: str
    make: Callable[[Path], Target]  # `Path`: an empty folder in memory, of this process alone
    quick: int  # cases in `make test`
    share: int  # of the cases of a long run
    most_mib: int  # that one case may take more than what stood before
    isolated: bool = False  # the product reads this in a child of its own and says which file ended it
    modules: tuple[str, ...] = field(default=())  # of shoal, whose calls this generator reaches


READERS: dict[str, Reader] = {}


def reader(
    name: str, *modules: str, quick: int = 300, share: int = 100, most_mib: int = 256, isolated: bool = False
) -> Callable[[Callable[[Path], Target]], Callable[[Path], Target]]:
    """Registers a function that makes a `Target`."""

    def take(make: Callable[[Path], Target]) -> Callable[[Path], Target]:
        assert name not in READERS, f"two generators are called {name}"
        READERS[name] = Reader(name, make, quick, share, most_mib, isolated, modules)
        return make

    return take


def objection(e: BaseException, lines: bool = False) -> str | None:
    """Why this is no message for a person; None where it is one."""
    text = str(e)
    if not text.strip():
        return "says nothing"
    longest = max(map(len, text.splitlines())) if lines else len(text)
    if longest > MOST_CHARACTERS * (20 if lines else 1):  # where a person's own words are quoted: much, not without end
        return f"says {longest} characters"
    if "\n" in text.strip() and not lines:
        return "says more than one line"
    for word in ("defect", "Traceback", "object has no attribute", "not subscriptable", "unsupported operand"):
        if word in text:
            return f"says '{word}'"
    return None


def dump(case: Any) -> tuple[str, bytes]:
    """The ending of a file, and what it holds."""
    if isinstance(case, bytes):
        return "bin", case
    if isinstance(case, Folder):
        return "folder", json.dumps({k: base64.b64encode(v).decode() for k, v in case.items()}, indent=0).encode()
    return "json", json.dumps(case).encode()


def load(file: Path) -> Any:
    if file.suffix == ".bin":
        return file.read_bytes()
    held = json.loads(file.read_bytes())
    return Folder({k: base64.b64decode(v) for k, v in held.items()}) if file.suffix == ".folder" else held
