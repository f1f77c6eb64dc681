"""Twelve architectures of transformers (`model.hf`) on 1, 2 and 4 processes: one curve, and what was truly cut.

    python benchmarks/hf_architectures.py [--only TEXT]

Tiny random configs, float32, gloo, three steps of AdamW. Compared with one process: the losses, the global gradient
norm and that of every parameter (AdamW hides a constant factor; a norm does not), and how many parameters, and what
share of their bytes, a process holds a part of: by dp_shard and by tp. A layout that is refused shows its sentence.
Last, whether transformers reads what is exported after training on the layout to the bit. Exits with 1 when a bar is
missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.model.hf_kinds import KINDS, write_config
from tests.model.hf_layouts import LAYOUTS, Apart, Cut, Measured, apart, exported, found
from tests.train.tiny import make_data

BAR = 1e-5
BAR_OF_ONE = 1e-4  # of one parameter's gradient: a sum of as many numbers, but without the larger ones beside it


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="the architectures that have this in their name")
    kinds = tuple(kind for kind in KINDS if parser.parse_args().only in kind)
    missed = 0
    with tempfile.TemporaryDirectory() as at:
        folder = Path(at)
        make_data(folder / "data")
        for kind in kinds:
            write_config(folder / kind, kind)
        print("| architecture | layout | loss | norm | worst parameter's norm | cut by dp_shard | cut by tp | export |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
        alone, rows = found(folder, "1", kinds), []
        for layout in list(LAYOUTS)[1:]:
            of_layout = found(folder, layout, kinds)
            same = exported(folder, layout, tuple(kind for kind in kinds if not isinstance(of_layout[kind], str)))
            for kind in kinds:
                one, other = alone[kind], of_layout[kind]
                assert isinstance(one, Measured)
                if isinstance(other, str):
                    rows.append((kind, layout, f"refused: {other.partition(': ')[2]}"))
                    continue
                by = apart(one, other)
                missed += not (by.loss < BAR and by.norm < BAR and by.gradient < BAR_OF_ONE and same[kind])
                rows.append((kind, layout, _row(by, other, same[kind])))
        for kind, layout, row in sorted(rows, key=lambda row: list(KINDS).index(row[0])):
            print(f"| {kind} | {layout} | {row} |")
    print(f"bars: loss and norm {BAR}, a parameter's norm {BAR_OF_ONE}; missed: {missed}")
    return int(missed > 0)


def _row(by: Apart, other: Measured, same: bool) -> str:
    cuts = (_cut(cut, other.parameters) for cut in (other.by_dp_shard, other.by_tp))
    worst = by.worst.removeprefix("net.")
    numbers = f"{by.loss:.0e} | {by.norm:.0e} | {by.gradient:.0e} {worst}"
    return f"{numbers} | {' | '.join(cuts)} | {'bit-equal' if same else 'DIFFERS'}"


def _cut(cut: Cut, parameters: int) -> str:
    return f"{cut.parameters} of {parameters}, {int(100 * cut.share)}%" if cut.parameters else "0"


if __name__ == "__main__":
    sys.exit(main())
