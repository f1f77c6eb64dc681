"""`shoal.attach`: three lines in a script of one's own, and it saves and goes on exactly, in Shoal's checkpoints.

    run = shoal.attach(model, optimizer, schedule)        before the first step: goes on where it was
    for batch in run.batches(loader):                     the batches that were read are not read again
        …
        optimizer.step()
        run.step()                                        counts, and saves when it is time

A checkpoint holds the model, the state of the optimizers, the random numbers of every rank, where each is in its data,
and what else was given (schedules, scalers). The format is that of every run: `shoal checkpoint ls` and `verify` know
it, a damaged one gives way to an older one, and sharded tensors (FSDP2) are laid over another number of processes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shoal import values
from shoal.checkpoint import Found, prune, published
from shoal.checkpoint.layout import TORCH_DTYPES
from shoal.checkpoint.loading import restore
from shoal.checkpoint.saving import Saved, save
from shoal.errors import SetupError, UsageError
from shoal.journal.journal import Journal
from shoal.journal.rundir import RunDir
from shoal.parallel import agree
from shoal.script import random_state
from shoal.script.plain import NotPlain, from_json, to_json

MOST_RANKS = 1 << 20
RUN = "SHOAL_SCRIPT"  # the run directory, where `shoal run` has started the script


def attach(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *also: Any,
    every: int = 100,
    keep: int = 3,
    folder: str | os.PathLike[str] | None = None,
) -> Attached:
    """Go on from the newest good checkpoint, if there is one. Every rank calls it, once its group is made and before
    the first step; `also` are schedules and scalers. It saves after each `every` steps and keeps the newest `keep`.
    Under `shoal run` they are in the run's directory; elsewhere `folder` says where."""
    place = os.environ.get(RUN)
    if folder is None and place is None:
        raise UsageError(
            "shoal.attach does not know where to save: give it folder=…, or run the script by `shoal run`."
        )
    if every < 1 or keep < 1:
        raise UsageError(f"shoal.attach(every={every}, keep={keep}): both are 1 or more.")
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    run_dir = RunDir(Path(place)) if place is not None else None
    root = run_dir.checkpoints if run_dir is not None and folder is None else Path(str(folder))
    return Attached(_bare(model), optimizers, also, every, keep, root, run_dir)


