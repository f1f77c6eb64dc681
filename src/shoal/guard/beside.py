"""Watches a group from within, where no supervisor does (torchrun): a thread of its first two processes.

It names who hangs, on the terminal and in the journal, and does nothing else; what follows is torchrun's to decide. The
second process is there for the case that the first one is it: a stopped process does not watch.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.guard.progress import Progress
from shoal.guard.signs import signs_of
from shoal.journal.pulse import Pulse
from shoal.journal.pulse_file import read_beat
from shoal.journal.pulses import folder_of
from shoal.spec.run import Guard

TICK_S = 0.2
WATCHERS = 2


def pulse_of_this_process() -> tuple[Pulse, Path]:
    """All processes that one torchrun has started on this machine share a folder."""
    folder = folder_of(os.getppid(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return Pulse(folder, int(os.environ["RANK"])), folder


def watch_beside(folder: Path, logs: Path, guard: Guard, tell: Callable[..., None] | None) -> None:
    """`tell` writes a journal record (rank 0). The thread ends with the process."""
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    first = rank - local
    ranks = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if local >= WATCHERS or guard.hang == "off":
        return

    def note(kind: str, **fields: Any) -> None:
        about = fields.get("rank")
        if kind == "warning" or about == rank or (about != first and rank != first):
            return  # the other one says it
        if kind in ("hang", "slow"):
            stack = "".join(f"\n    {frame}" for frame in (fields["reader"] or fields["stack"]))
            what = "hangs" if kind == "hang" else "is slow"
            print(f"shoal: rank {about} {what}: {fields['evidence']}{stack}", file=sys.stderr, flush=True)
        if tell is not None:
            tell(kind, **fields)

    def watching() -> None:
        pids: dict[int, int] = {}
        while len(pids) < len(ranks):
            time.sleep(TICK_S)
            found = ((r, read_beat(folder, r)) for r in ranks)
            pids = {r: beat.pid for r, beat in found if beat is not None and signs_of(beat.pid).state not in "?Z"}
        nodes = int(os.environ.get("WORLD_SIZE", "1")) // len(ranks)
        progress = Progress(pids, folder, logs, guard.model_copy(update={"on_hang": "wait"}), note, nodes=nodes)
        while True:
            progress.look(time.monotonic())
            time.sleep(TICK_S)

    logs.mkdir(parents=True, exist_ok=True)
    threading.Thread(target=watching, name="shoal-watch", daemon=True).start()
