"""Closes what a batch leaves open: how many units at once, and where they run. No torch."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from shoal.decide.decision import Choices, Decision
from shoal.devices import visible_gpus
from shoal.errors import SetupError, SpecError
from shoal.journal.units import Folder, read_lines
from shoal.spec.batch import PLACE, Batch
from shoal.spec.run import Run

MOST_AT_ONCE = 4096


@dataclass(frozen=True)
class DecidedBatch:
    run: Run
    batch: Batch
    at_once: int
    gpus: tuple[str, ...]
    threads: int
    decisions: tuple[Decision, ...]


def decide_batch(run: Run, cores: int | None = None, nodes_here: int = 1) -> DecidedBatch:
    """On the node that runs it. `cores`: what a scheduler has given, where that is not what the process may use;
    `nodes_here`: nodes that are really one machine."""
    assert run.batch is not None
    batch, choices = run.batch, Choices()
    gpus = _gpus(batch)
    have = cores or max(1, usable_cores() // nodes_here)
    said = f"one for each GPU ({len(gpus)})" if gpus else f"one for each core ({have})"
    at_once = int(choices.choose("batch.at_once", batch.at_once, len(gpus) or have, said))
    if at_once > MOST_AT_ONCE:
        raise SpecError(f"batch.at_once is {at_once:,}, and one node runs at most {MOST_AT_ONCE:,}; lower it.")
    folder = batch.folder or os.getcwd()
    if not Path(folder).is_dir():
        raise SpecError(f"batch.folder {folder} is no folder here; give the one that the command is to run in.")
    startable(batch, folder)
    threads = run.resources.threads if isinstance(run.resources.threads, int) else max(1, have // at_once)
    # What was decided is of this node: another may have more cores, and the run file is of all.
    closed = batch.model_copy(update={"folder": folder})
    return DecidedBatch(run.model_copy(update={"batch": closed}), closed, at_once, gpus, threads, tuple(choices.made))


def items_of(batch: Batch, folder: Folder) -> list[str] | None:
    """Those of a batch that has begun are its own copy."""
    if folder.plan() is not None:
        return folder.read_items()
    if batch.items is None:
        return None
    return read_lines(Path(batch.items)) if isinstance(batch.items, str) else list(batch.items)


def startable(batch: Batch, folder: str) -> None:
    """Refuses a program that is not there, once, in the place of every unit."""
    program = batch.command[0]
    if PLACE.search(program):
        return
    path = batch.env.get("PATH", os.environ.get("PATH"))
    there = os.path.join(folder, program) if os.sep in program else program
    if shutil.which(there, path=path) is None:
        is_file = os.sep in program and os.path.isfile(there)
        what = f"{there} may not be executed; `chmod +x` it, or put its interpreter before it" if is_file else (
            f"there is no program {program} here; install it, correct batch.command, or give its whole path"
        )  # fmt: skip
        raise SetupError(f"{what}.")


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpus(batch: Batch) -> tuple[str, ...]:
    """By the names that CUDA_VISIBLE_DEVICES has for them."""
    named = batch.env.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
    count = visible_gpus()
    known = tuple(str(number) for number in range(count)) if named is None else tuple(
        name for name in (part.strip() for part in named.split(",")) if name
    )  # fmt: skip
    return known[:count]
