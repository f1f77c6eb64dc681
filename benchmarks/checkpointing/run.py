"""What each process of the benchmark does: round after round, everything once; and writes down what it has so far."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.checkpointing import ours, windows
from benchmarks.checkpointing.rivals import Rival, Stagers, TorchSave, dcp_rivals
from benchmarks.checkpointing.training import SIZES, Trainer
from torch.distributed.checkpoint.api import CheckpointException

from shoal.checkpoint.layout import local_of

RESULT = "result.json"


def run(args: argparse.Namespace, memory: Path) -> int:
    faulthandler.register(signal.SIGUSR1)
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    began = time.monotonic()
    trainer = Trainer(SIZES[args.size], args.device)
    state = trainer.state()
    root = args.as_rank / "checkpoints"
    stagers = Stagers(args.device)
    shoal = ours.Background("Shoal", root, state, memory / "with" / "node-0")
    unsure = ours.Background("without checksums", root, state, memory / "without" / "node-0", checksums=False)
    others = [
        ours.Synchronous("Shoal, synchronous", root, state),
        *dcp_rivals(root, state, stagers),
        TorchSave("torch.save", root, state, fsync=False),
        TorchSave("torch.save + fsync", root, state, fsync=True),
    ]
    bench = Bench(args, trainer)
    wanted = [shoal, *(rival for rival in others if {rival.name, "all"} & set(args.beside))]
    rivals = [rival for rival in wanted if bench.warm_up(rival)]
    bench.warm_up(unsure)
    for number in range(args.rounds):
        if number and bench.from_rank_0(time.monotonic() - began > 60 * args.minutes):
            break
        bench.say(f"round {number + 1} of {args.rounds}")
        bench.save_and_load(rivals, number)
        bench.save_alone(rivals, number)
        bench.with_and_without_checksums(shoal, unsure, number)
    shoal.close()
    unsure.close()
    stagers.close()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # the interpreter's own way out would wait for DCP's daemon


class Bench:
    def __init__(self, args: argparse.Namespace, trainer: Trainer) -> None:
        self._args, self._trainer = args, trainer
        self._step = 0
        self._checked: set[type[Rival]] = set()
        self._result = _about(args, trainer) | {"ways": {}, "checksums": {"with": [], "without": []}}

    def warm_up(self, rival: Rival) -> bool:
        """Daemons are started, memory is taken, plans are cached. Whether it works here at all, on all processes."""
        if not rival.background:
            return True
        try:
            words = f"warmed up in {self._alone(rival, check=type(rival) not in self._checked):.1f} s"
            self._checked.add(type(rival))
        except (Exception, CheckpointException) as e:
            words = f"left out: {type(e).__name__}: {e}"
        everybody = [""] * dist.get_world_size()
        dist.all_gather_object(everybody, words)
        self.say(f"{rival.name}: {everybody[0]}")
        return not any(words.startswith("left out") for words in everybody)

    def save_and_load(self, rivals: list[Rival], number: int) -> None:
        """While training goes on. Of ways that write the same files, what one has written is loaded."""
        readers = {type(rival): rival for rival in reversed(rivals)}
        there = {}
        windows.quiet(self._trainer, self._args.quiet / 2)  # back into its stride
        before = windows.quiet(self._trainer, self._args.quiet)
        for rival in _rotated(rivals, number):
            self._step += 1
            save = windows.save(self._trainer, rival, self._step, self._args.quiet)
            self._settle(rival, discard=rival not in readers.values())
            after = windows.quiet(self._trainer, self._args.quiet)
            cost = windows.cost(save, before + after)
            self._note(rival.name, "costs", asdict(cost) | {"step_s": after.seconds / after.steps}, str(cost))
            before = after
            if rival in readers.values():
                there[rival] = self._step
        for rival in _rotated(list(there), number):
            for kind in ("cold", "warm") if windows.can_drop_caches() else ("warm",):
                seconds = windows.load(self._trainer, rival, there[rival], kind == "cold")
                self._note(rival.name, f"{kind} load", seconds, f"{seconds:.2f} s")
        dist.barrier()
        if dist.get_rank() == 0:
            for rival, step in there.items():
                rival.discard(step)

    def save_alone(self, rivals: list[Rival], number: int) -> None:
        """With nothing else to do."""
        for rival in _rotated(rivals, number) if number < self._args.alone else ():
            seconds = self._alone(rival)
            self._note(rival.name, "alone", seconds, f"{seconds:.2f} s")

    def with_and_without_checksums(self, shoal: Rival, unsure: Rival, number: int) -> None:
        for i in range(number, number + self._args.pairs):
            for key, rival in sorted({"with": shoal, "without": unsure}.items(), reverse=bool(i % 2)):
                time.sleep(self._args.rest)  # a rented disk is fast for some gigabytes and then slow for some seconds
                self._result["checksums"][key].append(self._alone(rival))
                self.say(f"  {key} checksums: {self._result['checksums'][key][-1]:.2f} s")
            self._write_down()

    def from_rank_0(self, verdict: bool) -> bool:
        shared = [verdict]
        dist.broadcast_object_list(shared)
        return shared[0]

    def say(self, text: str) -> None:
        if dist.get_rank() == 0:
            print(f"  {text}", flush=True)

    def _alone(self, rival: Rival, check: bool = False) -> float:
        self._step += 1
        seconds = windows.alone(self._trainer, rival, self._step)
        if check:
            self._settle(rival, discard=False)
            _check(self._trainer, rival, self._step)
        self._settle(rival)
        return seconds

    def _settle(self, rival: Rival, discard: bool = True) -> None:
        """Done, cleaned up, and all of it on the disk: whoever is next has a quiet machine."""
        rival.finish()
        dist.barrier()
        if dist.get_rank() == 0:
            if discard:
                rival.discard(self._step)
            os.sync()
        dist.barrier()

    def _note(self, name: str, what: str, value: Any, words: str) -> None:
        way = self._result["ways"].setdefault(name, {"costs": [], "alone": [], "cold load": [], "warm load": []})
        way[what].append(value)
        self._write_down()
        self.say(f"  {name}: {what} {words}")

    def _write_down(self) -> None:
        if dist.get_rank() == 0:
            new = self._args.as_rank / "result.tmp"
            new.write_text(json.dumps(self._result))
            new.rename(new.with_name(RESULT))


def _about(args: argparse.Namespace, trainer: Trainer) -> dict[str, Any]:
    state = trainer.state()
    everybody = [0] * dist.get_world_size()
    dist.all_gather_object(everybody, sum(local_of(t).nbytes for t in state.values()))
    return {
        "ranks": dist.get_world_size(),
        "device": torch.cuda.get_device_name()
        if args.device == "cuda"
        else f"{len(os.sched_getaffinity(0))} CPU cores",
        "torch": torch.__version__,
        "bytes": sum(everybody),
        "tensors": len(state),
    }


def _check(trainer: Trainer, rival: Rival, step: int) -> None:
    """What was saved comes back."""
    tensors = [local_of(t) for t in trainer.state().values()]
    wanted = [float(t.double().sum()) for t in tensors]
    for t in tensors:
        t.zero_()
    windows.load(trainer, rival, step, cold=False)
    if [float(t.double().sum()) for t in tensors] != wanted:
        raise RuntimeError("it has not loaded what it saved")


def _rotated(rivals: list[Rival], by: int) -> list[Rival]:
    """Nobody is always the first, nor always after the same neighbour's leftovers."""
    by %= len(rivals)
    return rivals[by:] + rivals[:by]
