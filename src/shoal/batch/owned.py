"""A block that this runner has claimed: what is left of it, and the records of what becomes of it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any

from shoal.guard.classify import Failure
from shoal.guard.signals import signal_name
from shoal.journal.journal import Journal
from shoal.journal.units import Folder, Plan, Unit, read_records, standing, summary_of, write_summary
from shoal.spec.batch import Batch

MOST_LOST = 10  # attempts of a unit that ended with their runner: it may be the unit that ends the runner
NOT_RETRIED = (2, 78)


class Owned:
    """One writer at a time: the claim says who."""

    def __init__(self, folder: Folder, plan: Plan, block: int, round_: int) -> None:
        self.number, self._folder, self._round = block, folder, round_
        path = folder.records(block)
        self.units = standing(read_records(path), plan.units_of(block), round_)
        self._journal = Journal(path)
        for unit, one in self.units.items():
            if one.begun is not None:  # its runner went away
                one.lost += 1
                last = one.lost > MOST_LOST
                self._ended(unit, one, "lost", cause="supervisor-lost", evidence="its runner went away", final=last)
                if last:
                    one.failed = {"cause": "supervisor-lost", "evidence": f"lost {one.lost} times with its runner"}
        self._ready = [unit for unit, one in self.units.items() if not one.done and one.failed is None][::-1]
        self._later: list[tuple[float, int]] = []  # (when, unit)
        self.running = 0
        self._left = len(self._ready)

    @property
    def waiting(self) -> int:
        """Units that were tried and are tried again."""
        return len(self._later)

    @property
    def over(self) -> bool:
        return not self._left

    def next(self, now: float) -> int | None:
        """The unit that may begin now."""
        if self._later and self._later[0][0] <= now:
            return heapq.heappop(self._later)[1]
        return self._ready.pop() if self._ready else None

    @property
    def next_at(self) -> float:
        return self._later[0][0] if self._later else float("inf")

    def put_back(self, unit: int) -> None:
        self._ready.append(unit)

    def began(self, unit: int, runner: str, log: str) -> None:
        """Written before its process is there: one that nobody has noted could not be missed."""
        one = self.units[unit]
        self._journal.append("unit_began", unit=unit, attempt=one.attempts, runner=runner, log=log)
        one.attempts += 1
        self.running += 1

    def done(self, unit: int, took_s: float, **log: Any) -> None:
        one = self.units[unit]
        self._ended(unit, one, "done", exit_code=0, took_s=round(took_s, 4), **log)
        one.done, one.took_s = True, took_s
        self.running -= 1
        self._left -= 1

    def failed(self, unit: int, failure: Failure, batch: Batch, took_s: float, **log: Any) -> bool:
        """Whether it is tried again; `again` says when."""
        one = self.units[unit]
        one.failures += 1
        final = failure.exit_code in NOT_RETRIED or one.failures > batch.retries
        said = {"cause": failure.cause, "evidence": failure.evidence, "exit_code": failure.exit_code}
        number = None if failure.signal is None else signal_name(failure.signal)
        self._ended(unit, one, "failed", **said, signal=number, took_s=round(took_s, 4), final=final, **log)
        self.running -= 1
        if final:
            one.failed = said
            self._left -= 1
        return not final

    def again(self, unit: int, at: float) -> None:
        heapq.heappush(self._later, (at, unit))

    def stopped(self, unit: int, took_s: float, **log: Any) -> None:
        """It was ended because the runner was told to; that is no fault of its own."""
        self._ended(unit, self.units[unit], "stopped", took_s=round(took_s, 4), **log)
        self.running -= 1

    def close(self) -> None:
        if self.over:
            write_summary(self._folder, self.number, summary_of(self.units, self._round))
        self._journal.close()

    def counts(self) -> tuple[int, int]:
        """Done and failed."""
        return counts(self.units.values())

    def _ended(self, unit: int, one: Unit, outcome: str, **said: Any) -> None:
        fields = {name: value for name, value in said.items() if value is not None and value is not False}
        attempt = max(0, one.attempts - 1)
        self._journal.append("unit_ended", unit=unit, attempt=attempt, outcome=outcome, round=self._round, **fields)


def counts(units: Iterable[Unit]) -> tuple[int, int]:
    done = failed = 0
    for one in units:
        done += one.done
        failed += one.failed is not None
    return done, failed
