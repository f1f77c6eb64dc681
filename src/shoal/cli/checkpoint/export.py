"""`shoal checkpoint export`: the weights of the newest good checkpoint (or of --step) as a Hugging Face folder."""

from __future__ import annotations

import argparse

from shoal.checkpoint.find import Found
from shoal.cli.checkpoint.shared import passed_over, place
from shoal.cli.options import no_script


def run(args: argparse.Namespace) -> None:
    where = place(args, args.run).at(args.step, args.term)
    if where.run_dir is not None:
        no_script(where.run_dir)
    from shoal.checkpoint.foreign.export import described, export  # torch, which `ls` and `verify` do without

    def out(found: Found) -> None:
        export(found, described(found, where.run_dir), args.folder, args.tokenizer, args.dtype, args.drop_biases)

    found, _ = where.take(out, passed_over)
    print(f"step {found.step} of {where.label} → {args.folder}")
