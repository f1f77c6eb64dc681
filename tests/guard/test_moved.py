"""A run that is moved, copied, only readable, or gone on with by other code."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.journal.journals import make_run as make_story
from tests.train.tiny import make_data, make_run

from shoal.cli.resume import _refuse
from shoal.errors import DataError, UsageError
from shoal.guard.begin import create, other_code, same_data
from shoal.guard.history import History
from shoal.journal.rundir import RunDir
from shoal.observe import report as reporting
from shoal.spec.begun import differences


def test_data_that_moved_are_the_same_data_and_others_are_refused(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    run = make_run(data)
    run_dir = RunDir.of("tiny", tmp_path)
    run_dir.path.mkdir(parents=True)
    create(run_dir, run)
    os.rename(data, tmp_path / "moved")
    make_data(tmp_path / "other", seed=1)
    (there,) = differences(run, make_run(tmp_path / "moved"), auto_is_equal=False)
    assert there.safe
    assert there.argument == f"data.train={tmp_path / 'moved'}"
    _refuse(run_dir, History.of(run_dir), [there])
    with pytest.raises(DataError, match="other holds other data than run 'tiny' was begun with"):
        same_data(run_dir, [str(tmp_path / "other")])
    weighted = make_run(data, **{"data.train": [{"path": str(tmp_path / "moved")}, {"path": str(tmp_path / "other")}]})
    with pytest.raises(UsageError, match="that would break the history"):
        _refuse(run_dir, History.of(run_dir), differences(run, weighted, auto_is_equal=False))


def test_other_versions_than_the_run_was_begun_with_are_named(tmp_path: Path) -> None:
    run = make_run(make_data(tmp_path / "data"))
    run_dir = RunDir.of("tiny", tmp_path)
    run_dir.path.mkdir(parents=True)
    create(run_dir, run)
    assert other_code(run_dir, run) is None
    about = json.loads(run_dir.identity_file.read_text())
    run_dir.identity_file.write_text(json.dumps(about | {"shoal": "0.0.9"}))
    assert "shoal 0.0.9 → " in (other_code(run_dir, run) or "")
    run_dir.identity_file.write_text("[]")
    assert other_code(run_dir, run) is None


def test_a_run_that_one_may_only_read_has_a_report_without_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = make_story(tmp_path).open().start().steps(3).close()

    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(story.run_dir.report))

    monkeypatch.setattr(reporting, "draw", refused)  # root, as tests run, may write everywhere
    found = reporting.report(story.run_dir)
    assert "cannot be written (Permission denied)" in reporting.as_text(found)
    assert reporting.as_json(found)["pictures"] == []
