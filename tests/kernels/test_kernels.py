"""Triton's kernels on a processor, interpreted. On a GPU tests/gpu compares whole steps."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.patience import limit


@pytest.mark.skipif(sys.platform != "linux", reason="triton is for Linux")
def test_every_kernel_gives_what_its_plain_twin_gives() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compare"], env=env, capture_output=True, text=True, timeout=limit(120)
    )
    assert done.stdout.splitlines()[-1:] == ["equal"], done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="triton is for Linux")
@pytest.mark.parametrize("check", ["products", "one_token", "picks"])
def test_the_engines_kernels_give_what_their_plain_twins_give(check: str) -> None:
    """`many_tokens` is compared to the bit, which an interpreter's products do not hold: on a GPU it is."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.kernels.compare_engine", check]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit(300))
    assert done.stdout.splitlines()[-1:] == ["equal"], done.stderr[-3000:]
