"""A change of one line in the step fails a row of every driver: the reference digests can see what they are for.

The line is changed in a copy of the package: in the step that drivers share, and in what the stages of a cut model have
of their own, whose forward passes are messages.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.compat.bits import ROOT, Kept, computed, near

ROWS = ("plain", "islands 2 x 1", "swarm, one peer", "stages, one")
TWICE = "; [p.grad.mul_(2) for _, p in self._model.named_parameters()]"


@dataclass(frozen=True)
class Change:
    file: str  # below src/shoal
    line: str  # how a line ends that is there once
    instead: str


MUTATIONS = {
    "the clip is skipped": [
        Change(
            "parallel/clip.py",
            "return norm, norm.new_tensor(scale) if limit is None else scale * (limit / (norm + TINY)).clamp(max=1.0)",
            "return norm, norm.new_tensor(scale)",
        ),
    ],
    "a sample is dropped": [
        Change("train/step.py", "return self._hooks.batch(at, batches)", "return self._hooks.batch(at, batches)[1:]"),
        Change("stages/layers.py", "= run.train.batch // self._rows", "= run.train.batch // self._rows - 1"),
    ],
    "a gradient is doubled": [
        Change("train/step.py", "loss = self._model.total(part)", "loss = self._model.total(part)" + TWICE),
        Change("stages/layers.py", "self._flat.gather(self._sum)", "self._flat.gather(self._sum).mul_(2)"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("what", MUTATIONS)
def test_a_change_of_one_line_in_the_step_is_seen_in_every_driver(what: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src" / "shoal", tmp_path / "shoal")  # with what is compiled: it goes by the time of a file
    for change in MUTATIONS[what]:
        file = tmp_path / "shoal" / change.file
        text = file.read_text()
        assert text.count(f"{change.line}\n") == 1, f"{change.file} has no such line any more: {change.line}"
        file.write_text(text.replace(f"{change.line}\n", f"{change.instead}\n"))
    found, kept = computed(ROWS, tmp_path), Kept.read().rows
    # By more than rounding: it is seen on every processor.
    assert [name for name in ROWS if near(kept[name], found[name])] == []
