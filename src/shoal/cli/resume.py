"""Go on with a run that stopped or failed, from its newest checkpoint.

The run's own spec is used. What may change is given as overrides and recorded: how long, how fast, on how many
processes, how often it saves. What would break the run's history (data, seed, model, batch) is refused. A launched run
is sent again to where it was, or to `--on`.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

from shoal.cli.launch import tell
from shoal.cli.options import BACKENDS, add_workspace, no_swarm
from shoal.decide.auto import decide
from shoal.decide.checks import local_inputs, trainable
from shoal.decide.length import with_steps
from shoal.decide.load import load
from shoal.decide.script import decide_script
from shoal.errors import UsageError
from shoal.guard.begin import Asked, same_data, say_changed, write_spec, writing
from shoal.guard.history import History, continues
from shoal.guard.supervise import supervise
from shoal.journal import lock
from shoal.journal.rundir import RunDir, find_run, workspace
from shoal.launch.job import Job, launched, run_file
from shoal.launch.send import alone, checked, request_of, send, where_known
from shoal.launch.watch import visible
from shoal.spec import Run
from shoal.spec.begun import Difference, differences
from shoal.train.course import course
from shoal.train.prolong import once, prolonged, way_on

TAKES_OVERRIDES = True
LAYOUT = ("mesh", "resources")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="NAME", help="the run's name (`shoal ps` lists them)")
    add_workspace(parser)
    parser.add_argument("--on", choices=BACKENDS, help="launch it there (default: as it was started before)")


def run(args: argparse.Namespace) -> int:
    folder = workspace(args.workspace)
    no_swarm(RunDir.of(args.run, folder))
    job = launched(args.run, folder)
    if job is not None or args.on is not None:
        return _launch(job, folder, args)
    return _here(find_run(args.run, folder), args)


def _launch(job: Job | None, folder: Path, args: argparse.Namespace) -> int:
    """The run as it was sent, with what is asked for now; the agents go on from the newest checkpoint."""
    run_dir = find_run(args.run, folder) if job is None else visible(job, folder)
    file = run_dir.spec_file if job is None else run_file(job, folder)
    chosen = [] if args.on is None else [f"launch.on={args.on}"]
    history = History.of(run_dir)  # empty where it is out of sight
    before = load(file).run
    spec = where_known(load(file, [*args.overrides, *chosen]).run, folder, history.step)
    _refuse(run_dir, history, differences(before, spec, auto_is_equal=False))
    if _finished(run_dir, history, spec):
        return 0
    if history.step and spec.train.steps != "auto":  # else node 0 does it
        known = load(run_dir.spec_file).run
        spec = once(prolonged(known, spec, history.step), known.train.schedule)
        _say_rate(spec, history.step)
    request = request_of(checked(spec, begun=history.saved_step > 0), folder)
    here = RunDir.of(spec.name, folder)
    with alone(here):
        tell(send(request), request, here, as_json=False)
    return 0


def _here(run_dir: RunDir, args: argparse.Namespace) -> int:
    with ExitStack() as held:
        with writing(run_dir):
            held.enter_context(lock.hold(run_dir))
        history = History.of(run_dir)
        before = load(run_dir.spec_file).run
        if before.batch is not None:
            from shoal.cli.batch import go_on_as

            spec = load(run_dir.spec_file, args.overrides).run
            _refuse(run_dir, history, differences(before, spec, auto_is_equal=False))
            return go_on_as(run_dir, before, spec)
        if before.script is not None:
            return _script(run_dir, history, before, args.overrides)
        opened = _open_again(history, args.overrides)
        asked_for = load(run_dir.spec_file, [*opened, *args.overrides]).run
        spec = with_steps(asked_for, run_dir.workspace, history.step)
        differ = [d for d in differences(before, spec, auto_is_equal=False) if f"{d.key}={d.new}" not in opened]
        _refuse(run_dir, history, differ)
        if _finished(run_dir, history, spec):
            return 0
        spec = once(prolonged(before, spec, history.step), before.train.schedule)
        trainable(spec)
        local_inputs(spec, begun=history.saved_step > 0)
        decided = decide(spec, run_dir.workspace)
        if decided.run != before:
            with writing(run_dir):
                write_spec(run_dir, decided.run)
        say_changed(decided.run, run_dir)
        asked = [Asked(d.key, d.new, f"asked for on resume; it was {d.old}") for d in differ]
        print(continues(run_dir, decided.run.steps))
        if spec.train.schedule.past != before.train.schedule.past:
            _say_rate(spec, history.step)
        return supervise(run_dir, decided.run, decided.world, decisions=decided.decisions, asked=asked, held=True)


def _script(run_dir: RunDir, history: History, before: Run, overrides: list[str]) -> int:
    """Somebody's: it goes on as after a failure, from what script.resume says."""
    spec = load(run_dir.spec_file, overrides).run
    differ = differences(before, spec, auto_is_equal=False)
    _refuse(run_dir, history, differ)
    if history.finished and not differ:
        print(
            f"run {run_dir.name} is finished: the script has ended. `shoal run --fresh --name {run_dir.name} SCRIPT` "
            "starts it anew."
        )
        return 0
    trainable(spec, "script")
    decided = decide_script(spec)
    if decided.run != before:
        with writing(run_dir):
            write_spec(run_dir, decided.run)
    asked = [Asked(d.key, d.new, f"asked for on resume; it was {d.old}") for d in differ]
    return supervise(run_dir, decided.run, decided.world, decisions=decided.decisions, asked=asked, held=True)


def _finished(run_dir: RunDir, history: History, spec: Run) -> bool:
    if spec.batch is not None and history.finished:
        print(f"batch {run_dir.name} is finished: all its units are done.")
        return True
    if not history.finished or spec.train.steps == "auto" or spec.steps > history.step:
        return False
    on = way_on(spec, history.step, 2 * history.step)
    print(f"run {run_dir.name} is finished: {history.step} steps. `shoal resume {run_dir.name} {on}` trains on.")
    return True


def _say_rate(spec: Run, step: int) -> None:
    if spec.train.schedule.past and spec.train.schedule.past[-1].until == step:
        print(course(spec)[-1])


def _refuse(run_dir: RunDir, history: History, differ: list[Difference]) -> None:
    for d in differ:
        if d.key == "name":
            raise UsageError(f"a run keeps its name; `shoal train {run_dir.spec_file} --name {d.new}` starts another.")
        if not d.safe:
            raise UsageError(
                f"{d}: that would break the history of run '{run_dir.name}'; "
                f"`shoal train {run_dir.spec_file} --name OTHER {d.argument}` starts another run."
            )
        if d.moved:
            same_data(run_dir, [source["path"] for source in d.new])
        if d.key == "train.steps" and d.new != "auto" and d.new < history.step:
            raise UsageError(f"train.steps={d.new} is less than the {history.step} steps that are done.")


def _open_again(history: History, overrides: list[str]) -> list[str]:
    """A new number of processes needs a new layout: what Shoal had decided about it is decided anew, what a person
    had asked for stays."""
    if not any(override.startswith(LAYOUT) for override in overrides):
        return []
    return [f"{key}=auto" for key in history.auto if key.startswith(LAYOUT)]
