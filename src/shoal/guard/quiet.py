"""Says when nothing at all comes from a group of processes of which nobody knows what they do: no CPU time, no reading
or writing, no log line. For somebody's script, beside the watch over its steps. Never imports torch.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from shoal.guard.hang import LONG_S, MOST_OTHERS, MOST_TICK_S, WINDOW_S, Hang, Other
from shoal.guard.ranks import IO_BYTES, Pulses
from shoal.guard.signs import Kernel, Threads
from shoal.guard.suspect import ELSEWHERE, Suspects, in_no_collective, named, waiting_in
from shoal.spec.duration import seconds

LEAST_S = 60.0
GAPS = 10.0  # … or so many times the median time between two log lines
KNOWN = 5  # times between log lines, before they are gone by


class Quiet:
    """Of one group. `logs` are those of its ranks; `patience` is guard.hang."""

    def __init__(
        self, pids: Mapping[int, int], pulses: Pulses, kernel: Kernel, logs: Mapping[int, Path], patience: str
    ) -> None:
        self._pids, self._pulses, self._kernel, self._logs = dict(pids), pulses, kernel, dict(logs)
        self._patience_s = None if patience in ("auto", "off") else seconds(patience)
        self._before: dict[int, tuple[Threads, int]] = {}
        self._sizes: dict[int, int] = {}
        self._gaps = deque[float](maxlen=64)
        self._clock = self._moved_at = self._line_at = 0.0
        self._asked_at: float | None = None
        self._looked_at = 0.0

    def verdict(self, now: float) -> Hang | None:
        """To be asked a few times a second; `now` is monotonic. Told again until something moves."""
        if self._asked_at is not None:
            self._clock += min(max(0.0, now - self._asked_at), MOST_TICK_S)
        self._asked_at = now
        if self._clock - self._looked_at >= min(WINDOW_S, (self._patience_s or LEAST_S) / 4):
            passed_s, self._looked_at = self._clock - self._looked_at, self._clock
            if self._moved(passed_s):
                self._moved_at = self._clock
        quiet_s = self._clock - self._moved_at
        return self._hang(quiet_s, now) if quiet_s >= self._limit_s else None

    @property
    def _limit_s(self) -> float:
        if self._patience_s is not None:
            return self._patience_s
        return LONG_S if len(self._gaps) < KNOWN else max(LEAST_S, GAPS * statistics.median(self._gaps))

    def _moved(self, passed_s: float) -> bool:
        """Whether any rank has done anything since the last look."""
        moved = self._printed()
        for rank, pid in self._pids.items():
            threads = self._kernel.threads(rank, pid)
            signs = self._kernel.signs(rank, pid)
            before = self._before.get(rank)
            if before is None or signs.stopped:  # one that is stopped is told elsewhere
                moved = True
            else:
                wrote = signs.io_bytes > before[1] + IO_BYTES or threads.on_disk
                moved = moved or wrote or threads.at_work_since(before[0], passed_s)
            self._before[rank] = threads, signs.io_bytes
        return moved

    def _printed(self) -> bool:
        printed = False
        for rank, log in self._logs.items():
            try:
                size = log.stat().st_size
            except OSError:
                continue
            if size != self._sizes.get(rank, 0):
                self._sizes[rank], printed = size, True
        if printed:
            self._gaps.append(self._clock - self._line_at)
            self._line_at = self._clock
        return printed

    def _hang(self, quiet_s: float, now: float) -> Hang:
        ranks = sorted(self._pids)
        samples = [self._pulses.sample(rank) for rank in ranks]
        if len(ranks) == 1:
            at, why = 0, "it is the only one"
        elif all(sample is None for sample in samples):
            at, why = 0, "nobody knows where its ranks are"
        else:
            at, why = named(Suspects(tuple(range(len(ranks)))), samples, now)
            if why == ELSEWHERE and sum(in_no_collective(sample) for sample in samples) > 1:
                why = "several ranks are in no collective, so any of them may be the one that others wait for"
        beats = [self._pulses.beat(rank) for rank in ranks]
        phases = ["start" if beat is None else beat.phase for beat in beats]
        beat, sample = beats[at], samples[at]
        others = [i for i in range(len(ranks)) if i != at]
        return Hang(
            rank=ranks[at],
            pid=self._pids[ranks[at]],
            step=0 if beat is None else beat.step + 1,
            phase=phases[at],
            seconds=quiet_s,
            stopped=False,
            why=why,
            stack=() if sample is None else sample.stack,
            reader=(),
            others=tuple(Other(ranks[i], phases[i], waiting_in(samples[i])) for i in others[:MOST_OTHERS]),
            waiting=len(others),
            marks=0 if beat is None else beat.marks,
            signs="no CPU time, no reading or writing and no log line",
        )
