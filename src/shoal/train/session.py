"""A session: one process of a run from its newest state to its last step, for whoever takes the steps.

    with Session(...) as s:
        for step in s.steps():
            s.step()

That is Shoal's own loop. What stands around a step (the order of the data, saves, evaluation, hooks, going back after a
spike, stopping when told to) is done by the session, so a loop of somebody's own keeps all of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data.feed import Feed
from shoal.data.windows import Batch
from shoal.devices import cores
from shoal.errors import SpecError
from shoal.journal.journal import Journal, Record
from shoal.journal.pulse import SILENT, Pulse
from shoal.journal.rundir import RunDir
from shoal.parallel.laid import Laid
from shoal.parallel.place import Place
from shoal.spec.run import Run
from shoal.train import collect, loop
from shoal.train.clock import timeline_of
from shoal.train.numerics import Numerics, Past, Rewind
from shoal.train.parts import evaluator, prepare
from shoal.train.poison import Poison
from shoal.train.replay import Replay
from shoal.train.state import digest
from shoal.train.takeover import good_before, take_over
from shoal.train.training import Training


class Session:
    """Everything that the steps of one process need. Made by whoever starts a worker; `shoal.session` opens one in
    a script of somebody's own."""

    def __init__(
        self, run_dir: RunDir, run: Run, place: Place, stop: Callable[[], bool], pulse: Pulse = SILENT
    ) -> None:
        torch.set_num_threads(cores.threads(int(run.resources.threads)))
        self.run, self.run_dir, self._place, self._pulse = run, run_dir, place, pulse
        self._journal = Journal(run_dir.journal_file) if place.rank == 0 else None
        self._attempt = int(os.environ.get("SHOAL_ATTEMPT", "0"))
        parts = prepare(run_dir, run, place, pulse)
        self._state, self._own = parts.state, parts.own
        restored, saves = take_over(run, run_dir, place, parts.state, self._tell)
        if restored is None:
            parts.load_weights()
            parts.optimizers.begin()
        first = restored or 0
        self._tell("start", step=first, world=place.world, resumed_from=restored, **parts.about())
        for key, value, why in parts.model.chosen:
            self._tell("decision", key=key, value=value, why=why)
        feed = Feed(
            parts.windows, parts.order, run.train.batch, place.at["dp"], place.sizes.dp, int(run.mesh.micro_batch)
        )
        poison, numerics = Poison.here(place.rank), self._numerics(first)
        skips = parts.state.skips
        numerics.replay = Replay(run, place, parts.model, parts.optimizers, feed, skips, self._tell, poison)
        self._t = Training(
            run,
            place,
            parts.model,
            parts.optimizers,
            feed,
            self._tell,
            stop,
            evaluator(run, run_dir, place, parts.state, self._tell),
            saves,
            pulse,
            numerics,
            poison,
            timeline_of(place.device, parts.model.decoders),
            own=parts.own,
            taken=first,
        )
        self._held = ExitStack()

    @property
    def rank(self) -> int:
        return self._place.rank

    @property
    def world(self) -> int:
        """How many processes train."""
        return self._place.world

    @property
    def device(self) -> torch.device:
        return self._place.device

    @property
    def taken(self) -> int:
        """Steps that are taken."""
        return self._t.taken

    @property
    def model(self) -> Laid:
        """The model as it is laid over the processes."""
        return self._t.model

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What this process holds of what is trained; a gradient is there from `backward` on."""
        return self._t.model.named_parameters()

    def steps(self) -> Iterator[int]:
        """The numbers of the steps that are left; each has to be taken with `step` before the next is asked for."""
        return loop.steps(self._t, self._t.taken)

    def step(self, gradient: Callable[[list[Batch], Callable[[list[Batch]], Tensor]], Tensor] | None = None) -> Record:
        """Takes the next step and returns what the journal has of it.

        `gradient(batches, backward)`: in the place of Shoal's. `backward(batches)` adds the gradient of the loss,
        summed over the targets of these samples, to the parameters and returns that sum, which is to be returned. It
        is called again, with other samples, where the numbers of a batch are NaN.

        Where a loss spike sends the run back (`guard.spikes: rewind`) the steps in between are taken again here.
        """
        wanted, t = self._t.taken + 1, self._t
        while True:
            try:
                record = loop.take(t, t.taken, gradient)
            except Rewind as spike:
                self._go_back(spike)
                continue
            if t.taken == wanted:
                return record
            loop.settle(t)  # one that is taken again

    def log(self, **values: Any) -> None:
        """Numbers about the step that was just taken, for the journal and every tracker (`own/NAME` there)."""
        self._t.said.log(**values)

    def evaluate(self) -> None:
        """The loss on `data.eval` and the tasks of `eval`, now; every process must ask for it."""
        self._pulse.mark("evaluate")
        self._t.evaluate(self._t.taken)

    def train(self) -> None:
        """All steps that are left: by the loop that the run names, or by Shoal's own."""
        if self._own.loop is not None:
            self._own.loop(self)
        else:
            for _ in self.steps():
                self.step()
        self._pulse.mark("finish")

    def __enter__(self) -> Session:
        self._held.enter_context(collect.by_hand())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        t = self._t
        try:
            self._held.close()
            if kind is None and t.taken < t.run.steps:
                t.saves.now(t.taken, must=False)
                raise SpecError(
                    f"the loop ended at step {t.taken} of {t.run.steps}, and the state is saved: take all steps of "
                    "session.steps(), or set train.steps."
                )
        finally:
            t.feed.close()
            t.saves.close()
        if kind is None:
            self._tell("finished", step=t.run.steps, digest=digest(t.model, self._place))

    def _tell(self, kind: str, **fields: Any) -> None:
        if self._journal is not None:
            self._journal.note(kind, attempt=self._attempt, **fields)

    def _numerics(self, step: int, heard: list[Any] | None = None) -> Numerics:
        """The guard of a run that goes on from `step`, as the one of a run that was never interrupted. Collective."""
        past, skips = Past.of_journal(self.run_dir.journal_file, step), self._state.skips
        skips.resume(skips.spans, step, [*past.spans, *(heard or [])])
        return Numerics(self.run.guard, skips, self._tell, past, partial(good_before, self.run, self.run_dir))

    def _go_back(self, cause: Rewind) -> None:
        """The state, what it has left out and its saves, as they were before a spike. Collective."""
        t = self._t
        t.hooks.close()
        self._pulse.mark("save")
        t.saves.set_aside()
        known = self._state.skips.spans
        step, saves = take_over(t.run, self.run_dir, t.place, self._state, self._tell, at_most=cause.good)
        assert step is not None
        around = t.numerics.rewound(cause, step, known)
        numerics = self._numerics(step, [*known, around])
        numerics.replay = t.numerics.replay
        t.go_on_from(step, saves, numerics)
        t.hooks.start(t.model, step)
