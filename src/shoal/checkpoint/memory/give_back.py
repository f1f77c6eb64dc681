"""Gives back what a run has left in this machine's memory: `python -m shoal.checkpoint.memory.give_back RUN_DIRECTORY`.

For whoever outlives its workers: the supervisor, when nothing in memory is newer than what is on disk, and the shell of
a job that hands its node back, whatever is in memory. Workers that end in order have done it by themselves. What is
still used stays: a persister that finishes a save is waited for, for a while. No torch here.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

from shoal.checkpoint.find import published
from shoal.checkpoint.memory.ram import memory_folder, remove_if_unused
from shoal.checkpoint.memory.tier import Memory
from shoal.checkpoint.names import Name
from shoal.checkpoint.store import Store

WAIT_S = 20.0
TICK_S = 0.05


def give_back(run: str | os.PathLike[str], wait_s: float = WAIT_S) -> bool:
    """Whether nothing of the run is left in this machine's memory."""
    deadline = time.monotonic() + wait_s
    while left := list(memory_folder(run, 0).parent.glob("node-*")):
        for folder in left:
            with contextlib.suppress(FileNotFoundError):  # somebody else has
                remove_if_unused(folder)
        if time.monotonic() > deadline:
            return not any(folder.exists() for folder in left)
        time.sleep(TICK_S)
    return True


def give_back_saved(run: str | os.PathLike[str], disk: Store, wait_s: float) -> bool:
    """The same, unless this machine's memory holds a newer step than the disk: the next start here goes on from it."""
    listed = published([Memory(memory_folder(run, 0), [], [disk]), disk])
    good = [one for one in listed if one.there and one.on_history and not one.quarantined]
    saved = max((one.name for one in good if one.store is disk), default=Name(-1, 0))
    return all(one.name <= saved for one in good) and give_back(run, wait_s)


def main() -> int:
    if len(sys.argv) != 2:
        print("shoal: give_back takes the run's directory, and nothing else.", file=sys.stderr)
        return 2
    path = Path(sys.argv[1])
    run = path.parent.resolve() / path.name  # as the workers know it: the workspace may be a link
    if not give_back(run):
        print(f"shoal: the memory of {run} is still in use on this node, and stays.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
