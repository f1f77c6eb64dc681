"""What a device costs, by the run file or the catalogue."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import SpecError
from shoal.launch.price import Stated, price, stated
from shoal.spec import Run, dump


def test_the_run_file_is_read_as_its_types_would_read_it(tmp_path: Path) -> None:
    asked = {"name": "a", "data": {"train": "d"}, "train": {"steps": 1}, "plan": {"price": 2, "on": "h100"}}
    run = Run.model_validate({**asked, "launch": {"gpu_type": "h200"}})
    (file := tmp_path / "run.yaml").write_text(dump(run))
    assert stated(file) == Stated(run.plan.price, run.launch.gpu_type)
    file.write_text(dump(run.model_copy(update={"launch": run.launch.model_copy(update={"gpu_type": None})})))
    assert stated(file) == Stated(2.0, "h100")


@pytest.mark.parametrize("text", ["", "[]", "plan: []", "plan: {price: yes}", "plan: {price: true}", "plan: 3"])
def test_what_is_no_price_is_none(text: str, tmp_path: Path) -> None:
    (file := tmp_path / "run.yaml").write_text(text)
    assert stated(file) == Stated()


def test_a_file_that_is_no_yaml_is_refused(tmp_path: Path) -> None:
    (file := tmp_path / "run.yaml").write_text("plan: {")
    with pytest.raises(SpecError, match=r"run\.yaml:\d+:\d+"):
        stated(file)


def test_a_stated_price_wins_and_an_unknown_device_has_none() -> None:
    assert price(Stated(2.5, "h100"), "NVIDIA H200") == (2.5, "$2.50 a device and hour (plan.price)")
    usd, by = price(Stated(), "NVIDIA H200")
    assert usd
    assert by is not None
    assert "a H200 and hour" in by
    assert price(Stated(device="label-of-ours"), "NVIDIA H200") == (None, None)
