"""Ten faults on four islands that train: nobody ends before the run does, every sample counts once, the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.islands.archipelago import Archipelago
from tests.islands.storm import Storm
from tests.ranks import _warm
from tests.train.tiny import make_data, make_run

FAULTS, STEPS = 10, 140


@pytest.mark.slow
def test_ten_faults(tmp_path: Path) -> None:
    _warm()
    data, digests = make_data(tmp_path / "data"), []
    for name, faults in (("quiet", 0), ("storm", FAULTS)):
        changes = {"fleet.islands": 4, "fleet.shards": 16, "fleet.deterministic": True, "checkpoint.every": 40}
        with Archipelago(tmp_path, make_run(data, name=name, **{**changes, "train.steps": STEPS})) as fleet:
            assert Storm(fleet, seed=5, faults=faults).blow() == ""
            steps = fleet.journal("step")
            assert [r["position"] for r in steps] == [i * fleet.run.train.batch for i in range(STEPS)]
            digests.append(fleet.journal("finished")[-1]["digest"])
            if faults:
                assert any(r["left"] for r in fleet.journal("epoch"))
    assert digests[0] == digests[1]