class Attached:
    """A training that saves itself. `steps` have been taken, `epoch` counts from 0."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer],
        also: tuple[Any, ...],
        every: int,
        keep: int,
        root: Path,
        run_dir: RunDir | None,
    ) -> None:
        self._model, self._optimizers, self._also = model, optimizers, also
        self._every, self._keep, self._root, self._run_dir = every, keep, root, run_dir
        self._names = {p: name for name, p in model.named_parameters()}
        self._good: set[Any] = set()
        self.steps = self.epoch = self._position = 0
        self._at_epoch = self._later = random_state.now()
        self._resumed = False
        self._world = agree.here()[1]  # who has read so many batches
        self._term = self._next_term()
        self._restore()

    def epochs(self, count: int) -> Iterator[int]:
        """Those that are left of so many; in each, call `batches`."""
        while self.epoch < count:
            before = self.epoch
            yield before
            if self.epoch == before:
                raise UsageError("an epoch in which run.batches(loader) was not read to its end does not end.")

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """An epoch of the loader, or what is left of it. What was read before is read again and left out: random
        numbers and worker processes are then as they were."""
        if self._resumed:
            random_state.go_on(self._at_epoch)
        else:
            self._at_epoch = random_state.now()
        for sampler in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
            if (set_epoch := getattr(sampler, "set_epoch", None)) is not None:
                set_epoch(self.epoch)
        self._scale(loader)
        reading = iter(loader)
        for read in range(self._position):
            if next(reading, self) is self:
                raise SetupError(
                    f"the loader has {read} batches and {self._position} of this epoch were read before: it is another "
                    "one than the run was begun with."
                )
        if self._resumed:
            random_state.go_on(self._later)
            self._resumed = False
        for batch in reading:
            self._position += 1
            yield batch
        self._position, self.epoch = 0, self.epoch + 1

    def _scale(self, loader: Any) -> None:
        """Where so many batches were read by another number of processes, which shared them out: as many samples."""
        _, world = agree.here()
        if hasattr(getattr(loader, "sampler", None), "num_replicas"):
            self._position = self._position * self._world // world
        self._world = world

    def step(self) -> None:
        """A step of the optimizer has been taken. Every rank calls it."""
        self.steps += 1
        if self.steps % self._every == 0:
            self.save()

    def save(self) -> None:
        """Now; `step` does it by itself. Every rank calls it."""
        began = time.time()
        rank, _ = agree.here()
        random = {f"random.{rank}.now.{k}": t for k, t in random_state.now().items()}
        random |= {f"random.{rank}.epoch.{k}": t for k, t in self._at_epoch.items()}
        tensors = {**self._tensors(), **random}
        saved = save(self._root, self.steps, tensors, self._extra(), self._term, {name: [rank] for name in random})
        if rank == 0:
            prune(self._root, self._keep, term=self._term, known_good=self._good)
            self._tell(saved, began)

    def _tensors(self) -> dict[str, torch.Tensor]:
        found = {f"model.{name}": t for name, t in self._model.state_dict().items() if isinstance(t, torch.Tensor)}
        return found | {name: t for name, t in self._states() if isinstance(t, torch.Tensor)}

    def _states(self) -> Iterator[tuple[str, Any]]:
        for i, optimizer in enumerate(self._optimizers):
            for p, state in optimizer.state.items():
                yield from ((f"optim.{i}.{self._name(p)}.{key}", value) for key, value in state.items())

    def _name(self, p: Any) -> str:
        if p not in self._names:
            raise UsageError(
                "an optimizer moves a parameter that is not in the model; give shoal.attach the whole model."
            )
        return self._names[p]

    def _extra(self) -> dict[str, Any]:
        about = {
            "world": self._world,
            "epoch": self.epoch,
            "position": self._position,
            "groups": [[_settings(group) for group in o.param_groups] for o in self._optimizers],
            "values": {name: v for name, v in self._states() if not isinstance(v, torch.Tensor)},
            # Some keep the number of steps on the host, beside moments on a device.
            "on_host": [name for name, t in self._states() if isinstance(t, torch.Tensor) and t.device.type == "cpu"],
            "also": [_said(one) for one in self._also],
        }
        try:
            return {"step": self.steps, "attached": to_json(about)}
        except NotPlain as e:
            raise UsageError(f"shoal.attach cannot save a state with a {e} in it; leave that object out.") from None

    def _restore(self) -> None:
        wanted: dict[str, torch.Tensor] = {}

        def tensors(found: Found) -> Mapping[str, torch.Tensor]:
            wanted.clear()
            wanted.update(self._wanted(found))
            return wanted

        found = restore(self._root, tensors)
        if found is None:
            return
        try:
            about = from_json(_about(found))
            self.steps, self._world = found.step, values.whole(about["world"], MOST_RANKS, 1)
            self.epoch, self._position = values.whole(about["epoch"]), values.whole(about["position"])
            self._fill(wanted, about)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as e:
            raise SetupError(
                f"{found.where} was not saved by shoal.attach with such a model, optimizer and schedule "
                f"({type(e).__name__}: {e}); give it another folder."
            ) from e
        rank, world = agree.here()
        if rank == 0 and self._world != world:
            print(
                f"shoal: the run goes on with {world} processes, not {self._world}: weights and optimizer are the "
                "same, random numbers and which process reads what are not.",
                file=sys.stderr,
            )
        mine = {which: _with_prefix(wanted, f"random.{rank}.{which}.") for which in ("now", "epoch")}
        if all(mine.values()):
            self._at_epoch, self._later, self._resumed = mine["epoch"], mine["now"], True
            random_state.go_on(self._later)

    def _wanted(self, found: Found) -> dict[str, torch.Tensor]:
        """What is to be filled: a fresh optimizer has no state, so the checkpoint says what there is."""
        rank, world = agree.here()
        host = {str(name) for name in said} if isinstance(said := _about(found).get("on_host"), list) else set()
        parameters = {name: p for p, name in self._names.items()}
        wanted = {f"model.{name}": t for name, t in self._model.state_dict().items() if isinstance(t, torch.Tensor)}
        for name, entry in found.manifest.tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "random":
                said = rest.partition(".")[0]
                of = int(said) if said.isdecimal() and len(said) < 8 else world
                if of == rank or (of >= world and rank == 0):  # of one that is no more: read, and forgotten
                    wanted[name] = torch.zeros(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
            elif kind == "optim" and (p := parameters.get(rest.partition(".")[2].rpartition(".")[0])) is not None:
                dtype = TORCH_DTYPES[entry.dtype]
                if isinstance(p, DTensor) and entry.shape == tuple(p.shape):
                    wanted[name] = torch.zeros_like(p, dtype=dtype, requires_grad=False)
                else:
                    device = "cpu" if name in host else p.device
                    wanted[name] = torch.zeros(entry.shape, dtype=dtype, device=device)
        return wanted

    def _fill(self, tensors: Mapping[str, torch.Tensor], about: dict[str, Any]) -> None:
        if len(about["groups"]) != len(self._optimizers) or len(about["also"]) != len(self._also):
            raise SetupError("the checkpoint has other optimizers, schedules or scalers than shoal.attach was given.")
        parameters = {name: p for p, name in self._names.items()}
        states = {**_with_prefix(tensors, "optim."), **_with_prefix(about["values"], "optim.")}
        for name, value in states.items():
            number, _, rest = name.partition(".")
            of, _, key = rest.rpartition(".")
            self._optimizers[int(number)].state[parameters[of]][key] = value
        for optimizer, groups in zip(self._optimizers, about["groups"], strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update(settings)
        for one, said in zip(self._also, about["also"], strict=True):
            one.load_state_dict(said)

    def _next_term(self) -> int:
        """Later than that of whoever saved here before: what an older process still writes does not count."""
        if self._run_dir is not None and self._root == self._run_dir.checkpoints:
            return int(os.environ.get("SHOAL_ATTEMPT", "0"))
        there = published(self._root) if agree.here()[0] == 0 and self._root.is_dir() else []
        return agree.from_rank_0(max((one.name.term for one in there), default=-1) + 1)

    def _tell(self, saved: Saved, began: float) -> None:
        if self._run_dir is None:
            return
        journal = Journal(self._run_dir.journal_file)
        path, attempt = str(self._root / str(saved.name)), int(os.environ.get("SHOAL_ATTEMPT", "0"))
        about = {"attempt": attempt, "bytes": saved.bytes, "path": path, "by": "shoal.attach"}
        journal.note("checkpoint", step=self.steps, begin=began, stall_s=saved.seconds, **about)
        journal.close()


def _bare(model: torch.nn.Module) -> torch.nn.Module:
    """Without what DDP and torch.compile put around it, so that names are the same with and without them."""
    while True:
        inner = getattr(model, "module", None) or getattr(model, "_orig_mod", None)
        if not isinstance(inner, torch.nn.Module) or type(model).__module__.split(".")[0] != "torch":
            return model
        model = inner


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _said(one: Any) -> Any:
    if not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
        raise UsageError(f"shoal.attach cannot save a {type(one).__name__}: it has no state_dict; leave it out.")
    return one.state_dict()


def _about(found: Found) -> dict[str, Any]:
    about = found.extra.get("attached")
    return about if isinstance(about, dict) else {}


def _with_prefix(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
