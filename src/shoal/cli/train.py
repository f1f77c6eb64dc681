"""Train on this machine, all its devices.

The run directory is runs/NAME in the workspace. A run that exists goes on where it stopped, if the run file still says
the same; `--fresh` sets the old one aside first.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack

from shoal.checkpoint.find import published
from shoal.cli.options import add_workspace, no_swarm
from shoal.cli.run import run_spec
from shoal.decide.auto import decide
from shoal.decide.checks import local_inputs, trainable
from shoal.decide.length import with_steps
from shoal.decide.load import load
from shoal.errors import SpecError, UsageError
from shoal.guard.begin import fresh_run, say_changed, writing
from shoal.guard.history import History, continues
from shoal.guard.supervise import supervise
from shoal.journal import lock
from shoal.journal.rundir import RunDir, workspace
from shoal.journal.suggested import command
from shoal.own.files import in_folder
from shoal.own.record import sentence
from shoal.spec import Run
from shoal.spec.begun import Difference, as_begun, differences
from shoal.train.prolong import way_on

TAKES_OVERRIDES = True
MOST_NAMED = 6  # differing keys in one sentence


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="RUN.yaml", help="the run file (`shoal init` writes one)")
    add_workspace(parser)
    parser.add_argument("--name", metavar="NAME", help="another name for the run: name=NAME")
    parser.add_argument(
        "--processes", type=int, metavar="N", help="worker processes; the same as resources.processes=N"
    )
    parser.add_argument("--fresh", action="store_true", help="set an existing run of that name aside and start anew")


def run(args: argparse.Namespace) -> int:
    overrides = list(args.overrides)
    if args.processes is not None:
        overrides.append(f"resources.processes={args.processes}")
    spec = load(args.file, overrides).run
    if spec.script is not None:
        return run_spec(spec, workspace(args.workspace), args.fresh)
    if spec.batch is not None:
        from shoal.cli import batch

        return batch.run_spec(spec, workspace(args.workspace), args.fresh)
    trainable(spec)
    run_dir = RunDir.of(spec.name, workspace(args.workspace))
    no_swarm(run_dir)
    if run_dir.exists() and not args.fresh:
        return _go_on(run_dir, spec, args.file)
    return _begin(run_dir, spec, args.fresh, args.file)


def _begin(run_dir: RunDir, spec: Run, fresh: bool, file: str) -> int:
    # All that can be wrong is asked before anything is written or moved.
    local_inputs(spec)
    _say_what_is_remote(spec, fresh)
    decided = decide(spec, run_dir.workspace)
    with fresh_run(run_dir, decided.run):
        _say_checked(decided.run, run_dir, file)
        return supervise(run_dir, decided.run, decided.world, decisions=decided.decisions, held=True)


def _say_what_is_remote(spec: Run, fresh: bool) -> None:
    """A run whose directory is gone goes on from its copies; a fresh one is not begun over somebody's."""
    where = spec.remote_checkpoints
    if where is None:
        return
    there = [one for one in published(where) if one.on_history]
    if there and fresh:
        raise UsageError(
            f"{where} holds checkpoints of a run '{spec.name}' up to step {there[0].name.step}: `--name OTHER` begins "
            "another run, or delete them first."
        )
    if there:
        print(f"run {spec.name} goes on from {where}, which holds step {there[0].name.step}")


def _say_checked(run: Run, run_dir: RunDir, file: str) -> None:
    if run.own.objects:
        print(f"{sentence(run_dir.workspace, run, in_folder(run_dir.code), file)}.", flush=True)


def _go_on(run_dir: RunDir, spec: Run, file: str) -> int:
    with ExitStack() as held:
        with writing(run_dir):
            held.enter_context(lock.hold(run_dir))
        before = with_steps(load(run_dir.spec_file).run, run_dir.workspace)
        spec = with_steps(as_begun(before, spec), run_dir.workspace)
        if differ := differences(before, spec, auto_is_equal=True):
            raise SpecError(differs(run_dir.name, differ))
        history = History.of(run_dir)
        if history.finished:
            print(
                f"run {run_dir.name} is finished: {history.step} steps. {command('report', run_dir)} shows it, "
                f"{command('resume', run_dir, way_on(before, history.step, 2 * history.step))} trains on, `--fresh` "
                "starts anew."
            )
            return 0
        local_inputs(before, begun=history.saved_step > 0)
        decided = decide(before, run_dir.workspace)
        say_changed(before, run_dir)
        _say_checked(before, run_dir, file)
        print(continues(run_dir, before.steps))
        return supervise(run_dir, decided.run, decided.world, held=True)


def differs(name: str, differ: list[Difference], fresh: bool = True) -> str:
    """`fresh`: the verb has that option."""
    named = "; ".join(str(d) for d in differ[:MOST_NAMED])
    more = f"; and {len(differ) - MOST_NAMED} more" if len(differ) > MOST_NAMED else ""
    ways = ["`--name OTHER` for a run of its own"] + ["`--fresh` to set the old one aside"] * fresh
    if all(d.safe for d in differ):
        changes = " ".join(d.argument for d in differ[:MOST_NAMED])
        ways.append(f"`shoal resume {name} {changes}` to change it on purpose")
    return f"run '{name}' exists with another spec: {named}{more}. Use {', or '.join(ways)}."
