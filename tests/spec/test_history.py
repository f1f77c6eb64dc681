"""What may change in a run that has begun, and what is no change at all."""

from __future__ import annotations

from typing import Any

from shoal.spec.begun import differences
from shoal.spec.run import Run

BASE: dict[str, Any] = {"name": "a", "data": {"train": "/x"}, "train": {"steps": 9}}


def changes(before: dict[str, Any], after: dict[str, Any], auto_is_equal: bool = False) -> dict[str, bool]:
    """Each changed name, and whether it may."""
    old, new = Run.model_validate({**BASE, **before}), Run.model_validate({**BASE, **after})
    return {d.key: d.safe for d in differences(old, new, auto_is_equal)}


def test_when_and_where_is_saved_may_change_and_what_one_step_is_may_not() -> None:
    assert changes({}, {"checkpoint": {"every": 5, "remote": "s3://b"}}) == {
        "checkpoint.every": True,
        "checkpoint.remote": True,
    }
    assert changes({}, {"mesh": {"tp": 2}, "seed": 1}) == {"seed": False, "mesh.tp": True}
    assert changes({}, {"train": {"steps": 9, "batch": 8}}) == {"train.batch": False}
    assert changes({}, {"plan": {"on": "h100", "rates": 0.8}}) == {"plan.on": True, "plan.rates": True}


def test_another_spelling_is_no_change() -> None:
    assert changes({"checkpoint": {"every": "600 s"}}, {"checkpoint": {"every": "10min"}}) == {}
    assert changes({"checkpoint": {"remote": "s3://b/p/"}}, {"checkpoint": {"remote": "s3://b/p"}}) == {}


def test_a_new_auto_agrees_with_what_was_decided_before() -> None:
    assert changes({"mesh": {"tp": 2}}, {}, auto_is_equal=True) == {}
    assert changes({"mesh": {"tp": 2}}, {}) == {"mesh.tp": True}


def test_a_difference_is_said_in_words() -> None:
    old, new = (Run.model_validate({**BASE, "data": {"train": path}}) for path in ("/x", ["/y", "/z"]))
    assert [str(d) for d in differences(old, new, auto_is_equal=False)] == ["data.train was [/x], now [/y, /z]"]
