"""The gate of benchmarks/h200.py: slower than the committed baseline by more than 5%, or a slow warm start, fails."""

from __future__ import annotations

import json

from benchmarks.h200 import BASELINE, judge

BEFORE = {"1b": {"shoal fp8": {"tokens_s": 1000, "gb": 50.0, "first_step_s": 30.0}}}


def now(**changes: float) -> int:
    return judge({"1b": {"shoal fp8": {**BEFORE["1b"]["shoal fp8"], **changes}}}, BEFORE)


def test_slower_than_the_baseline_fails() -> None:
    assert now(tokens_s=960) == 0
    assert now(tokens_s=940) == 1
    assert now(warm_first_step_s=20.0) == 0
    assert now(warm_first_step_s=61.0) == 1


def test_the_committed_baseline_has_every_system_of_one_run() -> None:
    told = json.loads(BASELINE.read_text())
    for size in ("1b", "3b"):
        assert set(told[size]) == {"torchtitan bf16", "transformers + Liger", "shoal bf16", "shoal fp8"}
