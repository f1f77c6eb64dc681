"""How often a run may be restarted: so many times in a row without progress, waiting twice as long each time."""

from __future__ import annotations

from dataclasses import dataclass

LONGEST_WAIT_S = 60.0


@dataclass
class Budget:
    restarts: int
    backoff_s: float
    used: int = 0

    def spend(self, progressed: bool) -> float | None:
        """Seconds to wait before the next restart; None when there is none left. Progress refills the budget."""
        if progressed:
            self.used = 0
        if self.used >= self.restarts:
            return None
        self.used += 1
        return min(self.backoff_s * 2 ** (self.used - 1), max(LONGEST_WAIT_S, self.backoff_s))

    @property
    def left(self) -> int:
        return self.restarts - self.used
