"""benchmarks/beside_titan.py: systems take turns, a trace that fails costs nothing, and a trace is read rightly."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.beside.asked import Asked
from benchmarks.beside.system import Ended, System, listen_to
from benchmarks.beside.trace import shares
from benchmarks.beside_titan import lines, measure, ratio_of, source_of

ASKED = Asked("tiny", 2, 1, "cpu", "fp32", False, "", "")


def event(name: str, begin: float, end: float, kind: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": end - begin}


def test_what_is_sent_beside_products_is_not_exposed() -> None:
    events = [
        event("ncclDevKernel_AllGather", 0, 40),
        event("gemm", 10, 30),
        event("gemm", 25, 50),
        event("Memcpy HtoD", 60, 70, "gpu_memcpy"),
        event("cudaLaunchKernel", 0, 100, "cuda_runtime"),
    ]
    assert shares(events, 100e-6) == pytest.approx({"exposed": 0.1, "idle": 0.4, "sending": 0.4})
    assert shares([event("cudaLaunchKernel", 0, 100, "cuda_runtime")], 1.0) == {}, "no kernels were seen"


class Fake:
    """A system whose turns take as long as they are said to."""

    def __init__(self, name: str, said: list[tuple[str, str]], turns: list[float], traced: bool) -> None:
        self.name, self.asked, self.seconds = name, ASKED, list[float]()
        self._said, self._turns, self._traced, self._last = said, iter(turns), traced, ""

    def say(self, words: str) -> None:
        self._said.append((self.name, words))
        self._last = words

    def answers(self, within_s: float) -> list[dict[str, Any]]:
        if not self._last:
            return [{"shoal": None}] * 2
        if self._last.startswith("trace"):
            if not self._traced:
                raise Ended(f"{self.name}: rank 1 has ended")
            return [{"s": 1.0, "exposed": share, "idle": 0.25, "sending": 0.5} for share in (0.1, 0.3)]
        seconds = next(self._turns) if self._last == "go 5" else 9.0
        return [{"s": seconds}, {"s": seconds / 2}]


def test_systems_take_turns_and_a_trace_that_fails_costs_no_measurement() -> None:
    said: list[tuple[str, str]] = []
    peer, ours = Fake("peer", said, [2.0, 2.0, 8.0], False), Fake("ours", said, [1.0, 1.0, 8.0], True)
    rows = measure([peer, ours], rounds=3, steps=5, traced=2, limit_s=60)
    turns = [name for name, words in said if words == "go 5"]
    assert turns == ["peer", "ours"] * 3, "ABAB"
    assert [row["tokens_s"] for row in rows] == [round(5 * ASKED.tokens / 2.0), round(5 * ASKED.tokens / 1.0)]
    assert ratio_of(ours, peer) == 2.0, "a slow round, which both had, counts for neither"
    assert rows[0]["no_trace"] == "peer: rank 1 has ended"
    assert (rows[1]["exposed"], rows[1]["idle"]) == (0.2, 0.25)
    told = "\n".join(lines(rows, {"ours of peer": 2.0}))
    assert "no trace: peer: rank 1 has ended" in told
    assert "exposed  20.0%, idle  25.0%" in told
    assert told.endswith("ours of peer: 2.000")


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[System]:
    """A rank that dies of an exception and one that waits for it."""
    logs, ranks = [tmp_path / "0.log", tmp_path / "1.log"], []
    for log, code in zip(logs, ("input()", "raise KeyError('the cause')"), strict=True):
        with open(log, "w") as err:
            command = [sys.executable, "-c", code]
            pipe = subprocess.PIPE
            ranks.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=err, text=True))
    system = System("any", ASKED, ranks, logs, [listen_to(rank) for rank in ranks])
    yield system
    system.end()


def test_a_rank_that_ends_is_told_by_its_exception(ends: System) -> None:
    with pytest.raises(Ended, match=r"^any: rank 1 KeyError: 'the cause'"):
        ends.answers(60)


def test_another_tree_is_named_by_its_folder_or_a_tarball(tmp_path: Path) -> None:
    (tmp_path / "tree" / "src" / "shoal").mkdir(parents=True)
    assert source_of(tmp_path / "tree", tmp_path / "place") == tmp_path / "tree" / "src"
    subprocess.run(["tar", "-czf", tmp_path / "b.tgz", "-C", tmp_path / "tree", "src"], check=True)
    assert source_of(tmp_path / "b.tgz", tmp_path / "place") == tmp_path / "place" / "src"
    for wrong in (tmp_path, None):
        with pytest.raises(SystemExit, match="--against"):
            source_of(wrong, tmp_path / "place")
