"""Everything that the training loop needs of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.data.feed import Feed
from shoal.journal.pulse import SILENT, Pulse
from shoal.parallel.laid import Laid
from shoal.parallel.place import Place
from shoal.spec.run import Run
from shoal.train.builtin_hooks import Traffic, builtin_hooks
from shoal.train.checked import asked_for
from shoal.train.clock import Timeline
from shoal.train.exchange import Exchange
from shoal.train.hooks import Hook, Hooks
from shoal.train.numerics import Numerics
from shoal.train.optim import Optimizers
from shoal.train.own import NOTHING, Own
from shoal.train.poison import Poison
from shoal.train.saves import Saves
from shoal.train.schedule import rates
from shoal.train.step import Step

Tell = Callable[..., None]  # writes a journal record (rank 0; elsewhere it does nothing)


@dataclass
class Training:
    """Made by `shoal.train.worker`."""

    run: Run
    place: Place
    model: Laid
    optimizers: Optimizers
    feed: Feed
    tell: Tell
    told_to_stop: Callable[[], bool]
    evaluate: Callable[[int], object]  # (committed steps)
    saves: Saves
    pulse: Pulse = SILENT
    numerics: Numerics = field(default_factory=Numerics)
    poison: Poison = field(default_factory=lambda: Poison("", 0))
    timeline: Timeline | None = None  # of this process's GPU
    exchange: Exchange = field(default_factory=Exchange)
    own: Own = NOTHING
    taken: int = 0  # steps
    said: Hook = field(init=False)  # holds what a loop of somebody's own logs
    hooks: Hooks = field(init=False)
    step: Step = field(init=False)
    rate: Callable[[int], float] = field(init=False)  # of a step, as a multiple of the peak

    def __post_init__(self) -> None:
        self.said = Hook()
        self._around()

    def go_on_from(self, step: int, saves: Saves, numerics: Numerics) -> None:
        """After the state has gone back to that step."""
        self.taken, self.saves, self.numerics = step, saves, numerics
        self._around()

    def _around(self) -> None:
        traffic, saves = Traffic(self.run, self.place, self.tell), lambda: self.saves
        around = self.poison, self.numerics, self.pulse, self.evaluate, saves
        users = [*self.own.hooks, self.said, *asked_for(self.run, self.place)]
        self.hooks = builtin_hooks(self.run, self.model, *around, traffic, users)
        self.step = Step(self.run, self.model, self.optimizers, self.hooks)
        self.rate = rates(self.run, self.own.schedule)

    def log(self) -> None:
        """Writes down what hooks and own loops have to say of the last step."""
        if values := self.hooks.logged():
            self.tell("metrics", step=self.taken, values=values)
