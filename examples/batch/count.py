"""Counts the words of one part of a text: the lines whose number, divided by --of, leaves --part.

It writes its result beside the place and renames it, so that half of one is never taken for a whole.
"""

import argparse
import collections
import json
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--part", type=int, required=True)
parser.add_argument("--of", type=int, required=True)
parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "text")
parser.add_argument("--out", type=Path, default=Path("out"))
args = parser.parse_args()

words = collections.Counter[str]()
for path in sorted(args.text.rglob("*.txt")):
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        if number % args.of == args.part:
            words.update(line.lower().split())

args.out.mkdir(exist_ok=True)
result = args.out / f"{args.part:02}.json"
new = result.with_suffix(".new")
new.write_text(json.dumps(words.most_common(100)))
new.rename(result)
print(f"part {args.part}: {words.total()} words, {len(words)} of them different")
