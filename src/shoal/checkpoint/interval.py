"""When a save is due: every so many steps, every so many seconds, or as often as is worth it. No torch here.

A save costs time, and so does a failure: the work since the last save is done again. Saving every T seconds costs
C/T of the time for saves that cost C each, and T/2 a failure. The sum is least at T = sqrt(2 * C * M) where M is the
mean time between failures (Young 1974; what Daly 2006 adds is below 1% of T where C is seconds and M hours). That a
snapshot counts only once it is written adds the time of writing to each failure whatever T is, and changes nothing.

C is measured. M is learnt: what this run has seen of failures, starting from what is known of others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.journal.journal import Record
from shoal.journal.reading import Told, told_of
from shoal.plan.failures import DEFAULT, HOUR_S
from shoal.plan.renewal import young_interval_s
from shoal.spec.duration import seconds
from shoal.spec.run import Run

# What that knowledge weighs against what the run sees itself; the shape of Jeffreys' prior for a rate. Simulated with 2
# to 60 failures, 20 minutes to 10 days apart: 1 learns slowly from many failures (7.3% of the time lost where 5.4% is
# the least; this one 6.6%), 0.1 forgets too soon that there could be any.
PRIOR_FAILURES = 0.5

FIRST_S = 60.0  # until the first save has told what one costs
SHORTEST_S, LONGEST_S = 15.0, 30 * 60.0
LARGEST_SHARE = 0.05  # of the time; a save that costs more than that in half an hour is made less often
WEIGHT = 0.3  # of the newest save in the averages: the first one is slow, since it allocates

# These say something about the input and nothing about how long a run lives.
_NOT_BY_CHANCE = ("user-error", "environment", "data")
_NEEDED = ("start", "failure")  # kinds of which more is asked than when


def expected_per_hour(devices: int) -> float:
    """Before anything has been seen: what others have published (`shoal.plan.failures.DEFAULT`)."""
    return DEFAULT.per_hour(devices)


@dataclass(frozen=True)
class Seen:
    """What became of a run until now: failures that cost work, and how many there would have been elsewhere."""

    failures: int = 0
    expected: float = 0.0

    @classmethod
    def of(cls, records: Told | Iterable[Record]) -> Seen:
        """From the journal. An attempt that took no step lost none; one that was told to stop has no `failure`."""
        told = told_of(records)
        ends = told.column("t")
        failures, expected, at = 0, 0.0, 0
        devices, began, last = 1, None, None
        for place, record in [*told.others(_NEEDED), (told.rows, {})]:
            kind = record.get("kind")
            if place > at and began is not None:
                since = began if last is None else last
                last = max(since, float(ends[at:place].max()))  # a clock that was set back tells no time
                expected += (last - since) / 3600 * expected_per_hour(devices)
            at = place
            if kind == "start":
                devices, began, last = int(record.get("world", 1)), float(record["t"]), None
            elif kind == "failure":
                failures += last is not None and record.get("cause") not in _NOT_BY_CHANCE
                began = last = None
            elif kind in ("attempt", "close"):
                began = last = None
        return cls(failures, expected)

    def per_hour(self, devices: int, hours: float = 0.0) -> float:
        """The rate to reckon with after `hours` more without a failure.

        How much worse than others this run is has a Gamma prior of mean 1, as if PRIOR_FAILURES had been seen where as
        many were expected; this is the mean after the evidence.
        """
        usual = expected_per_hour(devices)
        return usual * (PRIOR_FAILURES + self.failures) / (PRIOR_FAILURES + self.expected + hours * usual)


def best_interval_s(cost_s: float, failures_per_hour: float) -> float:
    """Young's."""
    return young_interval_s(cost_s, HOUR_S / failures_per_hour)


def held_interval_s(cost_s: float, failures_per_hour: float, persist_s: float) -> float:
    """Young's, in bounds: a person expects a save within half an hour, and a disk can write one only so fast."""
    longest = max(LONGEST_S, cost_s / LARGEST_SHARE)
    return max(SHORTEST_S, persist_s, min(best_interval_s(cost_s, failures_per_hour), longest))


