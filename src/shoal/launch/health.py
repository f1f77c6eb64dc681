"""Looks at a node before a run starts on it: `python -m shoal.launch.health --workspace DIR --gpus N`.

Prints nothing and leaves with 0 when the node is well, else one sentence and 1. A node without its GPUs or its shared
disk fails every run in minutes of start-up, over and over; this takes a second and names it. Never imports torch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

from shoal import devices

LEAST_FREE_BYTES = 1 << 30  # of the workspace: below it no checkpoint of any use fits
DRIVER_S = 60.0  # a driver that takes longer to list its GPUs is broken
SHARED_S = 60.0  # NFS may show a new file as late as that (acdirmax)


def problem(workspace: Path, mark: tuple[str, str] | None, gpus: int, memory_gb: float | None) -> str | None:
    """What is wrong with this node, as a sentence without its full stop; None if nothing is."""
    return (
        _disk(workspace)
        or (_shared(workspace / mark[0], mark[1]) if mark else None)
        or (devices.problem(gpus, DRIVER_S) if gpus else None)
        or (_memory(memory_gb) if memory_gb else None)
    )


def _disk(workspace: Path) -> str | None:
    probe = workspace / f".shoal-probe-{os.uname().nodename}-{os.getpid()}"
    try:
        with open(probe, "wb") as file:
            file.write(b"probe")
            file.flush()
            os.fsync(file.fileno())
        probe.unlink()
        free = shutil.disk_usage(workspace).free
    except OSError as e:
        return f"the workspace {workspace} cannot be written ({e.strerror})"
    if free < LEAST_FREE_BYTES:
        return f"the workspace {workspace} has {free / 2**20:.0f} MiB left"
    return None


def _shared(file: Path, text: str) -> str | None:
    deadline = time.monotonic() + SHARED_S
    while True:
        try:
            os.listdir(file.parent)  # makes NFS look again
            if file.read_text().strip() == text:
                return None
        except OSError:
            pass
        if time.monotonic() > deadline:
            return f"{file} of the first node is not seen: the workspace is not on a disk that the nodes share"
        time.sleep(0.5)


def _memory(asked_gb: float) -> str | None:
    """That somebody else's processes have left what was promised."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available_gb = int(fields["MemAvailable"].split()[0]) / 2**20
    except (OSError, KeyError, ValueError):  # not Linux
        return None
    if available_gb < 0.9 * asked_gb:  # the system's own share is not the job's
        return f"{asked_gb:g} GB of memory were asked for and {available_gb:.0f} GB are free"
    return None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shoal.launch.health", description=__doc__)
    parser.add_argument("--workspace", type=Path, required=True, metavar="DIR")
    parser.add_argument("--mark", nargs=2, metavar=("FILE", "TEXT"), help="a file of the first node, in the workspace")
    parser.add_argument("--gpus", type=int, default=0, metavar="N")
    parser.add_argument("--memory-gb", type=float, metavar="GB")
    args = parser.parse_args(argv)
    found = problem(args.workspace, args.mark and tuple(args.mark), args.gpus, args.memory_gb)
    if found:
        print(found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
