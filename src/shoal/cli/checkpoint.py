"""List, verify and export the checkpoints of a run.

  shoal checkpoint ls RUN                   what there is, and what is wrong with it
  shoal checkpoint verify RUN [--step N]    every byte against its checksum; exit code 78 if one differs
  shoal checkpoint export RUN DIR           the newest good one as a Hugging Face folder

RUN is the name of a run in the workspace, or the path of its directory.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from shoal.checkpoint.find import Found, damage, folder_of, newest, open_checkpoint, published
from shoal.checkpoint.manifest import MANIFEST, Corrupt
from shoal.errors import CheckpointError, UsageError
from shoal.observe.words import size
from shoal.track.rundir import RunDir, find_run, workspace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="ls | verify | export")
    ls = verbs.add_parser("ls", help="list the checkpoints of a run", description="List the checkpoints of a run.")
    verify = verbs.add_parser("verify", help="compare every byte with its checksum", description=_verify.__doc__)
    out = verbs.add_parser("export", help="write a Hugging Face folder", description=_export.__doc__)
    for verb in (ls, verify, out):
        verb.add_argument("run", metavar="RUN", help="a run's name, or the path of its directory")
        verb.add_argument(
            "--workspace", metavar="DIR", help="the folder that holds runs/ (default: $SHOAL_WORKSPACE or here)"
        )
    for verb in (ls, verify):
        verb.add_argument("--json", action="store_true", help="machine-readable output")
    for verb in (verify, out):
        verb.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step")
    out.add_argument("folder", metavar="DIR", help="a folder that does not exist yet, or is empty")
    out.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="cast the weights (default: as they are)")
    out.add_argument("--tokenizer", metavar="PATH", help="another than that of the run's data; 'byte'; or 'none'")


def run(args: argparse.Namespace) -> int:
    if args.verb is None:
        raise UsageError("say what to do: `shoal checkpoint ls RUN`, `verify RUN` or `export RUN DIR`.")
    run_dir = find_run(args.run, workspace(args.workspace))
    if not published(run_dir.checkpoints):
        raise CheckpointError(f"run '{run_dir.name}' has no checkpoint yet (looked in {run_dir.checkpoints}).")
    if args.verb == "ls":
        _ls(run_dir, args.json)
    elif args.verb == "verify":
        _verify(run_dir, args.step, args.json)
    else:
        _export(run_dir, args.step, args.folder, args.tokenizer, args.dtype)
    return 0


def _ls(run_dir: RunDir, as_json: bool) -> None:
    rows: list[dict[str, Any]] = []
    for step, path in reversed(published(run_dir.checkpoints)):
        try:
            found = open_checkpoint(path)
        except CheckpointError as e:
            rows.append({"step": step, "good": False, "reason": str(e), "path": str(path)})
        else:
            rows.append({"step": step, "good": True, **_facts(found)})
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'step':>10}  {'saved':<19}  {'size':>10}  {'ranks':>5}  state")
    for row in rows:
        if row["good"]:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["saved_at"]))
            print(f"{row['step']:>10}  {when:<19}  {size(row['bytes']):>10}  {row['world']:>5}  complete")
        else:
            print(f"{row['step']:>10}  {'-':<19}  {'-':>10}  {'-':>5}  bad: {row['reason']}")


def _verify(run_dir: RunDir, step: int | None, as_json: bool) -> None:
    """Compare every byte of the checkpoints of a run (of one with --step) with its checksum."""
    paths = [path for _, path in reversed(published(run_dir.checkpoints))] if step is None else [_folder(run_dir, step)]
    rows: list[dict[str, Any]] = []
    for path in paths:
        wrong = _damage(path, quiet=as_json)
        rows.append({"path": str(path), "good": not wrong, "wrong": wrong})
        if not as_json:
            for words in wrong or ["every byte is as it was written"]:
                print(f"{path.name}: {words}")
    if as_json:
        print(json.dumps(rows, indent=2))
    if bad := [row for row in rows if not row["good"]]:
        raise CheckpointError(
            f"{len(bad)} of {len(rows)} checkpoints of run '{run_dir.name}' cannot be used: "
            f"{Path(bad[0]['path']).name}: {bad[0]['wrong'][0]}; a resume passes over it, or delete the folder."
        )


def _export(run_dir: RunDir, step: int | None, folder: str, tokenizer: str | None, dtype: str | None) -> None:
    """Write the weights of the newest good checkpoint (or of --step) as a Hugging Face folder."""
    from shoal.checkpoint.export import export  # torch, which `ls` and `verify` do without
    from shoal.spec import load

    spec = load(run_dir.spec_file).run
    if step is not None:
        found = _open(_folder(run_dir, step))
        export(found, spec, folder, tokenizer, dtype)
    else:
        found = _export_newest(run_dir, lambda found: export(found, spec, folder, tokenizer, dtype))
    print(f"step {found.step} of run {run_dir.name} → {folder}")


def _export_newest(run_dir: RunDir, export: Callable[[Found], None]) -> Found:
    """The newest whose every byte is good: what is damaged shows when it is read, and then the one before is tried."""
    before = None
    while True:
        found = newest(run_dir.checkpoints, before=before)
        if found is None:
            raise CheckpointError(f"no checkpoint of run '{run_dir.name}' can be used; restore one from a copy.")
        for passed in found.skipped:
            print(f"shoal: passed over {passed}", file=sys.stderr)
        try:
            export(found)
        except Corrupt as e:
            print(f"shoal: passed over {e}", file=sys.stderr)
            before = found.step
        else:
            return found


def _facts(found: Found) -> dict[str, Any]:
    m = found.manifest
    told = {"saved_at": m.saved_at, "world": m.world, "attempt": m.attempt}
    return {**told, "bytes": found.bytes, "path": str(found.path)}


def _folder(run_dir: RunDir, step: int) -> Path:
    path = folder_of(run_dir.checkpoints, step)
    if not path.is_dir():
        steps = ", ".join(str(step) for step, _ in reversed(published(run_dir.checkpoints)))
        raise UsageError(f"run '{run_dir.name}' has no checkpoint of step {step}; it has {steps}.")
    return path


def _open(path: Path) -> Found:
    try:
        return open_checkpoint(path)
    except CheckpointError as e:
        raise CheckpointError(f"{path} cannot be used: {e}.") from e


def _damage(path: Path, quiet: bool) -> list[str]:
    try:
        found = open_checkpoint(path)
    except CheckpointError as e:
        return [str(e)]
    with _progress(quiet) as bar:
        task = bar.add_task(path.name, total=found.bytes) if bar is not None else None
        wrong = damage(found, on_bytes=lambda n: bar.advance(task, n) if bar is not None else None)
    known = {MANIFEST, *found.manifest.files}
    if not quiet:
        for name in sorted(entry.name for entry in path.iterdir() if entry.name not in known):
            print(f"{path.name}: note: {name} is no part of it, and is ignored")
    return wrong


def _progress(quiet: bool) -> AbstractContextManager[Any]:
    """A bar with an ETA on a terminal; nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console
    from rich.progress import Progress

    return Progress(console=Console(stderr=True), transient=True)
