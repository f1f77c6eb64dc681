"""Watches the progress of one group of workers and tells the journal: who hangs, who is slow. One of these a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.guard.classify import Failure
from shoal.guard.hang import Hang, Limits, Watch
from shoal.guard.signs import HERE, Kernel
from shoal.guard.stacks import dumps, frames
from shoal.guard.straggler import Stragglers
from shoal.observe.pulse import read_sample
from shoal.spec.duration import seconds
from shoal.spec.run import Guard

MOST_FRAMES = 16  # in the journal; the file beside the logs has all


class Progress:
    def __init__(
        self,
        pids: Mapping[int, int],
        folder: Path,
        logs: Path,
        guard: Guard,
        note: Callable[..., None],
        kernel: Kernel = HERE,
    ) -> None:
        """`folder` has the pulses, `logs` those of this attempt. `note` writes a journal record."""
        limits = Limits() if guard.hang in ("auto", "off") else Limits(quick_s=seconds(guard.hang))
        self._pids, self._folder, self._logs, self._note = dict(pids), folder, logs, note
        self._names_hangs, self._restarts = guard.hang != "off", guard.on_hang == "restart"
        self._watch, self._stragglers = Watch(pids, folder, limits, kernel), Stragglers()
        self._here = {rank: pid for rank, pid in pids.items() if kernel.here(rank)}
        self._hanging: Hang | None = None

    def look(self, now: float) -> Failure | None:
        """To be called a few times a second; the hang that the group is to be ended for, if there is one."""
        found = self._watch.verdict(now)
        for slow in self._stragglers.look(self._watch.beats, now):
            self._note("straggler", rank=slow.rank, **slow.fields())
        if not self._names_hangs:
            return None
        before, self._hanging = self._hanging, found
        if found is None:
            if before is not None:
                self._note("warning", text=f"rank {before.rank}, which stood still in {before.phase}, goes on")
            return None
        if before is not None and (before.rank, before.phase, before.step) == (found.rank, found.phase, found.step):
            return None
        found = self._tell(found)
        return Failure(found.rank, "hang", found.evidence) if self._restarts else None

    def _tell(self, hang: Hang) -> Hang:
        # Whoever is to be killed may as well be asked for its stack; the sampled one is up to a second older.
        texts = dumps(self._here, self._folder) if self._restarts else {}
        hang = replace(hang, stack=frames(texts.get(hang.rank, "")) or hang.stack)
        self._note(
            "hang",
            rank=hang.rank,
            step=hang.step,
            phase=hang.phase,
            stopped=hang.stopped,
            seconds=round(hang.seconds, 3),
            evidence=hang.evidence,
            stack=list(hang.stack[:MOST_FRAMES]),
            reader=list(hang.reader[:MOST_FRAMES]),
            others=[{"rank": o.rank, "phase": o.phase, "where": o.where} for o in hang.others],
            stacks=self._keep(hang, texts),
            action="restart" if self._restarts else "wait",
        )
        return hang

    def _keep(self, hang: Hang, texts: dict[int, str]) -> str | None:
        """The stacks of all ranks, in a file beside the logs: {folder}/hang-step-NNNNNNNN.txt."""
        parts = [f"{hang.evidence}\n"]
        for rank in sorted(self._pids):
            sample = read_sample(self._folder, rank)
            sampled = "\n".join(f"  {frame}" for frame in sample.stack) if sample else ""
            parts.append(f"rank {rank} (pid {self._pids[rank]}):\n{texts.get(rank) or sampled or '  (not known)'}\n")
        path = self._logs / f"hang-step-{hang.step:08d}.txt"
        try:
            path.write_text("\n".join(parts))
        except OSError:  # a full disk; the journal has the one that matters
            return None
        return str(path)


def of_attempt(note: Callable[..., None], **about: Any) -> Callable[..., None]:
    """A `note` whose records say which attempt (or island) they are of."""
    return lambda kind, **fields: note(kind, **about, **fields)
