"""All readers of outside data against generated input: half of a few thousand in `make test`, millions by `make fuzz`.

How many is fixed for each reader, so that a run takes the same work on any machine. What was found once is kept in
cases/READER and read again here.
"""

from __future__ import annotations

import importlib

import pytest

from tests.fuzz import every, run
from tests.fuzz.reader import CASES, READERS
from tests.fuzz.run import Work
from tests.slow import some_slow

every.load()
PARTS = 3  # so that lanes can share them
FEW = 150  # cases that are not halved: some would not be taken once
LARGE = ("torch.distributed.checkpoint", "shoal.model.hf", "shoal.stages", "shoal.cli.main")


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    """What takes long to import, once for all children."""
    for module in LARGE:
        importlib.import_module(module)


def cases_of(name: str, half: int) -> tuple[int, int]:
    """The first one, and how many."""
    most = READERS[name].quick
    first = most if most <= FEW else most // 2
    return (0, first) if half == 0 else (first, most - first)


@pytest.mark.parametrize("half", some_slow([0, 1], slow=[1]))
@pytest.mark.parametrize("part", range(PARTS))
def test_generated_input_is_taken_or_refused_in_one_sentence(part: int, half: int) -> None:
    names = [name for name in sorted(READERS)[part::PARTS] if cases_of(name, half)[1]]
    ran = run.run([Work(name, *cases_of(name, half)) for name in names])
    told = "\n".join(
        f"{f.place}: python -m tests.fuzz {f.reader} --seed {f.seed} --show\n{f.what}" for f in ran.found.values()
    )
    assert not ran.found, told
    assert ran.cases == {name: cases_of(name, half)[1] for name in names}
    noise = [name for name in names if not ran.taken[name] and half == 0]
    assert not noise, (
        f"nothing that the generators of {noise} make is ever taken: they test no more than the first check"
    )


def test_what_was_found_once() -> None:
    """Refused, but for `NAME.taken.*`; under the same limits of time and memory, as it may have been a hang."""
    kept = {folder.name: tuple(sorted(folder.iterdir())) for folder in sorted(CASES.iterdir())}
    assert sum(map(len, kept.values())) >= 20
    assert len(kept) >= 10
    ran = run.run([Work(name, 0, len(files), files) for name, files in kept.items()])
    told = [f"{kept[f.reader][f.seed]}: {f.place}\n{f.what}" for f in ran.found.values()]
    assert not told, "\n".join(told)
    assert ran.cases == {name: len(files) for name, files in kept.items()}
    assert ran.taken == {name: sum(".taken." in file.name for file in files) for name, files in kept.items()}
