"""`shoal data tasks NAME… --out FOLDER`: made tasks as task files with their data, for `shoal eval` and lm-eval."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from shoal.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="of made tasks; without one they are listed")
    parser.add_argument("--out", metavar="FOLDER", help="where the task files and their data are written")
    parser.add_argument("--count", type=int, metavar="N", help="items of each (default: 200; of cloze: all)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="another one makes other items (default: 0)")
    parser.add_argument("--json", action="store_true", help="print what there is, or what was written, as JSON")


def run(args: argparse.Namespace) -> int:
    from shoal.evaluate.generated.catalogue import KINDS, named, write

    if not args.names:
        about = {name: kind.about for name, kind in KINDS.items()}
        wide = max(map(len, about))
        said = json.dumps(about, indent=1) if args.json else "\n".join(f"{n:<{wide}}  {a}" for n, a in about.items())
        print(said)
        return 0
    if not args.out:
        raise UsageError("say with --out in which folder the task files are to be written.")
    made = [named(name, args.seed, args.count) for name in dict.fromkeys(args.names)]  # all names are looked at first
    written = [(str(write(one, Path(args.out))), len(one.items)) for one in made]
    if args.json:
        print(json.dumps([{"task": path, "items": count} for path, count in written], indent=1))
    else:
        print("\n".join(f"wrote {path}: {count:,} items" for path, count in written))
    return 0
