"""The rules against scripts that were labelled by hand, and against defects that were put into them."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.adopt.doctor import examine
from tests.adopt.corpus import DEFECTS, LABELS, SCRIPTS, Defect

PRECISION, RECALL = 0.90, 0.80


def rules_of(script: Path) -> list[str]:
    return [finding.rule for finding in examine(script).findings]


def test_nine_of_ten_findings_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    right, wrong, missed = 0, [], []
    for name, labels in LABELS.items():
        found = rules_of(SCRIPTS / name)
        right += sum(rule in labels for rule in found)
        wrong += [f"{name}: {rule}" for rule in found if rule not in labels]
        missed += [f"{name}: {rule}" for rule in sorted(labels - set(found))]
    precision = right / (right + len(wrong))
    with capsys.disabled():
        print(f"\nprecision {precision:.3f} ({right} of {right + len(wrong)} on {len(LABELS)} scripts)")
        print("\n".join(["wrong:", *wrong, "not found:", *missed]))
    assert precision >= PRECISION
    assert len(missed) <= (1 - RECALL) * (right + len(missed))


def found_in(defect: Defect, folder: Path) -> tuple[bool, list[str]]:
    """Whether the doctor finds it where it did not before, and what it says besides that is not right."""
    before = rules_of(SCRIPTS / defect.script)
    after = rules_of(defect.put_into(folder))
    other = [rule for rule in set(after) if rule not in LABELS[defect.script] and rule != defect.rule]
    return after.count(defect.rule) > before.count(defect.rule), other


def test_eight_of_ten_defects_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = {i: found_in(defect, tmp_path / str(i)) for i, defect in enumerate(DEFECTS)}
    recall = sum(found for found, _ in results.values()) / len(DEFECTS)
    with capsys.disabled():
        print(f"\nrecall {recall:.3f} (of {len(DEFECTS)} defects)")
        for i, (found, other) in results.items():
            if not found or other:
                print(f"{DEFECTS[i].script}: {DEFECTS[i].rule} {'found' if found else 'NOT FOUND'}; besides: {other}")
    assert recall >= RECALL
    assert sum(len(other) for _, other in results.values()) <= (1 - PRECISION) * len(DEFECTS)
