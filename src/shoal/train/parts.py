"""What a process trains: data, model, optimizer and state, before it is known where the run goes on from."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shoal.data.index import Index
from shoal.data.order import Order
from shoal.data.own_windows import Identity
from shoal.data.skips import Skips
from shoal.data.windows import AnyWindows, Windows
from shoal.devices import cores
from shoal.journal.pulse import SILENT, Pulse
from shoal.journal.rundir import RunDir
from shoal.model.decoder import Decoder
from shoal.model.own_model import OwnModel
from shoal.observe.throughput import catalogued, peak_flops
from shoal.own.carry import digest_of
from shoal.own.code import NONE, Code
from shoal.own.code import load as load_code
from shoal.parallel.build import build
from shoal.parallel.laid import Laid
from shoal.parallel.place import Place, gpu_shared
from shoal.parallel.ticks import ticks_of
from shoal.spec.flops import CONVENTION
from shoal.spec.hf.folder import notes_of
from shoal.spec.identity import identity
from shoal.spec.run import Run
from shoal.spec.shape import Shape
from shoal.train.evaluate import Evaluator
from shoal.train.open_data import open_own, open_together
from shoal.train.optim import Optimizers
from shoal.train.own import NOTHING, Own
from shoal.train.state import State
from shoal.train.training import Tell


@dataclass(frozen=True)
class Parts:
    """What a process trains, before it is known where it goes on from."""

    run: Run
    place: Place
    windows: AnyWindows
    order: Order
    model: Laid
    optimizers: Optimizers
    state: State
    own: Own = NOTHING
    params: int = 0  # of a model that is not Shoal's, or its blocks; else its shape knows

    def load_weights(self) -> None:
        """Those that a new run starts from."""
        if self.run.model.hf:
            from shoal.model.hf_any import load_weights as load_any

            load_any(self.model.decoders[0], self.run.model.hf)
        if self.run.model.weights:
            from shoal.checkpoint.foreign.start_from import load_weights

            self.model.fill(partial(load_weights, where=self.run.model.weights))

    def about(self) -> dict[str, Any]:
        """For the `start` record."""
        run, shape, device = self.run, self.model.shape, _device_name(self.place)
        return {
            "mesh": run.mesh.model_dump(),
            "device": device,
            "params": self.params or shape.params,
            "precision": run.train.precision,
            "total": run.steps,
            "flops_convention": CONVENTION,
            # What own code computes is not known, and a share of the peak would be made up.
            "peak_flops": None if run.own.computes or run.foreign else peak_flops(device, str(run.train.precision)),
            "windows": [int(n) for n in self.windows.sizes],
            **({"notes": notes} if (notes := notes_of(run.model.weights)) else {}),
            **({} if run.own.computes or run.foreign else _through_memory(run, shape, device)),
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
    code = load_code(run, run_dir.code)
    windows, data = _opened(run_dir, run, code)
    order = Order(windows.sizes, [s.weight for s in run.data.train] or [1.0], run.seed)
    own = Own.of(code, run)
    model = build(run, place, windows.several, code)
    pulse.watch_device(ticks_of(place.device, model.decoders))
    optimizers = _optimizers(run, model, code)
    about = identity(run) | ({"own": digest_of(run_dir)} if run.own.objects else {}) if place.rank == 0 else {}
    skips = Skips([batch, batch] for batch in run.data.skip)
    state = State(run, model, optimizers, data, about, skips=skips, own=own)
    return Parts(run, place, windows, order, model, optimizers, state, own, _params(model, code))


def _opened(run_dir: RunDir, run: Run, code: Code) -> tuple[AnyWindows, Sequence[Index | Identity]]:
    """The windows of the training data, and what data it is. Collective."""
    if code.data is not None:
        own = open_own(code.data, run)
        return own, [own.identity]
    sources = open_together(run.data.train, run.data, run_dir.workspace)
    return Windows.of(sources, run.data), [s.index for s in sources]


def _params(model: Laid, code: Code) -> int:
    if isinstance(model.decoders[0], OwnModel):
        return sum(p.numel() for p in model.decoders[0].parameters())
    if code.block is None:
        return 0
    with torch.device("meta"):
        return sum(p.numel() for p in Decoder(model.shape, block=code.block).parameters())


def _optimizers(run: Run, model: Laid, code: Code) -> Optimizers:
    if run.engine.name == "deepspeed":
        from shoal.parallel.zero.laid import ZeroLaid
        from shoal.train.zero_optimizer import ZeroOptimizer

        assert isinstance(model, ZeroLaid)
        return ZeroOptimizer(run.train.optimizer, model, run.seed)
    if code.optimizer is None:
        return Optimizers(run.train.optimizer, model.named_parameters(), run.seed)
    from shoal.train.own_optimizer import OwnOptimizer

    return OwnOptimizer(code.optimizer, model.named_parameters(), run)


def evaluator(run: Run, run_dir: RunDir, place: Place, state: State, tell: Tell) -> Callable[[int], object]:
    held_out = _held_out(run, run_dir, place, state, tell)
    if not (run.eval.tasks or run.eval.samples):
        return held_out
    from shoal.train.tasks import Tasks  # the engine: only who asks waits for it

    code = NONE if run.own.computes is None else load_code(run, run_dir.code)
    tasks = Tasks(run, place, state.model, code, tell)

    def both(step: int) -> None:
        held_out(step)
        tasks(step)

    return both


def _held_out(run: Run, run_dir: RunDir, place: Place, state: State, tell: Tell) -> Callable[[int], object]:
    if not run.data.eval:
        return lambda step: None
    sources = open_together(run.data.eval, run.data, run_dir.workspace)
    evaluator = Evaluator(run, place, state.model, Windows.of(sources, run.data), tell)
    return lambda step: state.measured(step, evaluator(step))


def _device_name(place: Place) -> str:
    return torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else "cpu"
