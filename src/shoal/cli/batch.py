"""Run one command over many units, each of which is done once: `shoal batch [options] -- COMMAND …`, or a run file.

`{index}` (or `{index:05}`), `{units}` and `{item}` in the command stand for the unit's number, how many there are, and
its line of --items. Units that fail are tried again, later each time; exit codes 2 and 78 are not. Killed and resumed
(`shoal resume NAME`), it runs what is not done, and nothing twice. Options and values of the run file
(`batch.retries=5`) stand before the command.

shoal batch --units 20 -- python clean.py --part {index} --of {units}
shoal batch --items files.txt --at-once 8 --timeout 30min -- gzip -k {item}
shoal batch batch.yaml                 a run file with a section `batch:`
shoal launch batch.yaml --on slurm launch.nodes=4
"""

from __future__ import annotations

import argparse
import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.options import add_workspace, no_swarm
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.journal.rundir import RunDir
    from shoal.spec.run import Run

INTERPRETER = re.compile(r"(python|perl|node|ruby)[\d.]*|(ba|da|z)?sh|Rscript")
OPTIONS = ("--name", "--units", "--items", "--at-once", "--retries", "--timeout", "--outputs", "--workspace")
RUN_FILES = (".yaml", ".yml")
TAKES_OVERRIDES = True
OWN_OPTIONS = ("name", "units", "items", "retries", "timeout", "outputs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("command", metavar="COMMAND", help="a program with its arguments, or a run file")
    add_workspace(parser)
    parser.add_argument("--name", metavar="NAME", help="name of the run (default: the script's or program's)")
    parser.add_argument("--units", metavar="N", help="how many units; the same as batch.units=N")
    parser.add_argument("--items", metavar="FILE", help="one unit for each line; the same as batch.items=FILE")
    parser.add_argument("--at-once", metavar="N", help="units at a time; the same as batch.at_once=N")
    parser.add_argument("--retries", metavar="N", help="of each unit; the same as batch.retries=N")
    parser.add_argument("--timeout", metavar="TIME", help="of one attempt; the same as batch.timeout=TIME")
    parser.add_argument("--outputs", metavar="PATH", help="what a unit makes; the same as batch.outputs=PATH")
    parser.add_argument("--fresh", action="store_true", help="set an existing run of that name aside and start anew")


def run(args: argparse.Namespace) -> int:
    from shoal.decide.load import load
    from shoal.journal.rundir import workspace
    from shoal.spec.resolve import of_values

    folder = workspace(args.workspace)
    if args.command.endswith(RUN_FILES):
        from shoal.cli.run import only_values

        words = only_values(args.command, args.after, "options stand before it, the command in batch.command")
        named = [f"name={args.name}"] if args.name else []
        spec = load(args.command, [*args.overrides, *_asked(args), *named, *words]).run
        if spec.batch is None:
            raise UsageError(f"{args.command} has no section `batch:`; `shoal train {args.command}` trains it.")
        return run_spec(spec, folder, args.fresh)
    if args.units is None and args.items is None and not any(o.startswith("batch.") for o in args.overrides):
        raise UsageError("how many units? Give --units N, or --items FILE with one unit a line.")
    from shoal.cli.run import free_name

    command = [args.command, *args.after]
    name = args.name or free_name(_program(command), folder)
    return run_spec(
        of_values({"name": name, "batch": {"command": command}}, [*args.overrides, *_asked(args)]).run,
        folder,
        args.fresh,
    )


def run_spec(spec: Run, folder: Path, fresh: bool) -> int:
    from shoal.batch.session import run_batch
    from shoal.decide.batch import decide_batch
    from shoal.decide.checks import trainable
    from shoal.guard.begin import fresh_run
    from shoal.journal.rundir import RunDir

    trainable(spec, "batch")
    run_dir = RunDir.of(spec.name, folder)
    no_swarm(run_dir)
    if run_dir.exists() and not fresh:
        return go_on(run_dir, spec)
    decided = decide_batch(spec)
    look_at_items(decided.run)  # before it is made a run of
    with fresh_run(run_dir, decided.run):
        return run_batch(run_dir, decided)


def look_at_items(spec: Run) -> None:
    from shoal.journal.units import read_lines

    assert spec.batch is not None
    if isinstance(spec.batch.items, str):
        read_lines(Path(spec.batch.items))


def go_on(run_dir: RunDir, spec: Run) -> int:
    """With a batch that exists, if this is the same one."""
    from shoal.cli.train import differs
    from shoal.decide.load import load
    from shoal.errors import SpecError
    from shoal.guard.begin import writing
    from shoal.journal import lock
    from shoal.spec.begun import differences

    with ExitStack() as held:
        with writing(run_dir):
            held.enter_context(lock.hold(run_dir))
        before = load(run_dir.spec_file).run
        if spec.batch is not None and spec.batch.folder is None and before.batch is not None:
            spec = spec.model_copy(update={"batch": spec.batch.model_copy(update={"folder": before.batch.folder})})
        if differ := differences(before, spec, auto_is_equal=True):
            raise SpecError(differs(run_dir.name, differ))
        return go_on_as(run_dir, before, before)


def go_on_as(run_dir: RunDir, before: Run, spec: Run) -> int:
    """The run is held. `spec` is what it is from now on."""
    from shoal.batch.session import run_batch
    from shoal.decide.batch import decide_batch
    from shoal.decide.checks import trainable
    from shoal.guard.begin import Asked, write_spec, writing
    from shoal.guard.history import History
    from shoal.journal.suggested import command
    from shoal.journal.units import Folder
    from shoal.observe.batch import tally_of
    from shoal.spec.begun import differences

    tally = tally_of(run_dir)
    if tally is not None and tally.done == tally.units and History.of(run_dir).finished:
        print(
            f"batch {run_dir.name} is finished: all {tally.units:,} units are done. {command('report', run_dir)} shows "
            "it, `--fresh` starts it anew, `--name OTHER` begins another."
        )
        return 0
    trainable(spec, "batch")
    decided = decide_batch(spec)
    if decided.run != before:
        with writing(run_dir):
            write_spec(run_dir, decided.run)
    if tally is not None and Folder(run_dir).plan() is not None:
        print(f"batch {run_dir.name} goes on: {tally.sentence()}")
    differ = differences(before, spec, auto_is_equal=False)
    asked = [Asked(d.key, d.new, f"asked for on resume; it was {d.old}") for d in differ]
    return run_batch(run_dir, decided, asked=asked)


def _program(command: list[str]) -> Path:
    """What a person calls it by: the script, where an interpreter runs one."""
    first = Path(command[0])
    if INTERPRETER.fullmatch(first.name):
        scripts = (Path(word) for word in command[1:] if not word.startswith("-"))
        return next((path for path in scripts if path.suffix in (".py", ".sh", ".pl", ".R", ".js")), first)
    return first


def _asked(args: argparse.Namespace) -> list[str]:
    """The options, as values of the run file."""
    known = {
        "units": args.units,
        "at_once": args.at_once,
        "retries": args.retries,
        "timeout": args.timeout,
    }
    found = [f"batch.{name}={value}" for name, value in known.items() if value is not None]
    found += [] if args.items is None else [f"batch.items={json.dumps(args.items)}"]
    found += [] if args.outputs is None else [f"batch.outputs={json.dumps(args.outputs)}"]
    return found
