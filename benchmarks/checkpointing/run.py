"""What each process of the benchmark does: warms up, saves in turns, loads in turns, writes down."""

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
Ways = dict[str, dict[str, Any]]


def run(args: argparse.Namespace, memory: Path) -> int:
    faulthandler.register(signal.SIGUSR1)
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    trainer = Trainer(SIZES[args.size], args.device)
    state = trainer.state()
    root = args.as_rank / "checkpoints"
    stagers = Stagers(args.device)
    shoal = ours.Background("Shoal", root, state, memory / "with" / "node-0")
    others = [
        ours.Synchronous("Shoal, synchronous", root, state),
        *dcp_rivals(root, state, stagers),
        TorchSave("torch.save", root, state, fsync=False),
        TorchSave("torch.save + fsync", root, state, fsync=True),
    ]
    saves = Saves(trainer)
    chosen = [shoal, *(rival for rival in others if not args.only or rival.name in args.only)]
    rivals = [rival for rival in chosen if saves.warm_up(rival)]
    result = _about(args, trainer)
    result["ways"] = {rival.name: {"costs": [], "alone": [], "load": {}} for rival in rivals}
    for phase in (_save_in_turns, _load_in_turns):
        phase(args, trainer, rivals, saves, result["ways"])
        _write_down(args, result)  # it may be stopped before it is done
    stagers.close()
    result["checksums"] = _with_and_without_checksums(args, saves, shoal, root, memory)
    _write_down(args, result)
    shoal.close()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # the interpreter's own way out would wait for DCP's daemon


class Saves:
    """Numbers the saves, and cleans up when nobody is measuring."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._step = trainer, 0
        self._began = time.monotonic()

    def late(self, minutes: float) -> bool:
        """Whether rank 0 finds that the time is up."""
        verdict = [time.monotonic() - self._began > 60 * minutes]
        dist.broadcast_object_list(verdict)
        return verdict[0]

    def next(self) -> int:
        self._step += 1
        return self._step

    def warm_up(self, rival: Rival) -> bool:
        """Daemons are started, memory is taken, plans are cached. Whether it works here at all, on all processes."""
        try:
            words = f"warmed up in {self.alone(rival):.1f} s"
        except (Exception, CheckpointException) as e:
            words = f"left out: {type(e).__name__}: {e}"
        everybody = [""] * dist.get_world_size()
        dist.all_gather_object(everybody, words)
        _say(f"{rival.name}: {everybody[0]}")
        return all(words.startswith("warmed") for words in everybody)

    def alone(self, rival: Rival) -> float:
        seconds = windows.alone(self._trainer, rival, self.next())
        self.settle(rival)
        return seconds

    def one_to_load(self, rival: Rival) -> int:
        rival.begin(self.next())
        self.settle(rival, discard=False)
        return self._step

    def settle(self, rival: Rival, discard: bool = True) -> None:
        rival.finish()
        dist.barrier()
        if dist.get_rank() == 0:
            if discard:
                rival.discard(self._step)
            os.sync()
        dist.barrier()


def _save_in_turns(args: argparse.Namespace, trainer: Trainer, rivals: list[Rival], saves: Saves, ways: Ways) -> None:
    windows.quiet(trainer, args.quiet)
    before = windows.quiet(trainer, args.quiet)
    for round_ in range(args.rounds):
        if round_ and saves.late(args.minutes):
            break
        for rival in _rotated(rivals, round_):
            save = windows.save(trainer, rival, saves.next(), args.quiet)
            saves.settle(rival)
            after = windows.quiet(trainer, args.quiet)
            cost = windows.cost(save, before + after)
            ways[rival.name]["costs"].append(asdict(cost) | {"step_s": after.seconds / after.steps})
            before = after
        for rival in _rotated(rivals, round_) if round_ < args.alone else ():
            ways[rival.name]["alone"].append(saves.alone(rival))
        _say(f"round {round_ + 1} of {args.rounds}")


def _load_in_turns(args: argparse.Namespace, trainer: Trainer, rivals: list[Rival], saves: Saves, ways: Ways) -> None:
    """Of ways that write the same files one is enough."""
    readers = list({type(rival): rival for rival in reversed(rivals)}.values())
    wanted = _sums(trainer)
    there = {rival: saves.one_to_load(rival) for rival in readers}
    for rival in readers:
        for t in trainer.state().values():
            local_of(t).zero_()
        windows.load(trainer, rival, there[rival], cold=False)
        assert _sums(trainer) == wanted, f"{rival.name} has not loaded what it saved"
    for round_ in range(args.rounds):
        if round_ and saves.late(args.minutes):
            break
        for kind in ("cold", "warm") if windows.can_drop_caches() else ("warm",):
            for rival in _rotated(readers, round_):
                seconds = windows.load(trainer, rival, there[rival], kind == "cold")
                ways[rival.name]["load"].setdefault(kind, []).append(seconds)
    dist.barrier()
    if dist.get_rank() == 0:
        for rival, step in there.items():
            rival.discard(step)
    _say("loaded")


def _with_and_without_checksums(
    args: argparse.Namespace, saves: Saves, shoal: Rival, root: Path, memory: Path
) -> dict[str, list[float]]:
    """Seconds of the same save, in turns."""
    without = ours.Background("without checksums", root, shoal.state, memory / "without" / "node-0", checksums=False)
    saves.alone(without)
    times: dict[str, list[float]] = {"with": [], "without": []}
    for i in range(args.pairs):
        if i and saves.late(args.minutes):
            break
        for key, rival in sorted({"with": shoal, "without": without}.items(), reverse=bool(i % 2)):
            times[key].append(saves.alone(rival))
    without.close()
    return times


def _about(args: argparse.Namespace, trainer: Trainer) -> dict[str, Any]:
    state = trainer.state()
    everybody: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(everybody, sum(local_of(t).nbytes for t in state.values()))
    return {
        "ranks": dist.get_world_size(),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else f"{os.cpu_count()} CPU cores",
        "torch": torch.__version__,
        "bytes": sum(everybody),
        "tensors": len(state),
        "at": time.time(),
    }


def _write_down(args: argparse.Namespace, result: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        (args.as_rank / "result.tmp").write_text(json.dumps(result))
        (args.as_rank / "result.tmp").rename(args.as_rank / RESULT)


def _rotated(rivals: list[Rival], by: int) -> list[Rival]:
    """Nobody is always the first, nor always after the same neighbour's leftovers."""
    by %= len(rivals)
    return rivals[by:] + rivals[:by]


def _sums(trainer: Trainer) -> list[float]:
    return [float(local_of(t).double().sum()) for t in trainer.state().values()]


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"  {text}", flush=True)
