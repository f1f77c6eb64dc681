"""MLflow in SQLite: what `mlflow ui` shows is the run, whole and once, whatever happened on the way."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from shoal.journal.rundir import RunDir
from shoal.track.mirror import Mirror
from tests.journal.journals import Story, change_spec, crash_and_finish, loss_at, make_run


@pytest.fixture(autouse=True)
def _quick_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def sync(run_dir: RunDir) -> None:
    pumps = Mirror(run_dir, until_closed=False).sync()
    assert [pump.failing for pump in pumps if not pump.complete] == []


class There:
    """The one run of a workspace, as MLflow's own client sees it."""

    def __init__(self, workspace: Path) -> None:
        from mlflow import MlflowClient

        self.client = MlflowClient(f"sqlite:///{workspace / 'mlflow.db'}")
        experiment = self.client.get_experiment_by_name("shoal")
        assert experiment is not None
        self.experiment = experiment
        (self.run,) = self.client.search_runs([experiment.experiment_id])

    def history(self, key: str) -> list[tuple[int, float]]:
        return [(m.step, m.value) for m in self.client.get_metric_history(self.run.info.run_id, key)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, mlflow_tables: Path) -> tuple[Story, There]:
    workspace = tmp_path_factory.mktemp("workspace")
    shutil.copy(mlflow_tables, workspace / "mlflow.db")
    story = make_run(workspace)
    story.open().start(peak_flops=1e10).steps(50).eval().steps(100).checkpoint().steps(150)
    story.failure().start(at_step=100, peak_flops=1e10).steps(200).eval().checkpoint().close()
    sync(story.run_dir)
    return story, There(workspace)


def test_every_step_is_there_once_though_fifty_were_redone(finished: tuple[Story, There]) -> None:
    _, there = finished
    assert there.history("loss") == [(step, loss_at(step)) for step in range(1, 201)]
    assert [step for step, _ in there.history("eval_loss")] == [50, 200]
    assert there.history("attempt") == [(0, 0.0), (100, 1.0)]


def test_all_metrics_have_the_journals_time_and_mfu_its_value(finished: tuple[Story, There]) -> None:
    story, there = finished
    wanted = {"loss", "grad_norm", "lr", "tokens_per_s", "mfu", "data_wait_s", "eval_loss", "attempt"}
    assert set(there.run.data.metrics) == wanted
    first = there.client.get_metric_history(there.run.info.run_id, "loss")[0]
    record = next(r for r in story.records if r["kind"] == "step")
    assert first.timestamp == round(record["t"] * 1000)
    # 2048 tokens in 0.5 s at 6e6 FLOPs a token on two devices of 1e10 FLOP/s.
    assert there.run.data.metrics["mfu"] == pytest.approx(4096 * 6e6 / 2e10, rel=1e-3)


def test_parameters_tags_status_and_artifacts_are_there(finished: tuple[Story, There]) -> None:
    story, there = finished
    params, tags = there.run.data.params, there.run.data.tags
    assert params["train.steps"] == "200"
    assert params["data.train.0.path"] == "/data/train"
    assert params["train.optimizer.betas.1"] == "0.95"
    assert tags["mlflow.source.git.commit"] == "0123abcd" * 5
    assert (tags["shoal.git_commit"], tags["shoal.git_dirty"]) == ("0123abcd" * 5, "True")
    assert tags["shoal.data_fingerprint"] == "f00d" * 8
    assert (tags["shoal.version"], tags["shoal.torch"]) == ("0.1.0", "2.13.0")
    assert tags["shoal.command"] == "shoal train http://***@host"
    assert (tags["shoal.seed"], tags["shoal.host"]) == ("7", "box")
    assert tags["shoal.run_dir"] == str(story.run_dir.path)
    assert (tags["shoal.attempts"], tags["shoal.failures"]) == ("2", "1")
    assert (there.run.info.status, there.run.info.run_name) == ("FINISHED", "demo")
    assert there.run.info.end_time == round(story.records[-1]["t"] * 1000)
    assert there.run.info.artifact_uri.startswith((story.run_dir.workspace / "mlartifacts").as_uri())
    files = {f.path for f in there.client.list_artifacts(there.run.info.run_id)}
    assert files == {"run.yaml", "identity.json"}


