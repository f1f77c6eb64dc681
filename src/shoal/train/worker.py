"""One process of a run: joins the others, builds or restores the state, trains, and leaves with an exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from shoal.data.feed import Feed
from shoal.data.order import Order
from shoal.data.skips import Skips, Spans
from shoal.data.windows import Windows
from shoal.decide.load import load
from shoal.devices import cores
from shoal.errors import DONE, SpecError, Stopped
from shoal.leaving import exit_code
from shoal.observe.pulse import SILENT, Pulse
from shoal.observe.throughput import catalogued, peak_flops
from shoal.parallel.build import build
from shoal.parallel.flight import flight_of
from shoal.parallel.laid import Laid
from shoal.parallel.place import Place, gpu_shared, join, leave
from shoal.parallel.standing import standing
from shoal.parallel.ticks import ticks_of
from shoal.spec.flops import CONVENTION
from shoal.spec.hf_folder import notes_of
from shoal.spec.identity import identity
from shoal.spec.run import Run
from shoal.spec.shape import Shape
from shoal.track.journal import Journal
from shoal.track.rundir import RunDir
from shoal.train import collect
from shoal.train.clock import timeline_of
from shoal.train.evaluate import Evaluator
from shoal.train.loop import train
from shoal.train.numerics import Numerics, Past, Rewind
from shoal.train.open_data import open_together
from shoal.train.optim import Optimizers
from shoal.train.poison import Poison
from shoal.train.replay import Replay
from shoal.train.state import State, digest
from shoal.train.takeover import good_before, take_over
from shoal.train.training import Tell, Training

Work = Callable[[RunDir, Run, Place, "StopFlag", Pulse], None]


def main(run_dir: RunDir, pulse: Pulse = SILENT, do: Work | None = None) -> int:
    """A worker that the supervisor started."""
    stop = StopFlag()
    return outcome(lambda: load(run_dir.spec_file).run, run_dir, stop, pulse=pulse, do=do)


def outcome(
    get_run: Callable[[], Run],
    run_dir: RunDir,
    stop: StopFlag,
    joined: Place | None = None,
    pulse: Pulse = SILENT,
    do: Work | None = None,
) -> int:
    """Does the work, a mesh's or another driver's, and turns what happened into an exit code; the sentence goes to this
    rank's log."""

    def code() -> int:
        run = get_run()
        if do is None and run.fleet.islands > 1:
            raise SpecError(f"fleet.islands is {run.fleet.islands}, and this is no process of an island; set it to 1.")
        pulse.mark("join")
        place = joined or join(run)
        pulse.watch_groups(standing(place))
        pulse.watch_flight(flight_of(place))
        pulse.mark("load")
        try:
            (do or work)(run_dir, run, place, stop, pulse)
        except Stopped as e:
            print(f"shoal: {e}", file=sys.stderr)
            leave(place)
            return e.exit_code
        leave(place)
        return DONE

    return exit_code(code)


def work(run_dir: RunDir, run: Run, place: Place, stop: Callable[[], bool], pulse: Pulse = SILENT) -> None:
    torch.set_num_threads(cores.threads(int(run.resources.threads)))
    journal = Journal(run_dir.journal_file) if place.rank == 0 else None
    attempt = int(os.environ.get("SHOAL_ATTEMPT", "0"))

    def tell(kind: str, **fields: Any) -> None:
        if journal is not None:
            journal.note(kind, attempt=attempt, **fields)

    parts = prepare(run_dir, run, place, pulse)
    model, optimizers, state, windows, order = parts.model, parts.optimizers, parts.state, parts.windows, parts.order
    restored, saves = take_over(run, run_dir, place, state, tell)
    if restored is None:
        parts.load_weights()
    first = restored or 0
    tell("start", step=first, world=place.world, resumed_from=restored, **parts.about())
    feed = Feed(windows, order, run.train.batch, place.at["dp"], place.sizes.dp, int(run.mesh.micro_batch))
    poison, numerics = Poison.here(place.rank), _numerics(run, run_dir, state, first, tell)
    numerics.replay = Replay(run, place, model, optimizers, feed, state.skips, tell, poison)
    training = Training(
        run,
        place,
        model,
        optimizers,
        feed,
        tell,
        stop,
        evaluator(run, run_dir, place, state, tell),
        saves,
        pulse,
        numerics,
        poison,
        timeline_of(place.device, model.decoders),
    )
    try:
        while True:
            try:
                with collect.by_hand():
                    train(training, first)
                break
            except Rewind as spike:
                pulse.mark("save")
                first, training = _go_back(spike, training, state, run_dir)
        pulse.mark("finish")
    finally:
        feed.close()
        training.saves.close()
    fingerprint = digest(model, place)
    tell("finished", step=run.steps, digest=fingerprint)


