"""What a unit costs: CPU seconds of `shoal batch` for each `true`, beside `xargs -P` in the same run.

    python benchmarks/batch_overhead.py [UNITS] [AT_ONCE]

Shoal writes two records and a log for each unit; xargs writes nothing. The difference of two sizes leaves the start
out.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def measured(command: list[str], folder: Path, given: bytes = b"") -> tuple[float, float]:
    """CPU seconds with all children, and seconds."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(command, cwd=folder, input=given, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu_s, time.monotonic() - began


def main() -> None:
    units = int(sys.argv[1]) if len(sys.argv) > 1 else 4000
    at_once = sys.argv[2] if len(sys.argv) > 2 else str(len(os.sched_getaffinity(0)))
    true = "/bin/true"
    cost: dict[str, list[tuple[float, float]]] = {"shoal": [], "xargs": []}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for count in (units // 10, units):
            words = ["--name", f"b{count}", "--units", str(count), "--at-once", at_once, "--", true, "{index}"]
            cost["shoal"].append(measured([sys.executable, "-m", "shoal", "batch", *words], folder))
            numbers = "\n".join(map(str, range(count))).encode()
            cost["xargs"].append(measured(["xargs", "-P", at_once, "-n", "1", true], folder, numbers))
        ps, _ = measured([sys.executable, "-m", "shoal", "ps", f"b{units}"], folder)
    each = {who: (b[0] - a[0]) / (units - units // 10) for who, (a, b) in cost.items()}
    print(f"{units:,} units of `true`, {at_once} at once")
    for who, seconds in each.items():
        print(f"  {who:<6} {1000 * seconds:7.2f} ms of CPU each   {cost[who][1][1]:6.1f} s in all")
    start_s = cost["shoal"][0][0] - each["shoal"] * (units // 10)
    print(f"  shoal's start and end: {start_s:.2f} s of CPU; `shoal ps` of it: {ps:.2f} s of CPU")
    more_ms = 1000 * (each["shoal"] - each["xargs"])
    print(f"  ratio  {each['shoal'] / each['xargs']:.2f} (shoal / xargs -P), {more_ms:.2f} ms more each")


if __name__ == "__main__":
    main()
