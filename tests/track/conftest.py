"""A workspace with MLflow's tables in place: making them takes seconds, copying them none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shoal.track.mirror import Mirror
from tests.journal.journals import make_run


@pytest.fixture(scope="session")
def mlflow_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An `mlflow.db` made by a first run, whose own rows the copies carry in another experiment."""
    folder = tmp_path_factory.mktemp("tables")
    story = make_run(folder, experiment="first").open().start().steps(2).close()
    assert all(pump.complete for pump in Mirror(story.run_dir, until_closed=False).sync())
    return folder / "mlflow.db"


@pytest.fixture
def workspace(tmp_path: Path, mlflow_tables: Path) -> Path:
    shutil.copy(mlflow_tables, tmp_path / "mlflow.db")
    return tmp_path
