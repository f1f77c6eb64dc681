"""What the supervisor starts: `python -m shoal.train --worker RUN_DIR`. Also `torchrun -m shoal.train RUN.yaml`."""

from __future__ import annotations

import sys
from pathlib import Path

from shoal.errors import ShoalError
from shoal.leaving import exit_code, leave_at_once
from shoal.streams import steady


def main(argv: list[str]) -> int:
    if argv[:1] == ["--worker"]:
        return exit_code(lambda: _worker(Path(argv[1])))  # what fails before there is a journal is named as well
    from shoal.train import under_torchrun

    try:
        return under_torchrun.main(argv)
    except ShoalError as e:
        under_torchrun.say(e)
        return e.exit_code


def _worker(run_dir: Path) -> int:
    from shoal.journal.pulse import Pulse

    pulse = Pulse.begin()  # before torch: importing it can hang too
    from shoal.journal.rundir import RunDir
    from shoal.train import worker

    return worker.main(RunDir(run_dir), pulse)


if __name__ == "__main__":
    steady()
    leave_at_once(main(sys.argv[1:]))  # the work is on disk and the group is left
