"""How long a run is can be said in steps, epochs or tokens, in one of them; warm-up and decay may be shares of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import SpecError
from shoal.spec.length import decay_steps, steps_for_epochs, steps_for_tokens, warmup_steps
from shoal.spec.resolve import load
from shoal.spec.run import Schedule
from shoal.train.schedule import lr_ratio
from tests.spec.wrong import GOOD

EPOCHS = GOOD.replace("steps: 100", "epochs: 2")


def of(tmp_path: Path, text: str, *overrides: str) -> tuple[object, object, object]:
    (tmp_path / "run.yaml").write_text(text)
    train = load(tmp_path / "run.yaml", overrides).run.train
    return train.steps, train.epochs, train.tokens


def test_one_on_the_command_line_replaces_the_one_of_the_file(tmp_path: Path) -> None:
    assert of(tmp_path, EPOCHS) == ("auto", 2, None)
    assert of(tmp_path, EPOCHS, "train.steps=10") == (10, None, None)
    assert of(tmp_path, GOOD, "train.epochs=0.5") == ("auto", 0.5, None)
    assert of(tmp_path, GOOD, "train.tokens=1.5B", "train.tokens=20M") == ("auto", None, 20_000_000)
    assert of(tmp_path, GOOD, "train={tokens: 20_000}") == ("auto", None, 20_000)
    assert of(tmp_path, GOOD, "train.epochs=") == (100, None, None)  # nothing was asked for


def test_two_of_them_contradict(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"train\.steps and train\.epochs each say how long the run is; keep one"):
        of(tmp_path, EPOCHS + "  steps: 10\n")
    with pytest.raises(SpecError, match=r"`train\.epochs=2` .*train\.epochs and train\.tokens each say"):
        of(tmp_path, GOOD, "train.epochs=2", "train.tokens=9")


@pytest.mark.parametrize("wrong", ["train.tokens=many", "train.tokens=0", "train.epochs=0", "train.tokens=5X"])
def test_what_is_no_length_is_refused_with_what_is_one(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(SpecError, match=r"number.* (of at least 1, such as|above 0)"):
        of(tmp_path, GOOD, wrong)


def test_steps_read_at_least_what_was_asked_for() -> None:
    assert [steps_for_tokens(n, batch=4, seq_len=16) for n in (1, 64, 65)] == [1, 1, 2]
    assert [steps_for_epochs(e, windows=12, batch=4) for e in (0.01, 1, 1.5, 2)] == [1, 3, 5, 6]
    assert steps_for_epochs(0.1, windows=30, batch=1) == 3  # 0.1 x 30 is a little more than 3 in floats


def test_a_share_has_one_spelling_and_an_old_number_its_old_meaning(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(GOOD)
    for given in ("0.05", "5%", "5.0 %", "05.000%"):
        run = load(tmp_path / "run.yaml", [f"train.schedule.warmup_steps={given}"]).run
        assert run.train.schedule.warmup_steps == "5%"
    assert load(tmp_path / "run.yaml", ["train.schedule.warmup_steps=5"]).run.train.schedule.warmup_steps == 5
    assert load(tmp_path / "run.yaml").run.train.schedule.warmup_steps == "auto"
    for given in ("100%", "1.5", "-5%", "some"):
        with pytest.raises(SpecError, match="or a share of the run below 100%"):
            load(tmp_path / "run.yaml", [f"train.schedule.warmup_steps={given}"])
    with pytest.raises(SpecError, match="`auto`, a whole number of steps of at least 1"):
        load(tmp_path / "run.yaml", ["train.schedule.decay_steps=0"])


def test_shares_leave_room_in_a_run_of_any_length() -> None:
    assert [warmup_steps("5%", n) for n in (1, 10, 100, 1000)] == [0, 0, 5, 50]
    assert [warmup_steps("auto", n) for n in (1, 10, 100, 1000, 100_000)] == [0, 0, 5, 50, 2_000]
    assert [decay_steps("20%", n) for n in (1, 10, 100)] == [1, 2, 20]
    assert [decay_steps("auto", n) for n in (1, 10, 104)] == [1, 2, 20]
    for steps in range(1, 60):
        for warmup in ("1%", "50%", "99.9%"):
            assert warmup_steps(warmup, steps) < steps


def test_a_share_gives_the_same_rates_as_its_number_of_steps() -> None:
    for name in ("cosine", "wsd"):
        share = Schedule(name=name, warmup_steps="10%", decay_steps="30%")  # type: ignore[arg-type]
        counted = Schedule(name=name, warmup_steps=20, decay_steps=60)  # type: ignore[arg-type]
        assert [lr_ratio(share, i, 200) for i in range(200)] == [lr_ratio(counted, i, 200) for i in range(200)]
