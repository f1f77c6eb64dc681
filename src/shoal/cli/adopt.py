"""Read a training script of yours and say what is wrong with it: `shoal adopt [options] SCRIPT [its arguments]`.

The script and the modules of its own project are read; nothing of it is run unless you say --measure. Then it is run
for a few steps: twice, killed after a save and resumed, and on two processes; findings are confirmed or refuted by the
losses. Nothing of yours is changed unless you say --apply. Options stand before SCRIPT, all after it is the script's.
Exit code 0: no defect was found; 2: at least one was (hints do not count).

With `--to run-file` it writes the run file by which Shoal itself trains the same, where it can (else 2, and the line
that prevents it). Words after SCRIPT are then read as if it were started with them; values such as train.steps=100 may
stand before it.

shoal adopt train.py
shoal adopt --to run-file --out run.yaml train.py --lr 1e-4
shoal adopt --patch mend.diff train.py
shoal adopt --measure --resume '--resume {checkpoint}' train.py --steps 40
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from shoal.errors import DONE, WRONG_USAGE, UsageError

OPTIONS = ("--patch", "--steps", "--resume", "--checkpoints", "--patience", "--to", "--out")  # with a value
TAKES_OVERRIDES = True
RUN_FILE, RUN_FILES = "run-file", (".yaml", ".yml")
FEWEST, MOST = 2, 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", metavar="SCRIPT", help="the Python file that trains")
    parser.add_argument("--json", action="store_true", help="the report as JSON, for programs")
    parser.add_argument(
        "--patch", metavar="FILE", help="write a diff that mends what can be mended by rule (-: print it)"
    )
    parser.add_argument("--apply", action="store_true", help="change the files of the script that way")
    parser.add_argument("--measure", action="store_true", help="run the script, and try what was found")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="of each run that is measured (20)")
    parser.add_argument(
        "--resume", metavar="WORDS", help="arguments that it goes on with: --resume '--ckpt {checkpoint}'"
    )
    parser.add_argument("--checkpoints", metavar="GLOB", help="where it saves, if not by torch.save")
    parser.add_argument(
        "--patience", type=float, default=600.0, metavar="SECONDS", help="a run that is silent so long hangs (600)"
    )
    parser.add_argument("--to", choices=(RUN_FILE,), help="write the run file by which Shoal trains the same")
    parser.add_argument("--out", metavar="OUT.yaml", help="of --to: the file (default: the script's name, .yaml)")


def run(args: argparse.Namespace) -> int:
    from shoal.adopt.doctor import examine
    from shoal.adopt.patch import patch, write
    from shoal.adopt.report import as_json, as_text

    if not FEWEST <= args.steps <= MOST:
        raise UsageError(f"--steps must be from {FEWEST} to {MOST:,}.")
    if not 0 < args.patience < float("inf"):
        raise UsageError("--patience must be more than 0, and a number.")
    _to_behind(args)
    if args.to == RUN_FILE:
        return _to_run_file(args)
    if args.out is not None:
        raise UsageError("--out is for --to run-file alone; leave it out.")
    if args.overrides:
        raise UsageError(f"`{args.overrides[0]}` is a value of a run file, which --to run-file alone writes.")
    if args.after and not args.measure:
        raise UsageError(
            f"`{args.after[0]}` after SCRIPT is an argument of the script, which is run with --measure only."
        )
    if args.json and args.patch == "-":
        raise UsageError("--json and --patch - both print; give --patch a file.")
    if args.patch and args.patch != "-":
        _refuse_to_overwrite(Path(args.patch))
    report, measured = examine(Path(args.script)), None
    if args.measure:
        from shoal.adopt.measure import measure

        report, measured = measure(report, args)
    made = patch(report)
    if args.patch == "-":
        print(made.diff, end="")
    elif args.json:
        print(json.dumps(as_json(report, made, measured), indent=2))
    else:
        print(as_text(report, made, measured))
    if args.patch and args.patch != "-":
        Path(args.patch).write_text(made.diff, encoding="utf-8", newline="")
        print(f"wrote {args.patch}: it mends {len(made.mended)} of {len(report.defects)}", file=sys.stderr)
    if args.apply:
        names = write(made)
        print(f"changed {', '.join(names)}" if names else "there is nothing to change", file=sys.stderr)
    return WRONG_USAGE if report.defects else DONE


def _refuse_to_overwrite(file: Path) -> None:
    """What is there may be the script itself; only another diff is written over."""
    if file.is_file() and file.stat().st_size:
        with open(file, "rb") as f:
            if [f.readline(4096)[:4], f.readline(4096)[:4]] == [b"--- ", b"+++ "]:
                return
        raise UsageError(f"--patch {file} is there and is no diff; give another name.")
    if file.exists() and not file.is_file():
        raise UsageError(f"--patch {file} is no file; give the name of a file to write.")
    if not file.parent.is_dir():
        raise UsageError(f"--patch {file}: there is no folder {file.parent}; make it, or give another name.")


def _to_behind(args: argparse.Namespace) -> None:
    """`shoal adopt train.py --to run-file run.yaml` is what people type; the script's own words come before."""
    after = list(args.after)
    at = next((i for i in range(len(after) - 1) if after[i : i + 2] == ["--to", RUN_FILE]), None)
    if args.to is not None or at is None:
        return
    rest = after[at + 2 :]
    if rest[:1] == ["--out"] and len(rest) > 1:
        rest = rest[1:]
    if len(rest) > 1 or (rest and not rest[0].endswith(RUN_FILES)):
        raise UsageError(f"after `--to {RUN_FILE}` comes the name of the run file (.yaml) and nothing else.")
    args.to, args.out, args.after = RUN_FILE, rest[0] if rest else args.out, after[:at]


def _to_run_file(args: argparse.Namespace) -> int:
    from shoal.adopt.native.run_file import make, write
    from shoal.adopt.project import read_project
    from shoal.adopt.training import Training

    for option in ("json", "patch", "apply", "measure"):
        if getattr(args, option):
            raise UsageError(
                f"--{option} is of the report, and --to {RUN_FILE} writes a run file; leave one of them out."
            )
    file = Path(args.out or f"{Path(args.script).stem}.yaml")
    if not file.name.endswith(RUN_FILES):
        raise UsageError(f"--out {file}: a run file ends in .yaml.")
    if file.exists():
        raise UsageError(f"{file} is there already; give another name with --out.")
    if not file.parent.is_dir():
        raise UsageError(f"--out {file}: there is no folder {file.parent}; make it, or give another name.")
    made = make(Training(read_project(Path(args.script))), args.after, args.overrides, file)
    write(made, file)
    print(f"{file} written: what {args.script} trains, as a run of Shoal's own.")
    for question in made.questions:
        print(f"  ? {question}")
    for command in made.prepare:
        print(f"First: {command}")
    print(f"Next: read it, then `shoal show {file}`.")
    return DONE
