"""`make bench`: every benchmark here, one after another; each prints a table and a ratio against a named peer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> int:
    scripts = [p for p in sorted(HERE.glob("*.py")) if p.name != "all.py"]
    missed = []
    for script in scripts:
        print(f"\n== {script.stem}", flush=True)
        if subprocess.call([sys.executable, str(script)]):
            missed.append(script.stem)
    print("\nbars missed: " + (", ".join(missed) or "none"))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
