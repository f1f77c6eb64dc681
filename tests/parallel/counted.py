"""What a run has counted of its traffic, beside what the formula says of such a run."""

from __future__ import annotations

import yaml

from shoal.journal.journal import Record, records
from shoal.journal.rundir import RunDir
from shoal.plan.traffic import step_of, traffic
from shoal.spec.run import Run
from shoal.spec.shape import shape_of


def record_of(run_dir: RunDir) -> Record:
    (record,) = [r for r in records(run_dir.journal_file) if r["kind"] == "traffic"]
    return record


def assert_as_the_formula_says(run_dir: RunDir, world: int) -> None:
    """Of the third step, every axis; where no router decides what is sent."""
    record, run = record_of(run_dir), Run.model_validate(yaml.safe_load(run_dir.spec_file.read_text()))
    assert (record["step"], record["world"]) == (3, world)
    counted = {(row["axis"], row["op"]): [row["calls"], row["bytes"]] for row in record["rows"]}
    expected = traffic(step_of(run, shape_of(run.model)))
    assert counted == expected, f"counted {counted}, expected {expected}"
    assert all(row["calls"] <= row["most_calls"] * world for row in record["rows"])
    assert all(row["most_bytes"] <= row["bytes"] <= row["most_bytes"] * world for row in record["rows"])
