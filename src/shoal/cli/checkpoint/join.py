"""`shoal checkpoint join`: the folders of the peers of a cut model become the directory of one run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from shoal.cli.checkpoint.shared import note, passed_over, place, progress
from shoal.readable import size


def run(args: argparse.Namespace) -> None:
    from shoal.stages.join import join, size_of

    places = [place(args, text) for text in args.stages]
    with progress("joined", size_of(places), args.json) as on_bytes:
        found = join(places, Path(args.folder), args.step, passed_over, on_bytes)
    if args.json:
        print(json.dumps({"where": found.where, "step": found.step, "bytes": found.bytes}, indent=2))
        return
    if "data" not in found.extra:
        note(
            "of a model in a subspace only the weights are there, multiplied out; model.weights starts a run from them"
        )
    print(f"step {found.step}, {len(found.manifest.tensors)} tensors, {size(found.bytes)} → {args.folder}")
