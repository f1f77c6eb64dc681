"""All parts of a bench, one after the other, each with its share of the time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path

from shoal.bench import attention, collectives, memory, products
from shoal.bench.clock import Clock
from shoal.bench.machine import Machine
from shoal.errors import TransientError
from shoal.plan.hardware_types import Measured, Row

SHARES = {"collectives": 0.15, "matmul": 0.48, "attention": 0.2, "memory": 0.06, "norm": 0.03, "disk": 0.08}
WARM_UP_S = 0.5

# Told of each part as it ends: its name, what was measured so far, and why it was not, where that is so.
Tell = Callable[[str, Measured, str], None]


def measure(machine: Machine, seconds: float, processes: int, folder: Path, quick: bool, tell: Tell) -> Measured:
    """`folder` is on the disk that is measured; `processes` 1 leaves collectives out."""
    so_far = _Parts(machine, tell)
    so_far.part("collectives", lambda: _collectives(machine, processes, seconds))  # first: see there
    clock = Clock(machine)
    clock.warm_up(WARM_UP_S)
    so_far.part("matmul", lambda: products.measure(clock, seconds * SHARES["matmul"], quick))
    so_far.part("attention", lambda: attention.measure(clock, seconds * SHARES["attention"]))
    so_far.part("memory", lambda: memory.copies(clock, seconds * SHARES["memory"]))
    so_far.part("norm", lambda: memory.norms(clock, seconds * SHARES["norm"]))
    so_far.part("launch_us", lambda: memory.launch_us(clock))
    so_far.part("disk", lambda: _disk(folder, seconds * SHARES["disk"]))
    return so_far.measured


def _collectives(machine: Machine, processes: int, seconds: float) -> list[Row]:
    if processes < 2:
        return []
    return collectives.measure(machine, processes, seconds * SHARES["collectives"])


def _disk(folder: Path, seconds: float) -> list[Row]:
    from shoal.bench import disk  # with the checkpoints' packages, which a bare machine of GPUs may lack

    return disk.measure(folder, seconds)


class _Parts:
    """What was measured so far. Where processes cannot meet, or a disk is full, the bench goes on without that part."""

    def __init__(self, machine: Machine, tell: Tell) -> None:
        self._found: dict[str, object] = {"when": date.today().isoformat(), "software": machine.software}
        self._tell = tell

    @property
    def measured(self) -> Measured:
        return Measured(**self._found)  # type: ignore[arg-type]  # each part under the name of its field

    def part(self, name: str, work: Callable[[], list[Row] | float]) -> None:
        why = ""
        try:
            found = work()
            self._found[name] = tuple(found) if isinstance(found, list) else found
        except (TransientError, OSError, ImportError) as e:
            why = (str(e).strip().splitlines() or [type(e).__name__])[0]
        self._tell(name, self.measured, why)
