"""Islands die, stop, come back and lose each other; the others go on, and no step, sample or bit is other than without.

Real processes, sockets and signals, on a toy (tests/islands/toy.py). With real training: tests/guard/test_islands.py.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.islands.epoch import Fence
from shoal.islands.member import SILENT_S
from tests.islands.shore import Shore, alone
from tests.slow import some_slow

STEPS, SHARDS = 80, 16


@pytest.fixture(scope="module")
def expected() -> str:
    return alone(STEPS, SHARDS)


@pytest.fixture
def shore(tmp_path: Path):  # type: ignore[no-untyped-def]
    with Shore(tmp_path, steps=STEPS, shards=SHARDS) as shore:
        yield shore


def lives(shore: Shore, island: int) -> int:
    return sum(record["kind"] == "entered" for record in shore.log(island))


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_killed_island_costs_the_others_nothing_but_its_share(shore: Shore, expected: str, victim: int) -> None:
    shore.start(0, 1, 2, 3)
    shore.wait_for_step(20)
    shore.kill(victim)
    assert set(shore.wait().values()) == {0}
    assert shore.check() == expected
    assert all(lives(shore, island) == 1 for island in range(4))  # nobody had to begin again


@pytest.mark.parametrize("victim", [0, 2])
def test_an_island_that_comes_back_gets_the_state_and_takes_part(shore: Shore, expected: str, victim: int) -> None:
    shore.step_s = 0.05
    shore.start(0, 1, 2, 3)
    shore.wait_for_step(10)
    shore.kill(victim)
    shore.start(victim)
    assert set(shore.wait().values()) == {0}
    assert shore.check() == expected
    back = [record for record in shore.log(victim) if record["kind"] == "entered"][1]["step"]
    assert 10 <= back < STEPS
    took_part = [record for record in shore.log(victim) if record["kind"] == "step" and record["step"] >= back + 2]
    assert all(record["mine"] for record in took_part)  # it computes, too


@pytest.mark.parametrize("victim", [0, 2])
def test_a_stopped_island_is_left_behind_and_comes_back(shore: Shore, expected: str, victim: int) -> None:
    shore.step_s = 0.1
    shore.start(0, 1, 2, 3)
    shore.wait_for_step(10)
    shore.signal(victim, signal.SIGSTOP)
    stopped = shore.step()
    shore.wait_for_step(stopped + 5, timeout_s=SILENT_S + 20)
    shore.signal(victim, signal.SIGCONT)
    assert set(shore.wait().values()) == {0}
    assert shore.check() == expected
    assert [record["kind"] for record in shore.log(victim)].count("evicted") == 1


def test_two_at_once_and_then_the_first_member_too(shore: Shore, expected: str) -> None:
    shore.start(0, 1, 2, 3)
    shore.wait_for_step(15)
    shore.kill(1)
    shore.kill(3)
    shore.wait_for_step(30)
    shore.kill(0)
    assert shore.wait() == {2: 0}
    assert shore.check() == expected


def test_islands_that_come_late_are_taken_in(shore: Shore, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.islands.enter.GATHER_S", 0.5)
    shore.step_s = 0.04
    shore.start(1)
    shore.wait_for_step(5)
    shore.start(0, 2)
    shore.wait_for_step(30)
    shore.start(3)
    assert set(shore.wait().values()) == {0}
    assert shore.check() == expected
    assert max(len(record["members"]) for record in shore.log(1) if record["kind"] == "step") == 4


def test_without_the_tree_the_islands_agree_all_the_same(shore: Shore) -> None:
    """The usual mode: the sum depends on who adds, but all have the same."""
    shore.tree = False
    shore.start(0, 1, 2, 3)
    shore.wait_for_step(20)
    shore.kill(2)
    shore.wait()
    shore.check()


@pytest.mark.slow
@pytest.mark.parametrize("cut", [[0], [2], [0, 1]])
def test_one_side_of_a_cut_network_goes_on_and_the_other_comes_back(shore: Shore, cut: list[int]) -> None:
    """All reach the run directory, where one epoch comes after the other: who is cut off is not in the next."""
    shore.faults = shore.folder / "faults.json"
    shore.islands, shore.step_s, shore.steps = 3, 0.1, 150
    shore.start(0, 1, 2)
    shore.wait_for_step(8, timeout_s=120)
    shore.faults.write_text(json.dumps({"cut": cut, "until": time.time() + SILENT_S + 4}))
    codes = shore.wait(120)
    assert set(codes.values()) == {0}
    assert shore.check() == alone(shore.steps, SHARDS)
    steps = [record for island in range(3) for record in shore.log(island) if record["kind"] == "step"]
    smaller = {tuple(sorted(int(key[0]) for key in r["members"])) for r in steps if len(r["members"]) < 3}
    together = tuple(island for island in range(3) if island not in cut)
    assert smaller == {together} if len(together) == 2 else smaller  # the larger side went on …
    by_step: dict[int, set[int]] = {}
    for record in steps:
        by_step.setdefault(record["step"], set()).add(record["epoch"])
    assert all(len(epochs) == 1 for epochs in by_step.values())  # … and nobody else did


def test_a_stranger_is_not_let_in(shore: Shore, expected: str) -> None:
    """Whoever does not know the token neither joins nor freezes anybody."""
    from shoal.islands.lines import ask

    shore.islands = 2
    shore.start(0, 1)
    shore.wait_for_step(5)
    newest = Fence(shore.folder / "fleet").newest()
    assert newest is not None
    for what in ("freeze", "join", "state", "status"):
        with pytest.raises(OSError, match=r"."):
            ask(newest.first.control, b"x" * 32, {"for": what, "epoch": newest.number, "key": "x"}, dict)
    shore.wait()
    assert shore.check() == expected


@pytest.mark.parametrize("seed", some_slow(range(5), slow=range(2, 5)))
def test_storms(tmp_path: Path, seed: int) -> None:
    """Three faults each, of all kinds, at any moment: 15 of the campaign of benchmarks/islands.py."""
    storm(tmp_path, seed, faults=3, steps=250)


def storm(folder: Path, seed: int, faults: int, steps: int, say: Callable[[str], None] = lambda text: None) -> None:
    rng = random.Random(seed)
    with Shore(folder, steps=steps, shards=SHARDS, step_s=0.01, tree=True) as shore:
        shore.start(0, 1, 2, 3)
        shore.wait_for_step(5)
        back: dict[int, tuple[float, str]] = {}  # island → when it is to be started or let go on
        moments = sorted(rng.sample(range(10, steps - 60), faults))
        began = time.monotonic()
        while shore.pids or back:
            now = time.monotonic()
            for island in [i for i, (at, _) in back.items() if at <= now]:
                if back.pop(island)[1] == "start":
                    shore.start(island)
                else:
                    shore.signal(island, signal.SIGCONT)
            assert not any(shore.reap().values()), "an island has failed"
            free = [island for island in shore.pids if island not in back]
            if moments and shore.step() >= moments[0] and len(free) > 1:
                moments.pop(0)
                island, kind = rng.choice(free), rng.choice(["kill", "kill", "stop", "two"])
                say(f"step {shore.step()}: {kind} island {island}")
                if kind == "stop":
                    shore.signal(island, signal.SIGSTOP)
                    back[island] = (now + rng.choice([0.1, 1.0, SILENT_S + 0.5]), "go on")
                else:
                    victims = [island] if kind == "kill" or len(free) < 3 else rng.sample(free, 2)
                    for victim in victims:
                        shore.kill(victim)
                        back[victim] = (now + rng.choice([0.0, 0.1, 1.0]), "start")
            if now - began > 120:
                raise TimeoutError(f"seed {seed} stands still at step {shore.step()}:\n{shore.stacks()}")
            time.sleep(0.01)
        assert shore.check() == alone(steps, SHARDS), f"seed {seed}: other weights than without faults"
        newest = Fence(folder / "fleet").newest()
        assert newest is not None
        say(json.dumps({"epochs": newest.number}))
