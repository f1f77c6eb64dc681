"""One run, every mesh, one curve: the parity matrix against one process, in float32 over ten steps.

    python benchmarks/parity.py [--quick] [--only TEXT]

Each mesh is trained by the real worker on real processes (gloo). Compared are the losses and gradient norms of every
step and the logits of the last checkpoint, loaded on one process. Exits with 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.train.matrix import FLOAT32, FULL, QUICK, Matrix


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the part that `make test` runs")
    parser.add_argument("--only", default="", metavar="TEXT", help="the meshes whose line has this in it")
    args = parser.parse_args()
    cases = [c for c in (QUICK if args.quick else FULL) if args.only in c.name]
    print(f"{'mesh':<76}{'n':>3}{'loss':>10}{'norm':>10}{'logits':>10}{'s':>6}", flush=True)
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        matrix = Matrix(Path(folder))
        for case in sorted(cases, key=lambda c: c.processes):
            began = time.perf_counter()
            try:
                result = matrix.run(case)
            except Exception as e:
                missed += 1
                print(
                    f"{case.name:<76}{case.processes:>3}  FAILED: {str(e).strip().splitlines()[-1][:120]}", flush=True
                )
                continue
            missed += not result.good
            numbers = f"{result.loss:>10.1e}{result.norm:>10.1e}{result.logits:>10.1e}"
            took = f"{time.perf_counter() - began:>6.1f}"
            print(f"{case.name:<76}{case.processes:>3}{numbers}{took}{'' if result.good else '  MISSED'}", flush=True)
    print(
        f"{len(cases)} meshes against one process; bars: loss {FLOAT32.loss}, gradient norm {FLOAT32.norm}, "
        f"logits {FLOAT32.logits}"
    )
    print(f"missed: {missed} (ratio of meshes on the one-process curve: {(len(cases) - missed) / len(cases):.2f})")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
