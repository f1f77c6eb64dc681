"""What a person waits for before anything happens."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

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
