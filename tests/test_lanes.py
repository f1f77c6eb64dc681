"""Which files of tests run side by side: the longest first, the cores filled, of one service one user at a time."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests import durations
from tests.durations import Took
from tests.lanes import Idle, Work, next_of, works

ROOT = Path(__file__).parents[1]


class Item:
    """As much of a test as is looked at."""

    def __init__(self, nodeid: str, *marks: str, uses: str = "") -> None:
        self.nodeid, self.marks, self.uses = nodeid, marks, uses

    def get_closest_marker(self, name: str) -> bool:
        return name in self.marks

    def iter_markers(self, name: str) -> list[object]:
        return [type("Mark", (), {"args": (self.uses,)})] if name == "uses" and self.uses else []


def work(name: str, wall_s: float, cpu_s: float, *uses: str) -> Work:
    return Work(name, [], Took(wall_s, cpu_s), True, frozenset(uses))


def begun(waiting: list[Work], running: list[Work], lanes: int = 2, idle: float = 0.0) -> list[str]:
    """All that are begun while so many cores are idle."""
    waiting, running = list(waiting), list(running)
    names = []
    while one := next_of(waiting, running, lanes, idle):
        waiting.remove(one)
        running.append(one)
        names.append(one.name)
    return names


def test_what_was_never_recorded_comes_first_then_the_longest() -> None:
    items = [Item("short.py::a"), Item("long.py::a"), Item("long.py::b", "slow"), Item("new.py::a"), Item("long.py::c")]
    known = {"short.py": Took(1, 1), "long.py": Took(9, 3), "long.py slow": Took(5, 5)}
    found = works(items, known)  # type: ignore[arg-type]  # a stand-in
    assert [one.name for one in found] == ["new.py", "long.py", "long.py slow", "short.py"]
    assert [item.nodeid for item in found[1].items] == ["long.py::a", "long.py::c"]
    assert found[0].took == Took(5, 5)  # the median, and a core of its own


def test_there_are_as_many_as_lanes_however_busy() -> None:
    assert begun([work("a", 10, 20), work("b", 9, 18), work("c", 8, 1)], []) == ["a", "b"]


def test_what_is_idle_is_given_to_what_needs_no_more_than_that() -> None:
    running = [work("sleepy", 10, 2), work("lazy", 9, 3)]
    waiting = [work("busy", 8, 16), work("half", 7, 3.5), work("short", 1, 0.9)]
    assert begun(waiting, running, idle=0.2) == []
    assert begun(waiting, running, idle=0.6) == ["half"]
    assert begun(waiting, running, idle=0.6, lanes=1) == []
    assert begun([work(str(i), 10, 0.1) for i in range(9)], running, idle=2.0) == ["0", "1"]  # memory is finite too


def test_idle_cores_are_counted_over_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, stat, tick = 0.0, tmp_path / "stat", os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2})

    def idle_s(first: float, second: float, third: float) -> None:
        lines = [
            f"cpu{n} 9 {int(s * tick / 2)} 9 {int(s * tick / 2)} 0 9" for n, s in enumerate((first, second, third))
        ]
        stat.write_text("\n".join(["cpu 1 2 3 4 5", *lines, "ctxt 7"]))

    idle_s(10, 10, 10)
    idle = Idle(stat)
    now = 0.5
    assert idle.cores() == 0
    idle_s(11, 12, 10.5)
    now = 2.0
    assert idle.cores() == pytest.approx(0.75)  # the second core is not ours
    assert idle.cores() == 0


def test_of_what_there_is_one_only_one_makes_use() -> None:
    waiting = [work("job", 10, 1, "slurm"), work("verbs", 9, 1, "slurm", "ports"), work("pods", 8, 1, "kubernetes")]
    assert begun(waiting, []) == ["job", "pods"]
    assert begun(waiting[1:2], waiting[:1]) == []
    items = [Item("a.py::one", uses="slurm"), Item("a.py::two", uses="ports")]
    assert works(items, {})[0].uses == {"slurm", "ports"}  # type: ignore[arg-type]  # a stand-in


def test_durations_are_kept_sorted_and_without_files_that_are_gone(tmp_path: Path) -> None:
    for name in ("b.py", "a.py"):
        (tmp_path / name).touch()
    file = tmp_path / "durations.json"
    (tmp_path / "gone.py").touch()
    durations.record({"b.py slow": Took(2.04, 1), "gone.py": Took(1, 1)}, tmp_path, file)
    (tmp_path / "gone.py").unlink()
    durations.record({"a.py": Took(3, 0.5), "b.py slow": Took(4, 1)}, tmp_path, file)
    assert file.read_text() == '{\n"a.py": [3.0, 0.5],\n"b.py slow": [4.0, 1.0]\n}\n'
    assert durations.read(file)["a.py"].share == 0.5 / 3


def test_most_files_are_recorded() -> None:
    """Those that are not yet, or not any more, do no harm until somebody records them (`make durations`)."""
    files = {str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py")}
    assert len(files & durations.read().keys()) > len(files) / 2