def _numerics(run: Run, run_dir: RunDir, state: State, step: int, tell: Tell, heard: Spans | None = None) -> Numerics:
    """The guard of a run that goes on from `step`, as the one of a run that was never interrupted. Collective."""
    past = Past.of_journal(run_dir.journal_file, step)
    state.skips.resume(state.skips.spans, step, [*past.spans, *(heard or [])])
    return Numerics(run.guard, state.skips, tell, past, lambda step: good_before(run, run_dir, step))


def _go_back(cause: Rewind, t: Training, state: State, run_dir: RunDir) -> tuple[int, Training]:
    """The state, what it has left out and its saves, as they were before a spike: (step, how to go on). Collective."""
    t.saves.set_aside()
    known = state.skips.spans
    step, saves = take_over(t.run, run_dir, t.place, state, t.tell, at_most=cause.good)
    assert step is not None
    around = t.numerics.rewound(cause, step, known)
    numerics = _numerics(t.run, run_dir, state, step, t.tell, [*known, around])
    numerics.replay = t.numerics.replay
    return step, replace(t, saves=saves, numerics=numerics)


@dataclass(frozen=True)
class Parts:
    """What a process trains, before it is known where it goes on from."""

    run: Run
    place: Place
    windows: Windows
    order: Order
    model: Laid
    optimizers: Optimizers
    state: State

    def load_weights(self) -> None:
        """Those that a new run starts from."""
        if self.run.model.weights:
            from shoal.checkpoint.foreign.start_from import load_weights

            load_weights(self.model.decoders, self.run.model.weights)

    def about(self) -> dict[str, Any]:
        """For the `start` record."""
        run, shape, device = self.run, self.model.shape, _device_name(self.place)
        return {
            "mesh": run.mesh.model_dump(),
            "device": device,
            "params": shape.params,
            "precision": run.train.precision,
            "total": run.steps,
            "flops_convention": CONVENTION,
            "peak_flops": peak_flops(device, str(run.train.precision)),
            "windows": [int(n) for n in self.windows.sizes],
            **({"notes": notes} if (notes := notes_of(run.model.weights)) else {}),
            **_through_memory(run, shape, device),
            **({"cores": mine} if (mine := os.environ.get(cores.CORES)) else {}),
            **({"sharing": shared} if (shared := gpu_shared(self.place)) else {}),
        }


def _through_memory(run: Run, shape: Shape, device_name: str) -> dict[str, float]:
    """What a step moves at least through the memory of one device, and what that could move at best; of accelerators
    that the catalogue knows."""
    device = catalogued(device_name)
    if device is None:
        return {}
    from shoal.plan.moved import moved_bytes

    return {"moved_bytes": moved_bytes(run, shape, device), "peak_bandwidth": device.bandwidth_tbs * 1e12}


def prepare(run_dir: RunDir, run: Run, place: Place, pulse: Pulse = SILENT) -> Parts:
    sources = open_together(run.data.train, run.data, run_dir.workspace)
    windows = Windows.of(sources, run.data)
    order = Order(windows.sizes, [s.weight for s in run.data.train], run.seed)
    model = build(run, place, windows.several)
    pulse.watch_device(ticks_of(place.device, model.decoders))
    optimizers = Optimizers(run.train.optimizer, model.named_parameters(), run.seed)
    about = identity(run) if place.rank == 0 else {}
    skips = Skips([batch, batch] for batch in run.data.skip)
    state = State(run, model, optimizers, [s.index for s in sources], about, skips=skips)
    return Parts(run, place, windows, order, model, optimizers, state)


class StopFlag:
    """Set by SIGINT, SIGTERM or SIGUSR2 (Slurm's warning); the loop asks before each step."""

    def __init__(self) -> None:
        self._told = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: object) -> None:
        self._told = True

    def __call__(self) -> bool:
        return self._told


def evaluator(run: Run, run_dir: RunDir, place: Place, state: State, tell: Tell) -> Callable[[int], object]:
    if not run.data.eval:
        return lambda step: None
    sources = open_together(run.data.eval, run.data, run_dir.workspace)
    held_out = Windows.of(sources, run.data)
    evaluator = Evaluator(run, place, state.model, held_out, tell)
    return lambda step: state.measured(step, evaluator(step))


def _device_name(place: Place) -> str:
    return torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else "cpu"
