"""What the agent of an island starts for each of its processes: `python -m shoal.islands RUN_DIR`."""

from __future__ import annotations

import sys
from pathlib import Path

from shoal.leaving import exit_code, leave_at_once
from shoal.streams import steady


def _worker(run_dir: Path) -> int:
    from shoal.journal.pulse import Pulse

    pulse = Pulse.begin()  # before torch: importing it can hang too
    from shoal.islands import worker as island_worker
    from shoal.journal.rundir import RunDir
    from shoal.train import worker

    return worker.main(RunDir(run_dir), pulse, island_worker.work)


if __name__ == "__main__":
    steady()
    leave_at_once(exit_code(lambda: _worker(Path(sys.argv[1]))))
