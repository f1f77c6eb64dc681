"""A change of one line in the step fails a row of every driver: the reference digests can see what they are for.

The line is changed in a copy of the package, each driver's own where it has its own. Where drivers come to share a
step, their entries become one.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.compat.bits import ROOT, Kept, computed, near

ROWS = ("plain", "islands 2 x 1", "swarm, one peer", "stages, one")
TWICE = "; [p.grad.mul_(2) for _, p in {}.named_parameters()]"


@dataclass(frozen=True)
class Change:
    file: str  # below src/shoal
    line: str  # how a line ends that is there once
    instead: str


MUTATIONS = {
    "the clip is skipped": [
        Change("train/loop.py", "t.model.norm(1 / targets, t.run.train.clip)", "t.model.norm(1 / targets, None)"),
        Change(
            "train/replica.py",
            "self.model.norm(1 / targets, self.run.train.clip)",
            "self.model.norm(1 / targets, None)",
        ),
        Change("train/swarm_mesh.py", "(1 / max(1.0, targets), self._run.train.clip)", "(1 / targets, None)"),
        Change("train/stage_layers.py", "squares**0.5 / targets, self.run.train.clip", "squares**0.5 / targets, None"),
    ],
    "a sample is dropped": [
        Change("train/loop.py", "(batch, t.feed.step(batch), shape.vocab_size)", "(batch, t.feed.step(batch)[1:], 96)"),
        Change(
            "train/islands.py", "self._t.feed.get(self._batch, shard)]", "self._t.feed.get(self._batch, shard)[1:]]"
        ),
        Change("train/swarm_mesh.py", "batches = self._ahead.get(ranges)", "batches = self._ahead.get(ranges)[1:]"),
        Change("train/stage_layers.py", "= run.train.batch // self._rows", "= run.train.batch // self._rows - 1"),
    ],
    "a gradient is doubled": [
        Change(
            "train/loop.py",
            "t.model.backward(micro_batches, clock.mark, known.token_weight)",
            "t.model.backward(micro_batches, clock.mark, known.token_weight)" + TWICE.format("t.model"),
        ),
        Change("train/replica.py", "self.flat.install(total)", "self.flat.install(total.mul_(2))"),
        Change(
            "train/swarm_mesh.py",
            "token_weight=known.token_weight if known else 1.0))",
            "token_weight=known.token_weight if known else 1.0))" + TWICE.format("self._model"),
        ),
        Change("train/stage_layers.py", "self._flat.gather(self._sum)", "self._flat.gather(self._sum).mul_(2)"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("what", MUTATIONS)
def test_a_change_of_one_line_in_the_step_is_seen_in_every_driver(what: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src" / "shoal", tmp_path / "shoal", ignore=shutil.ignore_patterns("__pycache__"))
    for change in MUTATIONS[what]:
        file = tmp_path / "shoal" / change.file
        text = file.read_text()
        assert text.count(f"{change.line}\n") == 1, f"{change.file} has no such line any more: {change.line}"
        file.write_text(text.replace(f"{change.line}\n", f"{change.instead}\n"))
    found, kept = computed(ROWS, tmp_path), Kept.read().rows
    # By more than rounding: it is seen on every processor.
    assert [name for name in ROWS if near(kept[name], found[name])] == []
