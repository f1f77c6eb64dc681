"""Supervises a fake run in a process of its own, to be signalled: `python supervisor.py RUN_DIR ARGUMENTS`."""

import json
import sys
from pathlib import Path

from shoal.guard.supervise import supervise
from shoal.journal.rundir import RunDir
from shoal.spec.run import Run
from shoal.streams import steady

FAKE = Path(__file__).with_name("fake_worker.py")


def fake_command(run_dir: Path) -> list[str]:
    return [sys.executable, str(FAKE), str(run_dir)]


if __name__ == "__main__":
    steady()  # as the verbs do
    where = Path(sys.argv[1])
    plan = json.loads((where / "script.json").read_text())
    more = json.loads(sys.argv[2])
    run = Run.model_validate(plan["run"])
    sys.exit(supervise(RunDir(where), run, plan["world"], command=fake_command(where), **more))
