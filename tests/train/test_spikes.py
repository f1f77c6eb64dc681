"""A loss that spikes, in real training: the run goes back to before it and around its batches."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from shoal.checkpoint.find import newest, published
from shoal.journal.journal import records
from shoal.journal.rundir import RunDir
from shoal.observe.follow import sentence
from shoal.observe.history import history
from shoal.spec.run import Run
from shoal.train.poison import VARIABLE
from shoal.train.spikes import ROW, WINDOW, Taken, spike
from tests.train.test_numerics import positions, told
from tests.train.tiny import digest_of, make_data, make_run, steps_of, train_on

# A model so small that a hundred steps are a second. The spike begins in step 61 and is seen after step 63; of the
# checkpoints of steps 20, 40 and 60, the newest from at least 8 steps before it is that of step 40.
NOISE, BACK_TO, SEEN_AT, STEPS = "noise:60-62", 40, 63, 66
FEW = 24  # steps say what is usual where a real run goes through a spike: what happens then is the same, and sooner


@pytest.fixture
def short_window(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("spikes", "numerics"):
        monkeypatch.setattr(f"shoal.train.{module}.WINDOW", FEW)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"), documents=40)


def small(data: Path, name: str, **changes: Any) -> Run:
    spec = {
        "name": name,
        "model.dim": 16,
        "model.layers": 1,
        "model.ffn_dim": 16,
        "data.seq_len": 16,
        "train.steps": STEPS,
        "train.batch": 8,
        "train.optimizer.lr": 0.02,
        "checkpoint.every": 20,
        "checkpoint.keep": 4,
        "guard.spikes": "rewind",
        "resources.threads": 1,
    }
    return make_run(data, **{**spec, **changes})


def around(first: int, last: int) -> dict[str, Any]:
    return {"data.skip": list(range(first, last + 1)), "guard.spikes": "off"}


@pytest.mark.usefixtures("short_window")
@pytest.mark.parametrize(
    ("world", "changes"),
    [
        pytest.param(1, {}, marks=pytest.mark.slow),
        (2, {"checkpoint.background": True, "checkpoint.memory": 10}),
        pytest.param(2, {"mesh.dp_shard": 2}, marks=pytest.mark.slow),
        pytest.param(2, {"mesh.tp": 2}, marks=pytest.mark.slow),
        pytest.param(2, {"mesh.pp": 2, "model.layers": 2, "mesh.micro_batch": 4}, marks=pytest.mark.slow),
    ],
    ids=["alone", "ddp, from memory", "fsdp", "tp", "pp"],
)
def test_a_spike_rewinds_and_goes_around_its_batches(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int, changes: dict[str, Any]
) -> None:
    monkeypatch.setenv(VARIABLE, NOISE)
    run_dir = train_on(small(data, "spiked", **changes), tmp_path, world)
    (rewind,) = told(run_dir, "rewind")
    back_to = rewind["to"]
    assert back_to == (50 if "checkpoint.memory" in changes else BACK_TO)
    assert (rewind["step"], rewind["batches"]) == (SEEN_AT, [back_to, SEEN_AT - 1])
    assert "loss" in rewind["why"]
    said = sentence(rewind, "spiked") or ""
    assert f"step {SEEN_AT}: back to step {back_to}, around batches {back_to} to {SEEN_AT - 1}: loss" in said
    seen = history(records(run_dir.journal_file))
    assert seen.steps.column("step").tolist() == list(range(1, STEPS + 1))
    assert len(seen.lost) == SEEN_AT - back_to

    told_to = train_on(small(data, "told", **changes, **around(back_to, SEEN_AT - 1)), tmp_path, world)
    assert digest_of(run_dir) == digest_of(told_to)
    assert positions(run_dir) == positions(told_to)


@pytest.mark.slow
@pytest.mark.usefixtures("short_window")
def test_what_was_saved_after_the_step_it_went_back_to_is_no_history(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed right after the rewind: the next start finds the older checkpoint, and skips what the first one did."""
    run = small(data, "killed")
    monkeypatch.setenv(VARIABLE, f"{NOISE};kill@0:{SEEN_AT + 3}")  # in its 4th step after that
    with pytest.raises(AssertionError, match="SIGKILL"):
        train_on(run, tmp_path, 2)
    run_dir = RunDir.of("killed", tmp_path)
    stale = [one for one in published(run_dir.checkpoints) if one.there and not one.on_history]
    assert [one.name.step for one in stale] == [60]
    found = newest(run_dir.checkpoints)
    assert found is not None
    assert found.step == BACK_TO

    monkeypatch.setenv(VARIABLE, NOISE)
    run_dir = train_on(run, tmp_path, 2)
    assert told(run_dir, "start")[-1]["step"] == BACK_TO
    assert len(told(run_dir, "rewind")) == 1
    undisturbed = train_on(small(data, "undisturbed"), tmp_path, 2)
    assert digest_of(run_dir) == digest_of(undisturbed)
    assert positions(run_dir) == positions(undisturbed)


