"""The same bits on every processor, as far as that can be asked for; and what is said where it cannot.

    python -m tests.compat.bits      computes tests/compat/digests.json anew, and says which rows have changed

torch and MKL choose their code by the processor: other vector widths sum in another order. `SAME_BITS` asks both for
the code that every x86-64 processor has. Measured: without the two settings the bits of every row change; with them,
nothing more is changed by hiding AVX, FMA and AVX-512 from MKL, numpy, glibc or oneDNN. The last two of these are asked
for all the same, since another processor might show what this one did not.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("digests.json")
ROOT = Path(__file__).parents[2]
SAME_BITS = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX2,-AVX,-FMA",
    "OMP_NUM_THREADS": "1",
}
TOLERANCE = 1e-6  # relative, where another processor or another torch computes
LIMIT_S = 1200  # of a machine that does much else
Row = Mapping[str, Any]  # a Trace of tests/compat/drivers.py as JSON


def processor() -> str:
    """As Linux names it: vendor, family, model and stepping tell more than the name that a virtual machine shows."""
    keys = ("vendor_id", "cpu family", "model", "stepping", "model name")
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return platform.processor() or platform.machine()
    said = dict(line.partition(":")[::2] for line in first.splitlines())
    found = {key.strip(): value.strip() for key, value in said.items()}
    return ", ".join(found[key] for key in keys if key in found) or platform.machine()


@cache
def here() -> dict[str, str]:
    import torch

    return {"processor": processor(), "torch": torch.__version__.partition("+")[0]}


def computed(rows: Iterable[str], source: Path | None = None) -> dict[str, Row]:
    """Rows as this tree computes them, in a process of its own: torch reads the settings when it is imported. `source`:
    a folder with another tree's package."""
    with tempfile.TemporaryDirectory(prefix="shoal-bits-") as folder:
        out = Path(folder) / "rows.json"
        env = {**os.environ, **SAME_BITS} | ({} if source is None else {"PYTHONPATH": str(source)})
        command = [sys.executable, "-m", "tests.compat.drivers", str(out), *rows]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr[-4000:]
        return dict(json.loads(out.read_text()))


@dataclass(frozen=True)
class Kept:
    """The committed file."""

    made_on: dict[str, str]  # processor, torch
    commit: str
    rows: dict[str, Row]

    @staticmethod
    def read(file: Path = FILE) -> Kept:
        return Kept(**json.loads(file.read_text()))


def difference(expected: Row, found: Row) -> str | None:
    """Where two rows part first, in words; None: every bit is equal."""
    for key in ("losses", "norms"):
        if len(expected[key]) != len(found[key]):
            return f"{len(found[key])} steps instead of {len(expected[key])}"
    for step in range(len(expected["losses"])):
        for key, what in (("losses", "loss"), ("norms", "gradient norm")):
            a, b = expected[key][step], found[key][step]
            if a != b:
                a, b = float.fromhex(a), float.fromhex(b)
                return f"the {what} of step {step + 1} is {b!r} instead of {a!r} ({abs(b / a - 1):.1e} apart)"
    if expected["digest"] != found["digest"]:
        return f"the final weights have the digest {found['digest']} instead of {expected['digest']}"
    return None


def near(expected: Row, found: Row) -> bool:
    """All losses and norms within `TOLERANCE`; says nothing of the weights' digest."""
    numbers = [[float.fromhex(x) for key in ("losses", "norms") for x in row[key]] for row in (expected, found)]
    if len(numbers[0]) != len(numbers[1]):
        return False
    return all(abs(b - a) <= TOLERANCE * abs(a) for a, b in zip(*numbers, strict=True))


def main() -> None:
    from tests.compat.drivers import ROWS

    before = Kept.read().rows if FILE.exists() else {}
    rows = computed(ROWS)
    for name, row in rows.items():
        parted = difference(before[name], row) if name in before else "is new"
        print(f"{name}: {parted or 'as before'}")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    FILE.write_text(json.dumps({"made_on": here(), "commit": commit, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
