"""Every view of an evaluation has a loss for each set, and says 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.journal.journal import Journal
from shoal.journal.reading import told
from shoal.journal.rundir import RunDir
from shoal.launch.why import answer
from shoal.observe.follow import sentence
from shoal.observe.report import as_json, as_text
from shoal.observe.report import report as make
from shoal.observe.status import Status
from shoal.track.events import Reader

SETS = [
    {"name": "web", "weight": 1.0, "loss": 3.0, "targets": 2000},
    {"name": "code", "weight": 3.0, "loss": 2.0, "targets": 500},
]
EVAL: dict[str, Any] = {"kind": "eval", "t": 12.0, "step": 4, "loss": 2.25, "targets": 2500, "precision": "fp8"}


def test_a_line_of_the_live_view() -> None:
    assert sentence(EVAL | {"sets": SETS}, "x") == "step 4: evaluation loss 2.2500 (web 3.0000, code 2.0000) in fp8"
    assert sentence(EVAL | {"precision": "bf16"}, "x") == "step 4: evaluation loss 2.2500"


def test_ps_and_report_have_a_table_of_the_sets_and_trackers_a_curve_of_each(tmp_path: Path) -> None:
    run_dir = RunDir.of("sets", tmp_path)
    run_dir.path.mkdir(parents=True)
    journal = Journal(run_dir.journal_file)
    step = {"tokens": 10, "targets": 10, "loss": 3.0, "grad_norm": 1.0, "lr": 1.0, "begin": 1.0, "attempt": 0}
    journal.note("open", session=0)
    journal.note("start", step=0, world=1, attempt=0, device="cpu", params=10, precision="fp8", mesh={}, total=4)
    journal.note("step", step=4, position=0, samples=1, **step)
    journal.note("eval", **{k: v for k, v in EVAL.items() if k not in ("kind", "t")}, attempt=0, begin=1.0, sets=SETS)
    status = Status("sets", "running", 4, 4, 3.0, None, 1.0, 1.0, "training")
    said = answer(status, None, told(run_dir.journal_file), None, now=20.0)
    for text in (str(said), as_text(report := make(run_dir, pictures=False))):
        assert "web   3.0000  (25.0% of the mean, 2k targets)" in text
        assert "code  2.0000  (75.0% of the mean, 500 targets)" in text
        assert "2.2500 in fp8" in text
    assert said.as_json()["evaluation"]["sets"] == as_json(report)["final_eval_sets"] == SETS
    values = [event.values for event in Reader(run_dir.journal_file).batch(100) if event.kind == "metrics"]
    assert values[-1] == {"eval_loss": 2.25, "eval_loss/web": 3.0, "eval_loss/code": 2.0}