@pytest.mark.usefixtures("short_window")
@pytest.mark.slow
def test_a_start_in_the_midst_of_a_spike_sees_it_too(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is usual is read from the journal: a run that was killed within the spike decides as if it never was."""
    changes = {"checkpoint.every": 31}  # saved at 31 and 62
    monkeypatch.setenv(VARIABLE, f"{NOISE};kill:62")
    with pytest.raises(AssertionError, match="SIGKILL"):
        train_on(small(data, "killed", **changes), tmp_path, 1)
    monkeypatch.setenv(VARIABLE, NOISE)
    run_dir = train_on(small(data, "killed", **changes), tmp_path, 1)
    assert told(run_dir, "start")[-1]["step"] == 62
    assert [(r["step"], r["to"]) for r in told(run_dir, "rewind")] == [(SEEN_AT, 31)]
    assert digest_of(run_dir) == digest_of(train_on(small(data, "undisturbed", **changes), tmp_path, 1))


@pytest.mark.usefixtures("short_window")
@pytest.mark.slow
def test_a_long_stretch_of_bad_data_is_passed_in_a_few_rewinds(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "noise:60-90")
    run_dir = train_on(small(data, "stretch"), tmp_path, 1)
    first, second = told(run_dir, "rewind")
    assert first["batches"] == [40, 62]
    assert (second["step"], second["to"]) == (43, 20)
    assert second["batches"] == [20, 65 + 46]  # through the spike, and as many again
    assert positions(run_dir)[21] == 112
    undisturbed = train_on(small(data, "told", **around(20, 111)), tmp_path, 1)
    assert digest_of(run_dir) == digest_of(undisturbed)


@pytest.mark.usefixtures("short_window")
def test_too_many_rewinds_stop_the_run(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "noise:60-200")
    with pytest.raises(
        AssertionError, match=r"NumericsError: the loss has spiked .*after 1 rewinds in 1000 steps: low"
    ):
        train_on(small(data, "often", **{"guard.rewinds": 1}), tmp_path, 1)
    assert len(told(RunDir.of("often", tmp_path), "rewind")) == 1


@pytest.mark.usefixtures("short_window")
def test_without_a_checkpoint_from_before_it_the_run_says_so_and_goes_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, NOISE)
    run_dir = train_on(small(data, "none", **{"checkpoint.every": 0}), tmp_path, 1)
    assert told(run_dir, "rewind") == []
    (warning,) = told(run_dir, "warning")
    assert "no checkpoint of step 52 or older to go back to" in warning["text"]
    assert positions(run_dir)[STEPS] == STEPS - 1


# The detector alone


def curve(losses: list[float], norms: list[float] | None = None) -> list[Taken]:
    return [Taken(i + 1, x, (norms or [1.0] * len(losses))[i]) for i, x in enumerate(losses)]


def alarms(taken: list[Taken]) -> list[int]:
    return [taken[i - 1].step for i in range(1, len(taken) + 1) if spike(taken[max(0, i - WINDOW - ROW) : i])]


def test_nothing_is_judged_before_there_is_a_usual() -> None:
    assert alarms(curve([1.0] * (WINDOW - 1) + [9.0] * ROW)) == []
    assert alarms(curve([1.0] * WINDOW + [9.0] * ROW)) == [WINDOW + ROW]


def test_one_or_two_steps_out_of_line_are_no_spike() -> None:
    assert alarms(curve(([1.0] * 40 + [9.0] * (ROW - 1)) * 8)) == []


def test_a_gradient_norm_that_stays_out_of_line_is_one() -> None:
    assert alarms(curve([1.0] * 80, [0.5] * 70 + [6.0] * 10))[0] == 73


def noise(kind: str, chance: random.Random) -> float:
    match kind:
        case "normal":
            return chance.gauss(0, 1)
        case "long tail":
            return chance.gauss(0, 1) / max(0.05, chance.random()) ** 0.5
        case _:
            return chance.lognormvariate(0, 1) - 1.65


@pytest.mark.parametrize("kind", ["normal", "long tail", "lognormal"])
def test_noise_raises_no_alarm(kind: str) -> None:
    """Curves that fall as real ones do, with noise of a hundredth and a tenth of the loss."""
    chance = random.Random(kind)
    for size in (0.01, 0.1):
        losses = [x + size * x * noise(kind, chance) for x in (2 + 6 * math.exp(-i / 500) for i in range(2_000))]
        norms = [0.5 + abs(0.3 * noise(kind, chance)) for _ in losses]
        assert alarms(curve(losses, norms)) == []


def test_real_curves_raise_no_alarm(data: Path, tmp_path: Path) -> None:
    """As noisy as they get: tiny batches, no clipping, rates up to where training just holds."""
    for lr in (0.02, 0.1):
        changes = {"train.batch": 2, "train.optimizer.lr": lr, "train.clip": None, "train.steps": 150}
        run = small(data, f"lr-{lr}", **changes, **{"checkpoint.every": 0, "guard.spikes": "warn"})
        run_dir = train_on(run, tmp_path, 1)
        assert told(run_dir, "warning") == []
        assert len(steps_of(run_dir)) == 150
