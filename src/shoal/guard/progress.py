"""Watches the progress of one group of workers and tells the journal: who hangs, who is slow. One for each group."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.guard.classify import Failure
from shoal.guard.flights import Flight, ask, sentence
from shoal.guard.hang import WINDOW_S, Hang, Limits, Watch
from shoal.guard.quiet import Quiet
from shoal.guard.ranks import Pulses
from shoal.guard.signs import Kernel
from shoal.guard.slow_device import Kin, SlowDevices
from shoal.guard.stacks import dumps, frames, spied
from shoal.guard.straggler import Stragglers
from shoal.guard.workers import rank_log
from shoal.journal.pulse_file import PulseFolder
from shoal.spec.duration import seconds
from shoal.spec.mesh import Sizes
from shoal.spec.run import Guard, Mesh

MOST_FRAMES = 16  # in the journal; the file beside the logs has all


class Progress:
    def __init__(
        self,
        pids: Mapping[int, int],
        folder: Path,
        logs: Path,
        guard: Guard,
        note: Callable[..., None],
        kernel: Kernel | None = None,
        pulses: Pulses | None = None,
        kin: Kin | None = None,
        nodes: int = 1,
        flights: Callable[[], Mapping[int, Flight]] | None = None,
        script: bool = False,
    ) -> None:
        """`folder` has the pulses of this machine's ranks and `pulses` all of them, `logs` the logs of this attempt.
        `note` writes a journal record. `flights` asks the ranks for NCCL's record; by default those of this machine.
        `script`: the ranks are somebody's script, which may not mark anything."""
        self._pids, self._folder, self._logs, self._note = dict(pids), folder, logs, note
        self._names_hangs, self._restarts = guard.hang != "off", guard.on_hang == "restart"
        self._livelock_s = math.inf if guard.livelock == "off" else seconds(guard.livelock)
        self._kernel = kernel or Kernel()
        self._pulses = pulses or PulseFolder(folder)
        limits = Limits.of_script(guard.hang) if script else Limits.of(guard.hang, nodes)
        self._watch = Watch(pids, self._pulses, limits, self._kernel)
        self._quiet: Quiet | None = None
        if script:
            ranks = {rank: rank_log(logs, rank) for rank in pids}
            self._quiet = Quiet(pids, self._pulses, self._kernel, ranks, guard.hang)
        self._stragglers, self._devices = Stragglers(), SlowDevices(kin)
        self._flights = flights or (lambda: ask(list(self._here), folder))
        self._here = {rank: pid for rank, pid in pids.items() if self._kernel.here(rank)}
        self._hanging: Hang | None = None

    def look(self, now: float) -> Failure | None:
        """To be called a few times a second; the hang that the group is to be ended for, if there is one."""
        found = self._watch.verdict(now)
        if self._quiet and (found is None or found.works):
            found = self._quiet.verdict(now) or found
        beats = self._watch.beats
        for slow in (*self._devices.look(beats, now), *self._stragglers.look(beats, now)):
            self._note("straggler", rank=slow.rank, **slow.fields())
        if not self._names_hangs:
            return None
        before, self._hanging = self._hanging, found
        if found is None:
            if before is not None and self._stands(before):  # … but it is no longer certain what it does
                self._hanging = before
            elif before is not None:
                self._note("warning", text=f"rank {before.rank}, which made no progress in {before.phase}, goes on")
            return None
        if before is not None and self._same(before, found):
            return None
        ends = self._restarts and self._hangs(found)
        found = self._tell(found, ends)
        return Failure(found.rank, "hang", found.evidence) if ends else None

    def at_work(self, pids: Mapping[int, int], wait: Callable[[float], None]) -> bool:
        """Whether one of those who are left still computes or writes, when others have finished. Takes a second."""
        began, before = time.monotonic(), {rank: self._kernel.threads(rank, pid) for rank, pid in pids.items()}
        while (left_s := began + WINDOW_S - time.monotonic()) > 0:
            wait(left_s)
        after = {rank: self._kernel.threads(rank, pid) for rank, pid in pids.items()}
        seconds = time.monotonic() - began
        return any(after[r].on_disk or after[r].at_work_since(before[r], seconds) for r in pids)

    def _stands(self, told: Hang) -> bool:
        """Whether it has marked nothing since; one that was stopped and no longer is has been let go on."""
        beat = self._watch.beats.get(told.rank)
        return not told.stopped and (beat is None or beat.marks == told.marks)

    def _hangs(self, found: Hang) -> bool:
        """A rank that is at work is slow, or in a live-lock: it is ended only after the time that the run file says."""
        return not found.works or found.seconds >= self._livelock_s

    def _same(self, before: Hang, found: Hang) -> bool:
        """What has been told already."""
        one, other = ((h.rank, h.phase, h.step, self._hangs(h)) for h in (before, found))
        return one == other

    def _tell(self, hang: Hang, ends: bool) -> Hang:
        # Whoever is to be killed may as well be asked for its stack; the sampled one is up to a second older.
        # NCCL's record first: a rank may not survive the other question.
        flights = self._flights() if ends else {}
        texts = dumps(self._here, self._folder) if ends else {}
        if self._quiet:  # without the probe a script has nothing to answer with
            texts |= spied({rank: pid for rank, pid in self._here.items() if not texts.get(rank)})
        hang = replace(hang, stack=frames(texts.get(hang.rank, "")) or hang.stack, nccl=sentence(flights))
        self._note(
            "hang" if self._hangs(hang) else "slow",
            rank=hang.rank,
            step=hang.step,
            phase=hang.phase,
            stopped=hang.stopped,
            seconds=round(hang.seconds, 3),
            evidence=hang.evidence,
            stack=list(hang.stack[:MOST_FRAMES]),
            reader=list(hang.reader[:MOST_FRAMES]),
            others=[{"rank": o.rank, "phase": o.phase, "where": o.where} for o in hang.others],
            waiting=hang.waiting,
            stacks=self._keep(hang, texts),
            nccl=self._keep_flights(hang, flights),
            action="restart" if ends else "wait",
        )
        return hang

    def _keep(self, hang: Hang, texts: dict[int, str]) -> str | None:
        """The stacks of all ranks, in a file beside the logs: {folder}/hang-step-NNNNNNNN.txt."""
        parts = [f"{hang.evidence}\n"]
        for rank in sorted(self._pids):
            sample = self._pulses.sample(rank)
            sampled = "\n".join(f"  {frame}" for frame in sample.stack) if sample else ""
            parts.append(f"rank {rank} (pid {self._pids[rank]}):\n{texts.get(rank) or sampled or '  (not known)'}\n")
        path = self._logs / f"hang-step-{hang.step:08d}.txt"
        try:
            path.write_text("\n".join(parts))
        except OSError:  # a full disk; the journal has the one that matters
            return None
        return str(path)

    def _keep_flights(self, hang: Hang, flights: Mapping[int, Flight]) -> str | None:
        """NCCL's records of all ranks that gave one, beside the stacks: {folder}/nccl-step-NNNNNNNN.json."""
        if not flights:
            return None
        path = self._logs / f"nccl-step-{hang.step:08d}.json"
        try:
            path.write_text(json.dumps({str(rank): flight for rank, flight in sorted(flights.items())}))
        except OSError:
            return None
        return str(path)


def kin_of(mesh: Mesh) -> Kin:
    """The ranks whose devices have the same to do; all of them, where the run has not been laid out (a script's)."""
    try:
        sizes = Sizes.of(mesh)
    except ValueError:
        return Kin()
    return Kin(sizes.world // sizes.pp, math.lcm(sizes.tp * sizes.cp, sizes.ep))


def of_attempt(note: Callable[..., None], **about: Any) -> Callable[..., None]:
    """A `note` whose records say which attempt (or island) they are of."""
    return lambda kind, **fields: note(kind, **about, **fields)
