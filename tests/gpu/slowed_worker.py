"""The real worker and its supervisor, with traps: a competitor on a rank's GPU, or a collective that it leaves out.

    python tests/gpu/slowed_worker.py --supervise RUN_DIR WORLD CONTROL

A rank looks for `CONTROL/compete-RANK` and `CONTROL/skip-RANK` before each step. A competitor is a thread of the rank's
own process that keeps the device busy from a stream of the highest priority: it slows this rank and, where ranks share
a card, no other one more than it did before.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any


def supervised(run_dir: Path, world: int, control: Path) -> int:
    from shoal.guard.supervise import supervise
    from shoal.journal.rundir import RunDir
    from shoal.spec import load

    where = RunDir(run_dir)
    me = [sys.executable, str(Path(__file__).resolve())]
    command = [*me, "--worker", str(run_dir), str(control)]
    return supervise(where, load(where.spec_file).run, world, command=command)


def compete() -> None:
    import torch

    stream = torch.cuda.Stream(priority=-5)
    with torch.cuda.stream(stream):
        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        b = torch.empty_like(a)
        done = [torch.cuda.Event() for _ in range(4)]
        n = 0
        while True:
            done[n % 4].synchronize()  # at most four are queued
            torch.mm(a, a, out=b)
            done[n % 4].record(stream)
            n += 1


def worker(run_dir: Path, control: Path) -> int:
    from shoal.journal.pulse import Pulse

    pulse = Pulse.begin()
    from shoal.journal.rundir import RunDir
    from shoal.parallel.place import Place
    from shoal.train import loop
    from shoal.train import worker as real

    rank, real_step, real_sum = int(os.environ["RANK"]), loop.train_step, Place.sum_on_device
    competes = []

    def step(*args: Any, **named: Any) -> Any:
        if not competes and (control / f"compete-{rank}").exists():
            competes.append(threading.Thread(target=compete, daemon=True))
            competes[0].start()
            (control / f"competing-{rank}").write_text(str(time.time()))
        return real_step(*args, **named)

    def sum_on_device(self: Place, value: Any) -> Any:
        while (control / f"skip-{rank}").exists():  # the others wait in this collective
            time.sleep(0.05)
        return real_sum(self, value)

    loop.train_step = step
    Place.sum_on_device = sum_on_device  # type: ignore[method-assign]
    return real.main(RunDir(run_dir), pulse)


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        code = worker(Path(sys.argv[2]), Path(sys.argv[3]))
        sys.stderr.flush()
        os._exit(code)
    sys.exit(supervised(Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])))
