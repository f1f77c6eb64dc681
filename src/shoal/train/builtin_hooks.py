"""Shoal's own hooks: what the plain loop and islands do around a step, in the order in which they do it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from shoal.checkpoint import fault_points
from shoal.data.windows import Batch
from shoal.journal.journal import Record
from shoal.journal.pulse import Pulse
from shoal.parallel.count import Counter, due, together
from shoal.parallel.laid import Laid
from shoal.parallel.place import Place
from shoal.spec.run import Run
from shoal.train import collect
from shoal.train.evaluate import evaluates_at
from shoal.train.hooks import Hook, Hooks, Moment
from shoal.train.numerics import Numerics
from shoal.train.poison import Poison
from shoal.train.saves import Saves

Tell = Callable[..., None]


class Faults(Hook):
    """Injects what tests and drills ask for; nothing unless they do."""

    def __init__(self, poison: Poison, model: Laid) -> None:
        self._poison, self._model = poison, model
        self._reached: Moment | None = None

    def start(self, model: Laid, step: int) -> None:
        self._reached = None

    def batch(self, at: Moment, batches: list[Batch]) -> list[Batch]:
        if at != self._reached:  # once a step, also where it is computed in parts
            self._reached = at
            fault_points.reach("step")
        return self._poison.batches(at.batch, batches, self._model.shape.vocab_size)

    def backward(self, at: Moment) -> None:
        self._poison.gradients(at.batch, self._model.gradients())


class Traffic(Hook):
    """Counts what a step sends, now and then, and tells it."""

    def __init__(self, run: Run, place: Place, tell: Tell) -> None:
        self._run, self._place, self._tell = run, place, tell
        self._counter = Counter(place)
        self._counting = ExitStack()
        self._counts, self._first = False, 0

    def start(self, model: Laid, step: int) -> None:
        self._first = step

    def batch(self, at: Moment, batches: list[Batch]) -> list[Batch]:
        self._counting.close()  # of a batch that was left out
        varies = self._run.model.experts is not None
        self._counts = self._place.world > 1 and due(at.step - self._first, self._run.steps - at.step, varies)
        if self._counts:
            self._counting.enter_context(self._counter.counting())
        return batches

    def step(self, at: Moment, record: Record) -> None:
        self._counting.close()
        if self._counts:
            rows = together(self._counter.table())
            self._tell("traffic", step=at.step, world=self._place.world, rows=rows)

    def close(self) -> None:
        self._counting.close()


class Watch(Hook):
    """The guard over the numbers hears of each step."""

    def __init__(self, numerics: Numerics) -> None:
        self._numerics = numerics

    def step(self, at: Moment, record: Record) -> None:
        self._numerics.taken(at.step, record["loss"], record["grad_norm"])


class Evaluation(Hook):
    """On held-out data and tasks: every so many steps, and after the last."""

    def __init__(self, run: Run, pulse: Pulse, evaluate: Callable[[int], object]) -> None:
        self._run, self._pulse, self._evaluate = run, pulse, evaluate

    def step(self, at: Moment, record: Record) -> None:
        if evaluates_at(self._run, at.step) and at.step < self._run.steps:
            self.end(at.step)

    def end(self, step: int) -> None:
        self._pulse.mark("evaluate")
        self._evaluate(step)


class Saving(Hook):
    """Checkpoints that are due; the last one is its driver's, which does not end without it."""

    def __init__(self, run: Run, pulse: Pulse, saves: Callable[[], Saves | None]) -> None:
        self._run, self._pulse, self._saves = run, pulse, saves

    def save(self, step: int) -> None:
        self._pulse.mark("save")
        if (saves := self._saves()) and step < self._run.steps:
            saves.after(step)


class Garbage(Hook):
    def save(self, step: int) -> None:
        collect.after(step)


def builtin_hooks(
    run: Run,
    model: Laid,
    poison: Poison,
    numerics: Numerics,
    pulse: Pulse,
    evaluate: Callable[[int], object],
    saves: Callable[[], Saves | None],
    traffic: Traffic | None = None,
    users: Sequence[Hook] = (),
) -> Hooks:
    """In their order: what is counted ends before others send, and a state is saved after it was measured, with that of
    the hooks that the run file names."""
    first: list[Hook] = [Faults(poison, model)] if traffic is None else [Faults(poison, model), traffic]
    before = [*first, Watch(numerics), Evaluation(run, pulse, evaluate), *users]
    return Hooks([*before, Saving(run, pulse, saves), Garbage()])
