"""Random folders and exports against transformers; `python -m tests.model.against_transformers` tries thousands."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from shoal.spec.families import FAMILIES
from shoal.spec.hf import config
from tests.model.against_transformers import DIFFERENT, EQUAL, OURS, WRONG, Case, cases, config_case, taken


def held(configs: int, exports: int, seed: int) -> list[Case]:
    found = list(cases(list(FAMILIES), configs, exports, seed))
    wrong = [(case.outcome, case.said, case.about) for case in found if case.outcome in WRONG]
    assert not wrong
    return found


def test_random_folders_are_computed_as_transformers_does_or_refused() -> None:
    found = held(configs=10, exports=0, seed=5)
    assert taken(found) >= 0.95  # or it would be no wonder
    assert {case.family for case in found if case.outcome == EQUAL} == set(FAMILIES)
    assert any(case.outcome == OURS for case in found)
    assert all(len(case.said.splitlines()) == 1 for case in found if case.outcome == OURS)


def test_random_models_of_run_files_are_exported_as_they_are_or_refused() -> None:
    found = held(configs=0, exports=30, seed=5)
    assert sum(case.outcome == EQUAL for case in found) >= 12  # half of what is drawn goes together


@pytest.mark.slow
def test_more_random_folders_and_exports() -> None:
    found = held(configs=60, exports=100, seed=6)
    assert taken(found[:-100]) >= 0.95
    assert sum(case.outcome == EQUAL for case in found[-100:]) >= 40


def test_a_field_that_is_read_wrongly_would_be_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(config, "window_from_hf", lambda *_: {"sliding_window": None})
    outcomes = (config_case("mistral", Random(f"window/{n}"), tmp_path / "hf").outcome for n in range(60))
    assert DIFFERENT in outcomes  # the first of them ends it
