"""Whether a folder of a script's checkpoints was finished, judged by the names in it.

A script that saves again had finished the save before, so that only the last folder of each start of its processes is
in doubt. It is unfinished where it lacks what the finished ones before it have: as many files of each kind, or, where
they are of another number of processes, one at least. Only files that hold a state count: marks, notes and tables come
and go. Numbers in names do not count: shards and steps have some.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.script.whole import MOST_FILES, MOST_WORDS, STATES

COMPARED = 2  # what both of them have is wanted
HABIT = 3  # so many in a row that lack the same are as the script writes them now
_NUMBER = re.compile(r"\d+")
_TRAINER, _ITS_LAST = "training_args.bin", "trainer_state.json"


@dataclass(frozen=True)
class Folder:
    path: Path
    start: int  # of the script's processes: the how many-th; it was written after that
    world: int


def unfinished(folders: Sequence[Folder]) -> dict[Path, str]:
    """Of folders, the newest first: those that are not finished, and why, in words that follow their name."""
    sound: list[tuple[Folder, Counter[str]]] = []
    doubted: list[Counter[str]] = []
    found = {}
    for at in reversed(range(len(folders))):
        one, kinds = folders[at], _kinds(folders[at].path)
        followed = any(newer.start == one.start for newer in folders[:at])
        wrong = None if followed else _lacks(one, kinds, sound)
        habit = [*doubted[1 - HABIT :], kinds]
        if wrong is None or (len(habit) == HABIT and habit.count(kinds) == HABIT):
            sound.append((one, kinds))
            doubted = []
        else:
            doubted.append(kinds)
            found[one.path] = f"is not whole: {wrong}"[:MOST_WORDS]
    return found


def _lacks(one: Folder, kinds: Counter[str], finished: Sequence[tuple[Folder, Counter[str]]]) -> str | None:
    if not finished:
        begun = any(name.rpartition("/")[2] == _TRAINER for name in kinds)
        named = any(name.rpartition("/")[2] == _ITS_LAST for name in kinds)
        return (
            f"{_ITS_LAST}, which the Trainer of transformers writes last, is not there" if begun and not named else None
        )
    alike = [pair for pair in finished if pair[0].world == one.world][-COMPARED:]
    compared = alike or finished[-COMPARED:]
    for kind in sorted(compared[-1][1]):
        wanted = min(seen[kind] if alike else min(seen[kind], 1) for _, seen in compared)
        if kinds[kind] < wanted:
            has = f"{kinds[kind]} of {wanted} files" if kinds[kind] else "no"
            return f"it has {has} {kind}, and {compared[-1][0].path.name} has"
    return None


def _kinds(folder: Path) -> Counter[str]:
    try:
        names = [
            file.relative_to(folder).as_posix()
            for file in itertools.islice(folder.rglob("*"), MOST_FILES)
            if (file.suffix in STATES or file.name.endswith((".metadata", ".index.json", _ITS_LAST))) and file.is_file()
        ]
    except OSError:  # it vanishes while one looks
        names = []
    return Counter(_NUMBER.sub("N", name) for name in names)
