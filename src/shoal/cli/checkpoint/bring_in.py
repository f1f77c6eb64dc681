"""`shoal checkpoint import`: a folder of DCP, DeepSpeed or Hugging Face, or a checkpoint, as weights to start from."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from shoal.cli.checkpoint.shared import note, progress
from shoal.journal.rundir import workspace
from shoal.readable import size


def run(args: argparse.Namespace) -> None:
    from shoal.checkpoint.foreign.bring_in import bring_in, open_source, size_of
    from shoal.checkpoint.foreign.shapes import model_like

    like = model_like(Path(args.like)) if args.like else None
    with ExitStack() as stack:
        source = open_source(args.source, workspace(args.workspace), stack)
        on_bytes = stack.enter_context(progress("imported", size_of(source), args.json))
        brought = bring_in(source, args.folder, like, args.step, args.weights, on_bytes)
    if args.json:
        print(json.dumps(asdict(brought), indent=2))
        return
    for words in brought.notes:
        note(f"note: {words}")
    names = f", names of {brought.convention}" if brought.convention else ""
    print(f"{brought.kind}{names}: {brought.tensors} tensors, {size(brought.bytes)}, step {brought.step}")
    print(f"→ {brought.where}")
    if brought.startable:
        print(f"a run starts from it with `model: {{weights: {args.folder}}}`")
