"""Islands whose numbers go wrong: all leave out the same batches, or go back together, whoever comes or goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.errors import NumericsError
from shoal.train.poison import VARIABLE
from tests.islands.archipelago import Archipelago
from tests.ranks import _warm
from tests.train.test_spikes import BACK_TO, NOISE, SEEN_AT, STEPS, around, short_window, small  # noqa: F401
from tests.train.tiny import make_data, make_run

ISLANDS: dict[str, Any] = {"fleet.islands": 3, "fleet.shards": 8, "fleet.deterministic": True}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"), documents=40)


def islands(tmp_path: Path, data: Path, name: str, **changes: Any) -> Archipelago:
    _warm()
    spec = {"name": name, "train.steps": 24, "checkpoint.every": 10}
    return Archipelago(tmp_path, make_run(data, **{**ISLANDS, **spec, **changes}))


def batches(fleet: Archipelago) -> list[int]:
    """Of each step, as they count in the end: after a rewind it is the last record of a step."""
    positions = {r["step"]: r["position"] for r in fleet.journal("step")}
    assert list(positions) == list(range(1, fleet.run.train.steps + 1))
    return [position // fleet.run.train.batch for position in positions.values()]


def digest(fleet: Archipelago) -> str:
    (end,) = fleet.journal("finished")
    return str(end["digest"])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, data: Path) -> str:
    """The bits of a run that was told from the start what to leave out."""
    with islands(tmp_path_factory.mktemp("told"), data, "told", **{"data.skip": (7, 8, 15)}) as fleet:
        fleet.start(0, 1, 2)
        fleet.wait()
        return digest(fleet)


def test_a_batch_with_a_nan_is_left_out_by_all(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: str
) -> None:
    monkeypatch.setenv(VARIABLE, "nan:7,8,15")
    with islands(tmp_path, data, "nan") as fleet:
        fleet.start(0, 1, 2)
        fleet.wait_for_step(3)
        fleet.kill(0)  # the first one: who comes back has to hear of batches 7 and 8 from the others
        fleet.wait_for_step(6)
        fleet.start(0)
        assert fleet.wait() == {0: {0}, 1: {0}, 2: {0}}
        assert batches(fleet) == [b for b in range(27) if b not in (7, 8, 15)]
        assert [(r["step"], r["batch"]) for r in fleet.journal("skip")] == [(8, 7), (8, 8), (14, 15)]
        assert digest(fleet) == undisturbed


def test_all_have_died_and_what_was_left_out_stays_so(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: str
) -> None:
    monkeypatch.setenv(VARIABLE, "nan:7,8,15")
    with islands(tmp_path, data, "dead") as fleet:
        fleet.start(0, 1, 2)
        fleet.wait_for_step(16)
        for island in range(3):
            fleet.kill(island)
        fleet.start(0, 1, 2)
        assert fleet.wait() == {0: {0}, 1: {0}, 2: {0}}
        assert [r["step"] for r in fleet.journal("start")] == [0, 10]
        assert batches(fleet) == [b for b in range(27) if b not in (7, 8, 15)]
        assert [r["batch"] for r in fleet.journal("skip")] == [7, 8, 15]
        assert digest(fleet) == undisturbed


def test_too_many_end_the_run_on_all_of_them(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "nan:7-20")
    with islands(tmp_path, data, "hopeless", **{"guard.skips": 2}) as fleet:
        fleet.start(0, 1, 2)
        assert fleet.wait() == {i: {NumericsError.exit_code} for i in range(3)}
        assert [r["batch"] for r in fleet.journal("skip")] == [7, 8]


@pytest.mark.slow
@pytest.mark.usefixtures("short_window")
@pytest.mark.parametrize("one_dies", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_after_a_spike_all_go_back_together(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, one_dies: bool
) -> None:
    _warm()
    changes = {**ISLANDS, "fleet.islands": 2}
    with Archipelago(tmp_path, small(data, "told", **changes, **around(BACK_TO, SEEN_AT - 1))) as fleet:
        fleet.start(0, 1)
        fleet.wait()
        undisturbed = digest(fleet)
    monkeypatch.setenv(VARIABLE, NOISE)
    with Archipelago(tmp_path, small(data, "spike", **changes)) as fleet:
        fleet.start(0, 1)
        if one_dies:
            fleet.wait_for_step(SEEN_AT - 2)
            fleet.kill(0)
            fleet.start(0)
        assert set(fleet.wait()) == {0, 1}
        (rewind,) = fleet.journal("rewind")
        assert (rewind["step"], rewind["to"], rewind["batches"]) == (SEEN_AT, BACK_TO, [BACK_TO, SEEN_AT - 1])
        assert [r["step"] for r in fleet.journal("start")] == [0, BACK_TO]
        assert batches(fleet) == [*range(BACK_TO), *range(SEEN_AT, SEEN_AT + STEPS - BACK_TO)]
        assert digest(fleet) == undisturbed
