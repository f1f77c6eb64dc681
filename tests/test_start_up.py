"""What a person waits for before anything happens."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.journal.journals import crash_and_finish, make_run

LIMIT_S = 0.3
pytestmark = pytest.mark.alone


def cpu_s(*arguments: str) -> float:
    """CPU time, not wall time: on a busy machine the two differ and only one is ours."""
    code = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL);"
    code += "r = resource.getrusage(resource.RUSAGE_CHILDREN); print(r.ru_utime + r.ru_stime)"
    return float(subprocess.check_output([sys.executable, "-c", code, sys.executable, *arguments]))


def test_help_comes_within_a_third_of_a_second() -> None:
    assert min(cpu_s("-m", "shoal", "--help") for _ in range(5)) < LIMIT_S
    walls = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.check_call([sys.executable, "-m", "shoal", "--help"], stdout=subprocess.DEVNULL)
        walls.append(time.perf_counter() - began)
    assert min(walls) < LIMIT_S


def test_importing_shoal_is_cheap() -> None:
    assert min(cpu_s("-c", "import shoal") for _ in range(5)) < LIMIT_S


def test_help_and_the_lighter_verbs_import_no_torch() -> None:
    modules = "shoal.cli.main, shoal.cli.ps, shoal.cli.logs, shoal.cli.report, shoal.cli.train, shoal.cli.data"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.call([sys.executable, "-c", code]) == 0


# What nobody may wait for who looks at a run, by what they ask: torch takes seconds, the run file's types and the
# schedulers half a second. (A run of a million steps is told about within a second; the rest of it is numpy.)
TYPES = ("pydantic", "shoal.spec.run", "shoal.spec.resolve")
SENDING = ("shoal.launch.send", "shoal.launch.request", "shoal.launch.slurm.backend", "shoal.guard.begin")
DRAWING = ("matplotlib", "shoal.checkpoint.find", "shoal.decide.auto")


@pytest.mark.parametrize(
    ("verb", "unused"),
    [
        (["ps"], ("torch", *TYPES, *SENDING, *DRAWING, "numpy")),
        (["ps", "demo"], ("torch", *TYPES, *SENDING, *DRAWING)),
        (["logs", "demo"], ("torch", *TYPES, *SENDING, *DRAWING, "numpy")),
        (["report", "demo", "--no-png"], ("torch", *TYPES, *SENDING, *DRAWING)),
        (["train", "demo"], ("torch", "matplotlib", "shoal.launch.request")),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, list) else None,
)
def test_looking_at_a_run_imports_nothing_that_it_does_not_use(
    verb: list[str], unused: tuple[str, ...], tmp_path: Path
) -> None:
    story = crash_and_finish(make_run(tmp_path))
    story.write("finished", attempt=story.attempt, step=200, digest="00")
    (log := story.run_dir.logs / "attempt-001" / "rank-00000.log").parent.mkdir(parents=True)
    log.write_text("hello\n")
    file = {"train": str(story.run_dir.spec_file)}
    asked = [verb[0], *(file.get(verb[0], word) for word in verb[1:]), "--workspace", str(tmp_path)]
    code = "import json, sys; from shoal.cli.main import main; code = main(json.loads(sys.argv[1]));"
    code += "print(json.dumps([code, sorted(sys.modules)]), file=sys.stderr)"
    said = subprocess.run([sys.executable, "-c", code, json.dumps(asked)], capture_output=True, text=True, check=True)
    left_with, modules = json.loads(said.stderr.splitlines()[-1])
    assert left_with == 0, said.stderr
    assert [name for name in unused if name in modules] == []
