"""`shoal checkpoint export`: the weights of the newest good checkpoint (or of --step) as a Hugging Face folder."""

from __future__ import annotations

import argparse

from shoal.checkpoint.find import Found
from shoal.cli.checkpoint.shared import passed_over, place


def run(args: argparse.Namespace) -> None:
    from shoal.checkpoint.foreign.export import described, export  # torch, which `ls` and `verify` do without

    where = place(args, args.run).at(args.step, args.term)

    def out(found: Found) -> None:
        export(found, described(found, where.run_dir), args.folder, args.tokenizer, args.dtype, args.drop_biases)

    found, _ = where.take(out, passed_over)
    print(f"step {found.step} of {where.label} → {args.folder}")
