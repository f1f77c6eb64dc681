"""MLflow: SQLite in the workspace by default, or a tracking server.

Uploading a point twice does no harm (MLflow keys it by name, step, time and value), so a batch whose answer was lost
is simply sent again. Making a run is not like that: before one is made, a run with our key is looked for.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import needs_extra
from shoal.journal.rundir import RunDir
from shoal.masking import mask
from shoal.track.about import About
from shoal.track.cursor import Cursor
from shoal.track.events import Event
from shoal.track.knock import knock

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

STATUS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED", "dead": "KILLED"}
MOST_VALUES = 1000  # metrics, or all things together, in one request
MOST_PARAMS = 100
PARENT = "mlflow.parentRunId"
# The client's own defaults (120 s, 7 retries) would hold an upload for many minutes; waiting is the pump's business.
# There is no usage reporting from inside somebody's training run either.
CLIENT_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}


class ToMlflow:
    name = "mlflow"
    durable = True
    most_values = MOST_VALUES - 100

    def __init__(self, run_dir: RunDir, where: str | bool) -> None:
        self._run_dir = run_dir
        self._embedded = where is True
        self._database = run_dir.workspace / "mlflow.db"
        self._uri = f"sqlite:///{self._database}" if self._embedded else str(where)
        self.address = mask(self._uri)
        self.label = f"MLflow at {self.address}"
        self._client: MlflowClient | None = None
        self._run_id = ""

    def open(self, about: About, cursor: Cursor) -> None:
        for name, value in CLIENT_SETTINGS.items():
            os.environ.setdefault(name, value)
        knock(self._uri)
        try:
            from mlflow import MlflowClient
        except ImportError:
            raise needs_extra("mlflow", "mlflow", "tracking with MLflow") from None
        for chatty in ("alembic", "mlflow.store.db.utils", "mlflow.tracking"):
            logging.getLogger(chatty).setLevel(logging.WARNING)
        with self._database_lock():
            self._client = MlflowClient(self._uri)
            experiment_id = self._experiment(self._client, about.track.experiment)
        run = self._find(self._client, cursor.remote.get("run_id"), about.key, experiment_id)
        if run is None:
            cursor.forget()
            tags = {**about.tags, **_standard_tags(about)}
            if about.track.group is not None:
                tags[PARENT] = self._parent(self._client, about.track.group, experiment_id)
            run = self._client.create_run(experiment_id, round(about.started * 1000), tags, about.name)
        self._run_id = run.info.run_id
        if cursor.remote.get("run_id") != self._run_id:
            cursor.forget()
            cursor.remote = {"run_id": self._run_id, "experiment_id": experiment_id}
            cursor.save()
            if self._embedded:  # on a server the artifacts' place may be a path that exists only over there
                for file in (self._run_dir.spec_file, self._run_dir.identity_file):
                    if file.exists():
                        self._client.log_artifact(self._run_id, str(file))
        self._describe(self._client, run, about)

    def send(self, events: list[Event], cursor: Cursor) -> None:
        from mlflow.entities import Metric, RunTag

        assert self._client is not None
        metrics: list[Metric] = []
        tags: dict[str, str] = {}
        status: Event | None = None
        failures = int(cursor.remote.get("failures", 0))
        for event in events:
            if not event.again:
                ms = round(event.t * 1000)
                metrics += [Metric(key, _plottable(v), ms, event.step) for key, v in event.values.items()]
            if event.kind == "failure":
                failures += 1
                tags |= {"shoal.failures": str(failures), "shoal.last_failure": event.note}
            elif event.kind == "start":
                tags["shoal.attempts"] = str(int(event.values["attempt"]) + 1)
            elif event.kind in ("open", "close"):
                status = event
        for i in range(0, max(1, len(metrics)), MOST_VALUES - len(tags)):
            part = metrics[i : i + MOST_VALUES - len(tags)]
            self._client.log_batch(self._run_id, part, tags=[RunTag(k, v) for k, v in tags.items()], synchronous=True)
        if status is not None and status.kind == "close":
            self._client.set_terminated(self._run_id, STATUS.get(status.note, "FAILED"), round(status.t * 1000))
        elif status is not None:
            self._client.update_run(self._run_id, status="RUNNING")
        cursor.remote["failures"] = failures

    def finish(self) -> None:
        pass  # every `send` was answered

    def _experiment(self, client: MlflowClient, name: str) -> str:
        from mlflow.exceptions import MlflowException

        found = client.get_experiment_by_name(name)
        if found is None:
            artifacts = (self._run_dir.workspace / "mlartifacts" / name).as_uri() if self._embedded else None
            try:
                return str(client.create_experiment(name, artifacts))
            except MlflowException as e:
                if e.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                found = client.get_experiment_by_name(name)  # another run made it this very moment
        elif found.lifecycle_stage == "deleted":
            client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)

    def _find(self, client: MlflowClient, run_id: str | None, key: str, experiment_id: str) -> Run | None:
        """Our run over there: the one we remember, else one that a lost answer left behind; none if it was deleted."""
        from mlflow.exceptions import MlflowException

        if run_id is None:
            return next(iter(client.search_runs([experiment_id], f"tags.`shoal.key` = '{key}'", max_results=1)), None)
        try:
            run = client.get_run(run_id)
        except MlflowException as e:
            if e.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return run if run.info.lifecycle_stage == "active" else None

    def _parent(self, client: MlflowClient, group: str, experiment_id: str) -> str:
        """The run that MLflow's page shows the group under: made by the first that needs it, and no run of its own."""
        tags = {"shoal.parent": group}

        def there() -> list[Run]:
            return list(client.search_runs([experiment_id], f"tags.`shoal.parent` = '{group}'", max_results=10))

        with self._database_lock():
            if not there():
                made = client.create_run(experiment_id, tags=tags, run_name=group)
                client.set_terminated(made.info.run_id)
        # Over a server two may have made one at the same moment: all take the same, and the other goes.
        first, *more = sorted(there(), key=lambda run: (run.info.start_time, run.info.run_id))
        for run in more:
            client.delete_run(run.info.run_id)
        return str(first.info.run_id)

    def _describe(self, client: MlflowClient, run: Run, about: About) -> None:
        """Parameters cannot be changed in MLflow: one that differs after a resume becomes a tag beside the old one."""
        from mlflow.entities import Param, RunTag
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

        cut = {key: _cut(value, MAX_PARAM_VAL_LENGTH) for key, value in about.params.items()}
        there = run.data.params
        missing = [Param(key, value) for key, value in cut.items() if key not in there]
        for i in range(0, len(missing), MOST_PARAMS):
            client.log_batch(self._run_id, params=missing[i : i + MOST_PARAMS], synchronous=True)
        changed = {f"shoal.changed.{k}": v for k, v in cut.items() if k in there and there[k] != v}
        new = [RunTag(k, v) for k, v in (about.tags | changed).items() if run.data.tags.get(k) != v]
        for i in range(0, len(new), MOST_PARAMS):
            client.log_batch(self._run_id, tags=new[i : i + MOST_PARAMS], synchronous=True)

    @contextmanager
    def _database_lock(self) -> Iterator[None]:
        """Two runs that begin together must not both create the tables of the workspace's database."""
        if not self._embedded:
            yield
            return
        lock = Path(f"{self._database}.lock")
        with open(lock, "w") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            yield


def _standard_tags(about: About) -> dict[str, str]:
    """What MLflow's own page shows of a run."""
    tags: dict[str, Any] = {"mlflow.source.name": f"shoal train {about.name}", "mlflow.source.type": "LOCAL"}
    commit = about.tags.get("shoal.git_commit")
    return {**tags, "mlflow.source.git.commit": commit} if commit else tags


def _plottable(value: float) -> float:
    """MLflow stores infinity as 1.8e308, which flattens every chart; not-a-number is kept as such."""
    return value if math.isfinite(value) else math.nan


def _cut(value: str, limit: int) -> str:
    return value if len(value) <= limit else value[: limit - 1] + "…"
