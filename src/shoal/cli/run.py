"""Run a training script of yours under Shoal's supervisor: `shoal run [options] SCRIPT [arguments of the script]`.

It is started as torchrun would start it, and needs no edit. Its processes are watched: failures are named and it is
started again, a hang is found with the Python stack, its steps, losses and saves are seen and journaled. Options and
values of the run file (`guard.restarts=5`) stand before SCRIPT; everything after it belongs to the script.

shoal run train.py --lr 1e-3
shoal run --processes 2 --name try-3 guard.hang=30s train.py --lr 1e-3
shoal run run.yaml                     a run file with a section `script:`
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.options import add_workspace, no_swarm
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.journal.rundir import RunDir
    from shoal.spec.run import Run

OPTIONS = ("--name", "--processes", "--workspace", "--resume", "--checkpoints")  # with a value
RUN_FILES = (".yaml", ".yml")
TAKES_OVERRIDES = True
OWN_OPTIONS = ("name",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", metavar="SCRIPT", help="a Python file, or a run file that names one")
    add_workspace(parser)
    parser.add_argument(
        "--name", metavar="NAME", help="name of the run (default: that of the file, with a free number)"
    )
    parser.add_argument("--processes", type=int, metavar="N", help="the same as script.processes=N")
    parser.add_argument(
        "--resume", metavar="WORDS", help="arguments to go on with after a failure: --resume '--ckpt {checkpoint}'"
    )
    parser.add_argument("--checkpoints", metavar="GLOB", help="where it saves; the same as script.checkpoints=GLOB")
    parser.add_argument("--fresh", action="store_true", help="set an existing run of that name aside and start anew")
    parser.add_argument("--horovod", action="store_true", help="the same as script.horovod=true")
    parser.add_argument("--no-probe", action="store_true", help="the same as script.probe=false")


def cut(argv: list[str], options: Collection[str] = OPTIONS) -> tuple[list[str], list[str]]:
    """What stands before the arguments of the script, with it, and those. `options` are followed by a value."""
    from shoal.spec.overrides import split_overrides

    at = 0
    while at < len(argv):
        word = argv[at]
        if word == "--":
            return [*argv[:at], *argv[at + 1 : at + 2]], argv[at + 2 :]
        if word in options or (word.startswith("--") and "." in word and "=" not in word):
            at += 2
        elif word.startswith("-") or split_overrides([word])[1]:
            at += 1
        else:
            return argv[: at + 1], argv[at + 1 :]
    return argv, []


def run(args: argparse.Namespace) -> int:
    from shoal.decide.load import load
    from shoal.journal.rundir import workspace
    from shoal.spec.resolve import of_values

    folder = workspace(args.workspace)
    overrides = [*args.overrides, *_asked(args)]
    if args.script.endswith(RUN_FILES):
        words = only_values(args.script, args.after)
        spec = load(args.script, [*overrides, *words]).run
        if spec.script is None:
            raise UsageError(f"{args.script} has no section `script:`; `shoal train {args.script}` trains it.")
        return run_spec(spec, folder, args.fresh)
    from shoal.script.file import look_at

    look_at(Path(args.script))  # before it is made a run of
    name = args.name or free_name(Path(args.script), folder)
    return run_spec(
        of_values({"name": name, "script": {"path": args.script, "args": args.after}}, overrides).run,
        folder,
        args.fresh,
    )


def run_spec(spec: Run, folder: Path, fresh: bool) -> int:
    from shoal.decide.checks import trainable
    from shoal.decide.script import decide_script
    from shoal.guard.begin import fresh_run
    from shoal.guard.supervise import supervise
    from shoal.journal.rundir import RunDir

    trainable(spec, "script")
    run_dir = RunDir.of(spec.name, folder)
    no_swarm(run_dir)
    if run_dir.exists() and not fresh:
        return go_on(run_dir, spec)
    decided = decide_script(spec)
    with fresh_run(run_dir, decided.run):
        return supervise(run_dir, decided.run, decided.world, decisions=decided.decisions, held=True)


def go_on(run_dir: RunDir, spec: Run) -> int:
    """With a run that exists, if this is the same one."""
    from shoal.cli.train import differs
    from shoal.decide.load import load
    from shoal.decide.script import decide_script
    from shoal.errors import SpecError
    from shoal.guard.begin import writing
    from shoal.guard.history import History
    from shoal.guard.supervise import supervise
    from shoal.journal import lock
    from shoal.journal.suggested import command
    from shoal.spec.begun import differences

    with ExitStack() as held:
        with writing(run_dir):
            held.enter_context(lock.hold(run_dir))
        before = load(run_dir.spec_file).run
        if spec.script is not None and spec.script.folder is None and before.script is not None:
            spec = spec.model_copy(update={"script": spec.script.model_copy(update={"folder": before.script.folder})})
        if differ := differences(before, spec, auto_is_equal=True):
            raise SpecError(differs(run_dir.name, differ))
        if History.of(run_dir).finished:
            print(
                f"run {run_dir.name} is finished. {command('report', run_dir)} shows it, `--fresh` starts it anew, "
                "`--name OTHER` begins another."
            )
            return 0
        decided = decide_script(before)
        return supervise(run_dir, decided.run, decided.world, held=True)


def _asked(args: argparse.Namespace) -> list[str]:
    """The options, as values of the run file."""
    found = [] if args.processes is None else [f"script.processes={args.processes}"]
    found += [] if args.checkpoints is None else [f"script.checkpoints={args.checkpoints}"]
    found += ["script.probe=false"] if args.no_probe else []
    found += ["script.horovod=true"] if args.horovod else []
    found += [f"name={args.name}"] if args.name and args.script.endswith(RUN_FILES) else []
    if args.resume is not None:
        try:
            words = shlex.split(args.resume)
        except ValueError as e:
            raise UsageError(f"--resume '{args.resume}' is no list of words ({e}); mend its quotes.") from None
        found.append("script.resume=" + json.dumps(words))
    return found


def only_values(
    file: str, after: list[str], otherwise: str = "the script's arguments stand in script.args"
) -> list[str]:
    from shoal.spec.overrides import split_overrides

    rest, values = split_overrides(after)
    if rest:
        raise UsageError(f"`{rest[0]}` after a run file is no NAME=VALUE; {otherwise}.")
    return values


def free_name(script: Path, folder: Path) -> str:
    """That of the file; with a number where a run of that name is there, for a script is tried many times."""
    from shoal.journal.rundir import RunDir

    stem = re.sub(r"[^A-Za-z0-9._-]", "-", script.stem).lstrip("._-")[:80] or "script"
    number = 1
    while (RunDir.of(name := stem if number == 1 else f"{stem}-{number}", folder)).path.exists():
        number += 1
    return name