def test_a_cursor_lost_after_an_upload_duplicates_nothing(finished: tuple[Story, There]) -> None:
    story, there = finished
    cursor = story.run_dir.track / "mlflow.json"
    known = json.loads(cursor.read_text())
    cursor.write_text(json.dumps({**known, "offset": 0}))
    sync(story.run_dir)
    assert len(there.history("loss")) == 200
    cursor.unlink()  # even the id of the run over there is forgotten
    sync(story.run_dir)
    again = There(story.run_dir.workspace)
    assert again.run.info.run_id == there.run.info.run_id
    assert len(again.history("loss")) == 200


def test_a_resumed_run_goes_on_in_the_same_mlflow_run(workspace: Path) -> None:
    story = make_run(workspace).open().start().steps(40).checkpoint().close("stopped", 143, "told to stop")
    sync(story.run_dir)
    assert There(workspace).run.info.status == "KILLED"
    change_spec(story.run_dir, train={"steps": 400})  # MLflow refuses to change a parameter
    story.wait(3600).open(resumed=True).start().steps(45)
    sync(story.run_dir)
    there = There(workspace)
    assert there.run.info.status == "RUNNING"
    assert there.run.data.params["train.steps"] == "200"
    assert there.run.data.tags["shoal.changed.train.steps"] == "400"
    story.steps(50).close("failed", 78, "the data is gone")
    sync(story.run_dir)
    there = There(workspace)
    assert there.run.info.status == "FAILED"
    assert [step for step, _ in there.history("loss")] == list(range(1, 51))


def test_redone_steps_that_truly_differ_are_uploaded_and_count_as_the_latest(workspace: Path) -> None:
    story = make_run(workspace).open().start().steps(20).failure()
    story.start(at_step=10).steps(20, loss_shift=0.5).close()
    sync(story.run_dir)
    there = There(workspace)
    at_15 = [value for step, value in there.history("loss") if step == 15]
    assert at_15 == [loss_at(15), loss_at(15) + 0.5]
    assert there.run.data.metrics["loss"] == loss_at(20) + 0.5


def test_a_run_that_was_deleted_over_there_is_uploaded_anew_when_it_goes_on(workspace: Path) -> None:
    story = crash_and_finish(make_run(workspace))
    sync(story.run_dir)
    first = There(workspace)
    first.client.delete_run(first.run.info.run_id)
    sync(story.run_dir)  # nothing is new: who deletes a run does not want it back
    with pytest.raises(ValueError, match="not enough values"):
        There(workspace)
    story.open(resumed=True).start().steps(201).close()
    sync(story.run_dir)
    second = There(workspace)
    assert second.run.info.run_id != first.run.info.run_id
    assert len(second.history("loss")) == 201


def test_a_long_value_is_cut_and_a_loss_that_is_no_number_stays_one(workspace: Path) -> None:
    story = make_run(workspace)
    change_spec(story.run_dir, data={"train": "/" + "x" * 9000})
    story.open().start().steps(3)
    record = {**story.records[-1], "step": 4, "loss": "inf", "grad_norm": "nan"}
    with open(story.run_dir.journal_file, "a") as f:
        f.write(json.dumps(record) + "\n")
    story.close("failed", 78)
    sync(story.run_dir)
    there = There(workspace)
    assert len(there.run.data.params["data.train.0.path"]) == 6000
    assert [math.isnan(value) for _, value in there.history("loss")] == [False, False, False, True]


def test_runs_of_a_group_stand_under_one_parent(workspace: Path) -> None:
    from mlflow import MlflowClient

    for name in ("lr-000", "lr-001"):
        sync(make_run(workspace, name, group="lr", tensorboard=True).open().start().steps(3).close().run_dir)
    client = MlflowClient(f"sqlite:///{workspace / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("shoal")
    assert experiment is not None
    found = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(found) == {"lr", "lr-000", "lr-001"}
    parent = found.pop("lr")
    assert parent.info.status == "FINISHED"  # a heading, which nobody has to end
    assert {run.data.tags["mlflow.parentRunId"] for run in found.values()} == {parent.info.run_id}
    assert {run.data.tags["shoal.group"] for run in found.values()} == {"lr"}
    # TensorBoard goes by folders: the group's has both of them, and no others.
    together = workspace / "tensorboard" / "lr"
    assert sorted(path.name for path in together.iterdir()) == ["lr-000", "lr-001"]
    assert all(any(path.glob("events.out.*")) for path in together.iterdir())
