"""Measure this machine, so that the planner need not guess.

  shoal bench                    a minute and a half; writes hardware/NAME.toml in the workspace
  shoal bench --quick            twenty seconds
  shoal bench --name our-box     under a name of its own, beside the catalogue's

Products of matrices and attention by shape, memory, launches, collectives of all GPUs, the workspace's disk. `shoal
plan` prefers the file to what the catalogue says. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from shoal import shared_gpu
from shoal.cli.options import add_workspace
from shoal.errors import UsageError
from shoal.journal.rundir import workspace

FULL_S, QUICK_S = 80.0, 13.0  # beside the start of torch and of the processes of the collectives


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: a GPU if there is one"
    )
    parser.add_argument("--out", metavar="FILE", help="write there (default: hardware/NAME.toml in the workspace)")
    parser.add_argument(
        "--name", metavar="NAME", help="of the entry (default: the catalogue's, or what it calls itself)"
    )
    parser.add_argument("--quick", action="store_true", help="20 seconds, fewer shapes")
    parser.add_argument("--seconds", type=float, metavar="S", help="measure about so long")
    parser.add_argument(
        "--processes", type=int, metavar="N", help="of the collectives (default: all GPUs; on a processor 2); 1: none"
    )
    parser.add_argument("--force", action="store_true", help="overwrite a file that was written by hand")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    add_workspace(parser, "hardware/")


def run(args: argparse.Namespace) -> int:
    if args.seconds is not None and not 0 < args.seconds < math.inf:
        raise UsageError("--seconds must be more than 0, and a number.")
    if args.processes is not None and args.processes < 1:
        raise UsageError(f"--processes is {args.processes}, but 1 is the least it can be (no collectives).")
    if args.name is not None and not any(c.isalnum() for c in args.name):
        raise UsageError(f"--name is '{args.name}', which has no letter or digit; give it one.")
    if args.out is not None and not args.out.endswith(".toml"):
        raise UsageError(f"--out is {args.out}, but the planner reads files that end in .toml; name it so.")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C, with its processes
    try:
        return _bench(args)
    finally:
        signal.signal(signal.SIGTERM, before)


def _bench(args: argparse.Namespace) -> int:
    began_s = time.monotonic()
    hardware = workspace(args.workspace) / "hardware"
    folder = Path(args.out).absolute().parent if args.out else hardware

    from shoal.bench import publish

    place = publish.check_place(folder)
    if args.out:
        publish.check_free(Path(args.out), args.force)

    from shoal.bench import entry, memory, table
    from shoal.bench.clock import Clock
    from shoal.bench.machine import busy, this_machine
    from shoal.bench.measure import measure
    from shoal.plan.hardware_types import Measured

    machine = this_machine(args.device)
    shared = machine.cuda and (args.processes or 1) > machine.count
    if shared and not shared_gpu.sharing():
        gpus = f"{machine.count} GPU{'s' * (machine.count > 1)}"
        raise UsageError(f"--processes is {args.processes}, but this machine has {gpus}; leave it out.")
    known = entry.known_as(machine, args.name, [hardware])
    called = args.name or (known.name if known else machine.name)
    file = Path(args.out).absolute() if args.out else folder / publish.file_name(called)
    publish.check_free(file, args.force)

    out = sys.stderr if args.json else sys.stdout
    as_what = f"'{known.name}' in the catalogue" if known else "not in the catalogue"
    print(f"{machine.name}, {as_what}; {machine.software}", file=out, flush=True)
    if why := busy(machine):
        print(f"shoal: other programs run here ({why}), which makes it look slower than it is.", file=sys.stderr)
    if shared:
        print(f"shoal: {shared_gpu.sentence(args.processes, machine.count)}.", file=sys.stderr)

    def tell(part: str, so_far: Measured, why: str) -> None:
        print(table.line(part, so_far, why), file=out, flush=True)

    processes = args.processes or (machine.count if machine.cuda else 2)
    seconds = args.seconds or (QUICK_S if args.quick else FULL_S)
    measured = measure(machine, seconds, processes, place, args.quick, tell)
    host_gbs = memory.host_link_gbs(Clock(machine)) if known is None else 0.0
    links = replace(measured, collectives=()) if shared else measured  # of one GPU that is shared they tell nothing
    made = entry.entry(machine, links, known, args.name, host_gbs)
    text = publish.text_of(made)
    device = publish.read_back(made["name"], text, [hardware])
    publish.check_free(file, args.force)
    publish.put(file, text)
    if args.json:
        told = {
            "name": device.name,
            "machine": machine.name,
            "catalogue": known.name if known else None,
            "file": str(file),
            "seconds": round(time.monotonic() - began_s, 2),
            "matmul": made["matmul"],
            "bandwidth_tbs": device.bandwidth_tbs,
            "memory_gb": device.memory_gb,
            "units": device.units,
            "measured": asdict(measured),
        }
        print(json.dumps(told, indent=2))
        return 0
    shown = os.path.relpath(file)
    print(f"\n{table.table(measured, known)}\n")
    print(f"{shown} written in {time.monotonic() - began_s:.0f} s: the planner's '{device.name}' from now on.")
    if folder not in (hardware, Path(os.environ.get("SHOAL_HARDWARE") or hardware).absolute()):
        print(f"(It reads {os.path.relpath(hardware)}/ and the folder that SHOAL_HARDWARE names; put the file there.)")
    return 0
