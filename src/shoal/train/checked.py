"""What `shoal check` asks of a worker. Does nothing unless SHOAL_CHECK is set.

SHOAL_CHECK=learns=FILE       writes down which parameters got a gradient, how far each moved, whether steps draw
SHOAL_CHECK=stop=3            is told to stop once 3 steps are taken, as by a scheduler
Several are separated by semicolons.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.journal.journal import Record
from shoal.parallel.clip import local
from shoal.parallel.laid import Laid
from shoal.parallel.place import Place
from shoal.spec.run import Run
from shoal.train.hooks import Hook, Moment
from shoal.train.seed import seed_of

VARIABLE = "SHOAL_CHECK"


def asked_for(run: Run, place: Place) -> list[Hook]:
    hooks: list[Hook] = []
    for part in filter(None, os.environ.get(VARIABLE, "").split(";")):
        what, _, value = part.partition("=")
        if what == "stop":
            hooks.append(Stop(int(value)))
        elif what == "learns":
            hooks.append(Learning(Path(value), run, place))
        else:
            raise ValueError(f"{VARIABLE}={part} is none of those that shoal.train.checked describes")
    return hooks


class Stop(Hook):
    def __init__(self, after: int) -> None:
        self._after = after

    def step(self, at: Moment, record: Record) -> None:
        if at.step == self._after:
            os.kill(os.getpid(), signal.SIGTERM)


class Learning(Hook):
    """Which parameters got a gradient, by what this process holds of them, and how far each has moved, as a whole."""

    def __init__(self, path: Path, run: Run, place: Place) -> None:
        self._path, self._run, self._place = path, run, place
        self._learnt: set[str] = set()
        self._draws = False

    def start(self, model: Laid, step: int) -> None:
        self._model = model
        self._first = {name: p.detach().clone() for name, p in model.named_parameters()}

    def backward(self, at: Moment) -> None:
        """Whether anything was drawn since the step was seeded."""
        device = self._place.device
        now = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        seeded = torch.Generator(device).manual_seed(seed_of(self._run.seed, at.step, self._place.at["dp"]))
        self._draws = self._draws or not torch.equal(now, seeded.get_state())

    def update(self, at: Moment, targets: float) -> None:
        for name, p in self._model.named_parameters():
            if name not in self._learnt and p.grad is not None and bool(local(p.grad).any()):
                self._learnt.add(name)

    def end(self, step: int) -> None:
        """Collective."""
        frozen = [name for name, p in self._model.named_parameters() if not p.requires_grad]
        moved = {name: _norm(p.detach() - self._first[name]) for name, p in self._model.named_parameters()}
        if self._place.rank != 0:
            return
        told = {
            "moved": moved,
            "frozen": frozen,
            "without": [name for name in moved if name not in self._learnt and name not in frozen],
            "same": [name for name in moved if name in self._learnt and not moved[name]],
            "draws": self._draws,
        }
        temporary = self._path.with_suffix(".part")
        temporary.write_text(json.dumps(told))
        temporary.rename(self._path)


def _norm(tensor: Tensor) -> float:
    norm = tensor.norm()
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
