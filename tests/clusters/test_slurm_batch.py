"""A batch on a real Slurm: an array of nodes that share the units, one of which is lost half-way."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripts.clusters.slurm import Cluster, Missing, slurm
from tests.batch.place import ALONE, Place, once_each
from tests.patience import until
from tests.require import unavailable

from shoal.cli.main import main
from shoal.journal.claims import runners
from shoal.journal.units import Folder
from shoal.launch.backend import OVER, State
from shoal.launch.job import Job, remembered
from shoal.launch.slurm.backend import Slurm

pytestmark = [pytest.mark.cluster, pytest.mark.uses("slurm")]

UNITS = 60


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    try:
        with pytest.MonkeyPatch.context() as patch, slurm(tmp_path_factory.mktemp("slurm")) as found:
            for name, value in found.environment.items():
                patch.setenv(name, value)
            yield found
    except Missing as e:
        unavailable("slurm", str(e))


def ends(job: Job) -> State:
    def over() -> State | None:
        said = Slurm().states([job])[job.id]
        return said if said.phase in OVER else None

    said = until(over, 120)
    print(*Slurm().logs(job, False, None), sep="\n")  # for a test that fails
    assert isinstance(said, State)
    return said


def test_an_array_shares_the_units_is_stopped_loses_a_task_and_ends_with_each_done_once(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_WORKSPACE", str(tmp_path))
    place = Place(tmp_path)
    fail = 'case $1 in 7) exit 2;; 9) [ "$SHOAL_UNIT_ATTEMPT" -ge 1 ] || kill -9 $$;; esac\n'
    (tmp_path / "unit.sh").write_text(f"{ALONE}hostname >>hosts\nwhile [ ! -e go ]; do sleep 0.1; done\n{fail}")
    batch = {"command": ["sh", "unit.sh", "{index}"], "units": UNITS, "at_once": 2}
    run = {"name": "b", "batch": batch, "guard": {"backoff_s": 0.01, "grace_s": 3}}
    (tmp_path / "b.yaml").write_text(json.dumps({**run, "launch": {"on": "slurm", "nodes": 2, "queue": "low"}}))
    assert main(["launch", "b.yaml"]) == 0
    job = remembered(place.run_dir)
    assert job is not None
    until(lambda: len(place.noted()) == 4, 120)  # two nodes, two at once
    assert main(["ps", "b"]) == 0
    assert "0 of 60 units done, 4 run, 56 wait" in capsys.readouterr().out
    assert main(["stop", "b"]) == 0
    assert ends(job).phase == "stopped"
    assert sum(place.ends("stopped").values()) == 4

    assert main(["resume", "b"]) == 0
    job = remembered(place.run_dir)
    assert job is not None
    until(lambda: len(place.noted()) == 8, 120)
    lost = next(r for r in runners(Folder(place.run_dir)) if r.left is None and r.node == 1)
    # Slurm's own word for a lost start: the task is ended where it is and begins again.
    cluster.ask("scontrol", "requeue", f"{job.id}_1")
    until(lambda: any(r.id == lost.id and r.left == 143 for r in runners(Folder(place.run_dir))), 120)
    (tmp_path / "go").touch()
    state = ends(job)
    assert (state.phase, state.exit_code) == ("failed", 78), "unit 7 has failed for good"
    done = set(range(UNITS)) - {7}
    assert place.ends("done") == once_each(done)
    assert Counter(r["cause"] for r in place.records("unit_ended") if r["outcome"] == "failed") == {
        "user-error": 1,
        "killed": 1,
    }
    assert place.noted("clashes") == []
    assert len(set((tmp_path / "hosts").read_text().split())) == 2
    assert main(["ps"]) == 0
    assert "unit 7 was called wrongly" in capsys.readouterr().out
