"""A node of a batch, whoever started it: `python -m shoal.launch.agent` of a run file with a section `batch:`.

It needs no other node, only the shared workspace: nodes come and go one by one. Who it is comes from SHOAL_NODE,
SHOAL_NODES and SHOAL_JOB, as with every agent; in an array of Slurm, whose tasks are jobs of one node each, from
SHOAL_BATCH_NODE, SHOAL_BATCH_NODES and SHOAL_BATCH_JOB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from shoal.batch.session import run_batch
from shoal.decide.batch import decide_batch
from shoal.decide.checks import trainable
from shoal.decide.load import load
from shoal.errors import DONE, SpecError, UsageError
from shoal.guard.begin import create, write_spec, writing
from shoal.guard.history import History
from shoal.journal.rundir import RunDir
from shoal.launch.bundle import Bundle
from shoal.launch.holding import hold
from shoal.observe.batch import tally_of
from shoal.spec import Run
from shoal.spec.begun import differences


def run_node(file: Path, folder: Path, env: Mapping[str, str]) -> int:
    asked = load(file).run
    node = _number(env, ("SHOAL_BATCH_NODE", "SHOAL_NODE"), 0)
    nodes = _number(env, ("SHOAL_BATCH_NODES", "SHOAL_NODES"), 1)
    job = env.get("SHOAL_BATCH_JOB") or env.get("SHOAL_JOB") or None
    asked = placed(asked, file.parent / Bundle.CODE)
    trainable(asked, "batch")
    together = max(1, _number(env, ("SHOAL_NODES_HERE",), 1))
    decided = decide_batch(asked, _cores(asked), together)
    run_dir = RunDir.of(asked.name, folder)
    if node:
        return run_batch(run_dir, decided, node=node, nodes=nodes, job=job)
    with ExitStack() as held:
        with writing(run_dir):
            hold(held, run_dir, job)
        begun = run_dir.exists()
        if begun:
            differ = [
                d for d in differences(load(run_dir.spec_file).run, decided.run, auto_is_equal=True) if not d.safe
            ]
            if differ:
                named = "; ".join(map(str, differ[:6]))
                raise SpecError(f"run '{asked.name}' exists with another spec: {named}. Give this one another name.")
            tally = tally_of(run_dir)
            if tally is not None and tally.done == tally.units and History.of(run_dir).finished:
                print(f"batch {run_dir.name} is finished: all {tally.units:,} units are done.")
                return DONE
        with writing(run_dir):
            (write_spec if begun else create)(run_dir, decided.run)
        return run_batch(run_dir, decided, nodes=nodes, job=job, fresh=not begun)


def placed(asked: Run, near: Path) -> Run:
    """As it is on this node: in the copy of the code that came with it, and with the items from there."""
    batch, code = asked.batch, asked.launch.code
    assert batch is not None
    changed: dict[str, str] = {}
    if code is not None and near.is_dir():
        changed["folder"] = batch.folder or str(near)
        if isinstance(batch.items, str) and Path(batch.items).is_relative_to(code):
            changed["items"] = str(near / Path(batch.items).relative_to(code))
    return asked.model_copy(update={"batch": batch.model_copy(update=changed)})


def _cores(asked: Run) -> int | None:
    """What was asked of the scheduler: a process may see all of its machine's."""
    return asked.launch.cpus or (None if asked.launch.on == "local" else 1)


def _number(env: Mapping[str, str], names: Sequence[str], default: int) -> int:
    """Of the first of these variables that is set."""
    name = next((name for name in names if env.get(name)), None)
    if name is None:
        return default
    if not env[name].isdecimal() or len(env[name]) > 7:
        raise UsageError(f"{name} is '{env[name][:40]}', which is not a number.")
    return int(env[name])
