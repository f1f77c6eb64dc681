"""Supervises a fake run in a process of its own, so that tests can signal it: `python supervisor.py RUN_DIR`."""

import json
import sys
from pathlib import Path

from shoal.guard.supervise import supervise
from shoal.spec.run import Run
from shoal.track.rundir import RunDir

FAKE = Path(__file__).with_name("fake_worker.py")


def fake_command(run_dir: Path) -> list[str]:
    return [sys.executable, str(FAKE), str(run_dir)]


if __name__ == "__main__":
    where = Path(sys.argv[1])
    plan = json.loads((where / "plan.json").read_text())
    sys.exit(supervise(RunDir(where), Run.model_validate(plan["run"]), plan["world"], command=fake_command(where)))