class Cadence:
    """Says when a save is due, for the one process that decides for all. `now` is any clock that only goes forward.

    due = cadence.due(done, now)        after each step; stays true until a save has begun
    cadence.begun(done, now)            a snapshot was taken, for whatever reason
    cadence.saved(stall_s, persist_s)   what it had cost, once that is known
    """

    def __init__(
        self,
        every: int | str,
        done: int,
        now: float,
        devices: int = 1,
        seen: Seen | None = None,
        milestones: Iterable[int] = (),
    ) -> None:
        """`done` steps are saved already. A save is due at the multiples of each of the `milestones` too."""
        self._every = every
        self._asked_s = seconds(every) if isinstance(every, str) and every != "auto" else None
        self._multiples = [n for n in (every, *milestones) if isinstance(n, int) and n > 0]
        self._devices, self._seen = devices, seen or Seen()
        self._start = self._at = now
        self._done = done
        self._cost_s: float | None = None
        self._persist_s = 0.0

    @classmethod
    def of(cls, run: Run, done: int, now: float, devices: int = 1, seen: Seen | None = None) -> Cadence:
        """As the run file says. What is to be kept must first be saved: `keep_every` and the evaluations that
        `keep_best` chooses among are milestones."""
        asked = run.checkpoint
        return cls(asked.every, done, now, devices, seen, (asked.keep_every, asked.keep_best and run.eval.every))

    @property
    def automatic(self) -> bool:
        """Whether the interval is a decision of ours, which changes with what is learnt."""
        return self._every == "auto"

    def due(self, done: int, now: float) -> bool:
        if done <= self._done:
            return False
        # Passed, not met: one that had to wait for the save before it is made late rather than not at all.
        if any(done // n > self._done // n for n in self._multiples):
            return True
        return not isinstance(self._every, int) and now - self._at >= self.interval_s(now)

    def begun(self, done: int, now: float) -> None:
        self._done, self._at = done, now

    def saved(self, stall_s: float, persist_s: float, suppressed_s: float = 0.0) -> None:
        """`suppressed_s` is what the steps took longer while the save was written: the larger part of the cost where
        stalls are short (0.78 s of stall went with 67 s of it in torch DCP at 1,856 GPUs)."""
        cost_s = stall_s + suppressed_s
        if self._cost_s is None:
            self._cost_s, self._persist_s = cost_s, persist_s
        else:
            self._cost_s += WEIGHT * (cost_s - self._cost_s)
            self._persist_s += WEIGHT * (persist_s - self._persist_s)

    def interval_s(self, now: float) -> float:
        """Seconds between saves where time decides."""
        if self._asked_s is not None:
            return self._asked_s
        if self._cost_s is None:
            return FIRST_S
        return held_interval_s(self._cost_s, self._failures_per_hour(now), self._persist_s)

    def why(self, now: float) -> str:
        """One sentence without its full stop, for the `decision` in the journal."""
        if isinstance(self._every, int):
            return (
                f"a checkpoint every {self._every} steps, as asked" if self._every else "a checkpoint at the end only"
            )
        if self._asked_s is not None:
            return f"a checkpoint every {self._every}, as asked"
        interval_s = self.interval_s(now)
        if self._cost_s is None:
            return f"the first checkpoint after {shown(interval_s)}: what a save costs here is not known yet"
        per_hour = self._failures_per_hour(now)
        why = f"a checkpoint every {shown(interval_s)}: a save costs {shown(self._cost_s)} and a failure is expected "
        why += f"every {shown(3600 / per_hour)}"
        best_s = best_interval_s(self._cost_s, per_hour)
        if interval_s > best_s:
            slow = interval_s == self._persist_s
            why += f"; one takes {shown(interval_s)} to be written" if slow else "; less is not worth a save"
        elif interval_s < best_s:
            why += "; more would put too much work at risk"
        return why

    def _failures_per_hour(self, now: float) -> float:
        return self._seen.per_hour(self._devices, (now - self._start) / 3600)


def shown(length_s: float) -> str:
    """A length to two or three digits, in the unit that a person would use."""
    for unit, size_s in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if length_s >= {"days": 3, "h": 2, "min": 5}[unit] * size_s:
            return f"{length_s / size_s:.0f} {unit}"
    return f"{length_s:.0f} s" if length_s >= 10 else f"{length_s:.2g} s"
