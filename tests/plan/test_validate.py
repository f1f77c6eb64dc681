"""How wrong the planner is: counted as one would by hand, and within its bars on the shipped runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.plan.validate import Errors, spearman, validate
from tests.plan.table import table
from tests.plan.test_published import SHIPPED


def test_rank_correlation_is_spearmans() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(
        1 - 6 * 4 / (5 * 24)
    )  # 1 - 6 sum d^2 / (n^3 - n)
    assert spearman([1, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)  # ties share the middle rank
    assert spearman([1, 1, 1], [1, 2, 3]) == 0


def test_errors_are_relative_and_absolute_and_the_bias_has_a_sign() -> None:
    found = Errors.of([-0.1, 0.2, 0.3])
    assert found == Errors(3, 0.2, 0.2, 0.28, 0.2)
    assert Errors.of([]) is None


def test_a_table_of_three_rows(tmp_path: Path) -> None:
    speed = validate(table(tmp_path / "one.csv", {})).predictions[0]["predicted_tokens_s"]
    found = validate(
        table(
            tmp_path / "three.csv",
            {"tokens_s_gpu": speed / 1.1},
            {"tokens_s_gpu": speed / 0.8, "source": "another", "mem_GB": 60},
            {"layers": None},
        )
    )
    assert found.rows == 3
    assert found.refused == {"the model's layers is not stated": 1}
    overall = found.overall["speed"]
    assert overall is not None
    assert overall.rows == 2
    assert overall.median == overall.mean == pytest.approx(0.15, abs=1e-3)
    assert overall.bias == pytest.approx(-0.05, abs=1e-3)
    assert found.overall["experts"] is None
    assert (found.overall["memory"] or Errors(0, 0, 0, 0, 0)).rows == 1
    assert list(found.by_source) == ["another", "somebody"]
    assert list(found.by_machine) == ["H100-SXM-80GB"]
    assert found.ranked == []


def test_runs_of_one_model_and_machine_are_ranked(tmp_path: Path) -> None:
    layouts = [{"tp": 1}, {"tp": 2}, {"tp": 4}, {"tp": 8}, {"tp": 2, "recompute": "full"}]
    first = validate(table(tmp_path / "a.csv", *layouts))
    speeds = [p["predicted_tokens_s"] for p in first.predictions]
    (same,) = validate(table(tmp_path / "b.csv", *_with(layouts, speeds))).layouts
    assert (same.spearman, same.regret, same.runs) == (1, 0, 5)
    (turned,) = validate(table(tmp_path / "c.csv", *_with(layouts, [1e8 / s for s in speeds]))).layouts
    assert turned.spearman == -1
    assert turned.regret == pytest.approx(max(speeds) / min(speeds) - 1, rel=0.001)


def _with(layouts: list[dict[str, object]], speeds: list[float]) -> list[dict[str, object]]:
    return [{**layout, "tokens_s_gpu": speed} for layout, speed in zip(layouts, speeds, strict=True)]


def test_nothing_to_predict_is_no_error(tmp_path: Path) -> None:
    found = validate(table(tmp_path / "none.csv", {"layers": None}))
    assert (found.rows, found.predictions, found.overall["speed"]) == (1, [], None)
    json.dumps(found.as_json())


def test_the_shipped_runs_are_predicted_within_the_bars() -> None:
    """In-sample: benchmarks/planner.py leaves sources and machines out, and takes minutes."""
    found = validate(SHIPPED)
    dense, memory = found.overall["dense"], found.overall["memory"]
    assert dense is not None
    assert memory is not None
    print(f"dense: median {dense.median:.1%}, p90 {dense.p90:.1%} of {dense.rows}; memory: median {memory.median:.1%}")
    assert dense.rows == 427
    assert dense.median < 0.06  # the bar is 12%
    assert dense.p90 < 0.25  # 35%
    assert memory.median < 0.12
    ranks = sorted(r.spearman for r in found.ranked)
    assert ranks[len(ranks) // 2] > 0.85
    text = json.dumps(found.as_json(), allow_nan=False)
    assert json.loads(text)["overall"]["dense"]["rows"] == 427
