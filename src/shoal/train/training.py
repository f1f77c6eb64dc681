"""Everything that the training loop needs of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.data.feed import Feed
from shoal.observe.pulse import SILENT, Pulse
from shoal.parallel.laid import Laid
from shoal.parallel.place import Place
from shoal.spec.run import Run
from shoal.train.clock import Timeline
from shoal.train.exchange import Exchange
from shoal.train.hooks import Hooks
from shoal.train.numerics import Numerics
from shoal.train.optim import Optimizers
from shoal.train.own_hooks import Traffic, own_hooks
from shoal.train.poison import Poison
from shoal.train.saves import Saves
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
    hooks: Hooks = field(init=False)
    step: Step = field(init=False)

    def __post_init__(self) -> None:
        traffic, saves = Traffic(self.run, self.place, self.tell), lambda: self.saves
        around = self.poison, self.numerics, self.pulse, self.evaluate, saves
        self.hooks = own_hooks(self.run, self.model, *around, traffic)
        self.step = Step(self.run, self.model, self.optimizers, self.hooks)
