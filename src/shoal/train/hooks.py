"""Hooks: what is done at the events of training beside the step itself. Shoal's own features are the first of them.

    start                       the state is there, new or restored; no step was taken yet
    batch ─► backward ─► update ─► step ─► save        … for every step
    end                         the last step is taken
    close                       training is left, whatever the reason; it may start again

Every event comes on every process of a run, in the same order and at the same step: a hook may call collectives, if it
does so on all of them alike. Hooks are asked in the order in which they stand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from shoal.data.windows import Batch
from shoal.errors import SpecError
from shoal.journal.journal import Record
from shoal.journal.record import MOST_METRICS
from shoal.parallel.laid import Laid


class Moment(NamedTuple):
    """Where training stands."""

    step: int
    """Steps that are taken: the one under way is the next."""
    batch: int
    """Of the order of the data, counted from 0. It is the step's number, unless batches were left out."""


class Hook:
    """Each event does nothing unless a hook says otherwise. One that a run file names is made with the run."""

    def start(self, model: Laid, step: int) -> None:
        """`step` steps are taken. Comes again after a rewind, and where an island comes back."""

    def batch(self, at: Moment, batches: list[Batch]) -> list[Batch]:
        """This process's samples, before they are computed: these or others in their place. An island computes a batch
        in parts, and asks for each."""
        return batches

    def backward(self, at: Moment) -> None:
        """The gradient of these samples stands in the parameters, summed over their targets; of an island that part."""

    def update(self, at: Moment, targets: float) -> None:
        """The gradient of the whole batch does, as a sum over its `targets`. It is not clipped, nor known to be finite.
        `model.gradient_norms()` is the same on every layout; what stands in one process's parameters is not."""

    def step(self, at: Moment, record: Record) -> None:
        """A step is taken and told: `record` is what the journal has of it. `at.step` counts it."""

    def save(self, step: int) -> None:
        """After `step` steps, where a checkpoint is begun if one is due."""

    def end(self, step: int) -> None:
        """All steps are taken."""

    def close(self) -> None:
        """Gives back what `start` and later events have taken. No collectives: others may be gone."""

    def state(self) -> Any:
        """What a checkpoint holds of this hook, as JSON: rank 0's is saved. None: nothing."""
        return None

    def load(self, state: Any) -> None:
        """Stands as it did when `state` was saved: called on every process, before `start`."""

    def log(self, **values: Any) -> None:
        """Numbers about the step under way, for the journal and every tracker (`own/NAME` there). Those of rank 0 are
        written; a tensor that several processes share must be one number on all of them."""
        self.__dict__.setdefault("_logged", {}).update(values)


class Hooks:
    """Several, as one."""

    def __init__(self, hooks: Iterable[Hook] = ()) -> None:
        self.all: Sequence[Hook] = tuple(hooks)

    def logged(self) -> dict[str, float]:
        """What was logged since the last time."""
        found: dict[str, float] = {}
        for hook in self.all:
            found |= {name: float(value) for name, value in hook.__dict__.pop("_logged", {}).items()}
        if len(found) > MOST_METRICS:
            raise SpecError(f"own code logs {len(found):,} numbers for one step, where {MOST_METRICS:,} are the most.")
        return found

    def start(self, model: Laid, step: int) -> None:
        for hook in self.all:
            hook.start(model, step)

    def batch(self, at: Moment, batches: list[Batch]) -> list[Batch]:
        for hook in self.all:
            batches = hook.batch(at, batches)
        return batches

    def backward(self, at: Moment) -> None:
        for hook in self.all:
            hook.backward(at)

    def update(self, at: Moment, targets: float) -> None:
        for hook in self.all:
            hook.update(at, targets)

    def step(self, at: Moment, record: Record) -> None:
        for hook in self.all:
            hook.step(at, record)

    def save(self, step: int) -> None:
        for hook in self.all:
            hook.save(step)

    def end(self, step: int) -> None:
        for hook in self.all:
            hook.end(step)

    def close(self) -> None:
        for hook in self.all:
            hook.close()


NONE = Hooks()
