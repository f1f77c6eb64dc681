"""What the nodes hold in memory is restored like any checkpoint: a lost node loses no step."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.checkpoint import states
from tests.checkpoint.nodes import COLUMNS, ROWS, TOKEN, Node, leave, leave_state, nodes
from tests.checkpoint.states import build, same_bits, tensors_of, train, whole
from tests.patience import Stopwatch, limit
from tests.ranks import rank_outcomes, run_ranks
from tests.slow import some_slow

from shoal import checkpoint
from shoal.checkpoint import ledger
from shoal.checkpoint.memory.generations import Generation, Here, open_folder, remember, retire, settle
from shoal.checkpoint.memory.neighbour import Peer
from shoal.checkpoint.memory.tier import Memory, forget, hold, memory_folder, sweep
from shoal.checkpoint.names import Name, part_file, rank_file
from shoal.checkpoint.store import Folder
from shoal.errors import SetupError

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory whose nodes have their memory in a folder of the test; terms 1 to 3 went on from one another."""
    monkeypatch.setenv("SHOAL_MEMORY", str(tmp_path / "ram"))
    path = tmp_path / "runs" / "myrun"
    for from_step in (-1, 0, 0):
        ledger.claim([Folder(path / "checkpoints")], from_step)
    return path


def folder_on(run: Path, machine: int) -> Path:
    """The folder of a node on a machine of its own: nobody sees another's but through its keeper."""
    root = run.parent.parent / "ram"
    return root.with_name(f"ram-{machine}") / memory_folder(run, machine).relative_to(root)


@pytest.fixture
def two(run: Path) -> Iterator[tuple[Node, Node]]:
    folders = [folder_on(run, machine) for machine in (0, 1)]
    holds = [hold(folder) for folder in folders]
    with nodes(*folders) as (a, b):
        yield a, b
    for one in holds:
        one.close()


def disk(run: Path) -> Folder:
    return Folder(run / "checkpoints")


def spread(nodes: tuple[Node, Node], name: Name, copies: bool = True) -> None:
    """A rank on each node leaves a snapshot, and sends a copy to the next node."""
    for rank, node in enumerate(nodes):
        left = leave(node.folder, name, rank, world=2)
        if copies:
            left.send(nodes[(rank + 1) % 2].address)


def save(run: Path, step: int, term: int) -> None:
    tensors = {"model.w": torch.full((2 * ROWS, COLUMNS), float(step))}
    checkpoint.save(disk(run), step, tensors, {"step": step}, term)


def restored(run: Path, mine: Path, *peers: Peer, address: str = "") -> tuple[int, str, str]:
    """(step, where it came from, what was said about newer ones) of a restore in this process"""
    tensors = {"model.w": torch.zeros(2 * ROWS, COLUMNS)}
    found = checkpoint.restore([*Memory.tiers(mine, peers, [disk(run)], address), disk(run)], tensors)
    assert found is not None
    assert found.extra == {"step": found.step}
    assert (tensors["model.w"] == found.step).all(), "not the bytes of one step"
    where = "disk" if isinstance(found.store, Folder) else found.store.where
    return found.step, where, "; ".join(map(str, found.skipped))


def names_in(memory: Memory) -> list[str]:
    return sorted(memory.list())


def flip(path: Path, at: int = -5) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


# A node is lost


@pytest.mark.parametrize("saved_as", some_slow(["fsdp-2", "ddp-2"], slow=["ddp-2"]))
def test_a_lost_node_loses_no_step_and_the_next_start_may_have_any_mesh(
    saved_as: str, run: Path, two: tuple[Node, Node]
) -> None:
    def worker(rank: int, world: int) -> None:
        """Two workers on two nodes, killed right after a snapshot."""
        model, optimizer = build(saved_as, seed=1)
        for step in (1, 2, 3):
            train(model, optimizer, steps=1)
            left = leave_state(two[rank].folder, Name(step, 3), rank, world, tensors_of(model, optimizer))
            left.send(two[(rank + 1) % 2].address)
        torch.distributed.barrier()
        os.kill(os.getpid(), signal.SIGKILL)

    def straight(rank: int, world: int) -> Tensors:
        model, optimizer = build(saved_as, seed=1)
        train(model, optimizer, steps=3)
        return whole(tensors_of(model, optimizer))

    def restart(rank: int, world: int, layout: str) -> tuple[int, str, Tensors]:
        states.LAYOUTS["fsdp-3"] = 3
        tensors = tensors_of(*build(layout, seed=2))
        tiers = Memory.tiers(survivor.folder, [Peer(node.address, TOKEN) for node in two], [disk(run)])
        found = checkpoint.restore([*tiers, disk(run)], tensors)
        assert found is not None
        assert found.extra == {"step": 3}
        return found.step, found.store.where, whole(tensors)

    expected = run_ranks(straight, 2)[0]
    assert [outcome.status for outcome in rank_outcomes(worker, 2)] == [-signal.SIGKILL] * 2
    lost, survivor = two
    lost.lose()
    for layout, world in {"alone": 1, "ddp-2": 2, "fsdp-2": 2, "fsdp-3": 3}.items():
        for step, where, tensors in run_ranks(restart, world, layout):
            assert (step, where) == (3, "memory")
            assert same_bits(tensors, expected), f"{saved_as} on two nodes → {layout} on one"


def test_each_rank_reads_its_own_node_and_asks_the_keeper_for_the_rest(run: Path, two: tuple[Node, Node]) -> None:
    """No copies were made: rank 1's rows are on node 1 alone, and both ranks want all rows."""
    spread(two, Name(7, 3), copies=False)

    def work(rank: int, world: int) -> tuple[int, str, str]:
        return restored(run, two[rank].folder, two[1 - rank].peer())

    assert run_ranks(work, 2) == [(7, "memory", "")] * 2


class Counting(Peer):
    """Counts how often a keeper is asked what it has."""

    asked = 0

    def kept(self) -> dict[Name, Generation]:
        type(self).asked += 1
        return super().kept()


def test_rank_0_asks_the_keepers_and_tells_the_others(run: Path, two: tuple[Node, Node]) -> None:
    """Each of a thousand ranks asking each of a hundred keepers would be more than those let in."""
    spread(two, Name(7, 3), copies=False)

    def work(rank: int, world: int) -> tuple[tuple[int, str, str], int]:
        there = restored(run, two[rank].folder, Counting(two[1 - rank].address, TOKEN), address=two[rank].address)
        return there, Counting.asked

    (first, asked), (second, asked_by_1) = run_ranks(work, 2)
    assert first == second == (7, "memory", "")
    assert (asked > 0, asked_by_1) == (True, 0)


def test_a_node_that_gets_another_number_after_a_loss_brings_its_memory_along(run: Path) -> None:
    old = hold(memory_folder(run, 1))
    for rank in (0, 1):
        leave(old.folder, Name(9, 3), rank, world=2)
    with nodes(old.folder) as (lingering,):
        mine = open_folder(run, 0)
        assert old.folder.exists(), "taken away from a process that uses it"
        assert restored(run, mine.folder) == (9, "memory", "")  # it is read where it lies
        mine.close()
        old.close()  # the last persister has gone; the keeper has not, and matters to nobody
        mine = open_folder(run, 0)
        assert not old.folder.exists()
        assert restored(run, mine.folder) == (9, "memory", "")
        assert lingering.keeper.process.wait(limit(10)) == 0
    mine.close()


def test_a_keeper_gives_what_its_machine_holds_under_other_numbers_too(run: Path) -> None:
    mine, old = hold(memory_folder(run, 0)), hold(memory_folder(run, 1))
    for rank in (0, 1):
        leave(old.folder, Name(9, 3), rank, world=2)
    with nodes(mine.folder) as (node,):
        assert restored(run, folder_on(run, 5), node.peer()) == (9, "memory", "")
    mine.close()
    old.close()


# What is not whole, not of this run's history, or not right


def test_a_snapshot_is_listed_only_when_all_ranks_parts_can_be_had(run: Path, two: tuple[Node, Node]) -> None:
    a, b = two
    memory = Memory(a.folder, [b.peer()], [disk(run)])
    name = Name(5, 2)
    left = leave(a.folder, name, 0, world=2)
    assert names_in(memory) == []
    leave(b.folder, name, 1, world=2)
    assert names_in(memory) == [str(name)]
    assert sorted(memory.list(str(name))) == ["manifest.json", rank_file(0), rank_file(1)]
    part = (b.folder / str(name) / part_file(1)).read_bytes()
    (b.folder / str(name) / part_file(1)).unlink()
    assert names_in(memory) == [], "the file of rank 1 has no part"
    (b.folder / str(name) / part_file(1)).write_bytes(part)
    (a.folder / str(name) / "extra.json").rename(a.folder / "kept-aside")
    assert names_in(memory) == [], "rank 0 has left no `extra`"
    (a.folder / "kept-aside").rename(a.folder / str(name) / "extra.json")
    left.path.rename(a.folder / ".slot-00000-0")
    assert names_in(memory) == [], "rank 0 is filling its slot again"
    (a.folder / ".slot-00000-0").rename(left.path)
    assert names_in(memory) == [str(name)]
    b.lose()
    assert names_in(memory) == []


def test_memory_is_read_only_and_says_nothing_of_other_files(run: Path, two: tuple[Node, Node]) -> None:
    spread(two, Name(5, 3))
    memory = Memory(two[0].folder, [two[1].peer()], [disk(run)])
    for act in (memory.sweep, lambda: memory.put("a", b""), lambda: memory.remove("a"), lambda: memory.publish("a")):
        with pytest.raises(OSError, match="nobody writes it through this"):
            act()
    for name in ("step-00000005-term-3/owner.json", "step-00000005-term-3/rank-00009.safetensors", "../owner.json"):
        with pytest.raises(FileNotFoundError):
            memory.size(name)
    assert memory.list("ledger") == []
    whole_file = memory.read(f"{Name(5, 3)}/{rank_file(1)}")
    assert whole_file == (two[1].folder / str(Name(5, 3)) / rank_file(1)).read_bytes()


def test_the_newest_of_memory_and_disk_is_used(run: Path, two: tuple[Node, Node]) -> None:
    save(run, 10, term=3)
    spread(two, Name(10, 3))
    assert restored(run, two[0].folder, two[1].peer()) == (10, "memory", "")
    spread(two, Name(12, 3))
    assert restored(run, two[0].folder, two[1].peer()) == (12, "memory", "")
    save(run, 13, term=3)
    assert restored(run, two[0].folder, two[1].peer()) == (13, "disk", "")


def test_what_the_history_of_the_run_does_not_know_is_not_restored(run: Path, two: tuple[Node, Node]) -> None:
    """The snapshots of a writer that was given up, and those of an earlier life of a run of the same name."""
    save(run, 10, term=3)
    spread(two, Name(40, 3))
    spread(two, Name(99, 7))  # a term that nobody has claimed here
    ledger.claim([disk(run)], 10)
    assert restored(run, two[0].folder, two[1].peer()) == (10, "disk", "")


def test_one_damaged_copy_costs_nothing_and_two_cost_a_generation(run: Path, two: tuple[Node, Node]) -> None:
    a, b = two
    save(run, 10, term=3)
    spread(two, Name(20, 3))
    spread(two, Name(30, 3))
    newest = str(Name(30, 3))
    flip(a.folder / newest / rank_file(0))
    step, where, said = restored(run, a.folder, b.peer())
    assert (step, where) == (30, "memory (second copies)")
    assert "rank-00000.safetensors are not those that were written" in said
    flip(b.folder / "copies" / newest / rank_file(0))
    assert restored(run, a.folder, b.peer())[:2] == (20, "memory")
    for node in two:
        for file in node.folder.rglob("rank-*.safetensors"):
            flip(file, at=30)  # in the header
    assert restored(run, a.folder, b.peer())[:2] == (10, "disk")


@pytest.mark.parametrize("file", [part_file(0), part_file(1), "extra.json"])
def test_a_flipped_bit_beside_the_files_is_noticed_and_the_other_copy_read(
    file: str, run: Path, two: tuple[Node, Node]
) -> None:
    a, b = two
    spread(two, Name(20, 3))
    own, copy = (b, a) if file == part_file(1) else (a, b)
    flip(own.folder / str(Name(20, 3)) / file)
    assert restored(run, a.folder, b.peer()) == (20, "memory", "")
    flip(copy.folder / "copies" / str(Name(20, 3)) / file)
    save(run, 10, term=3)
    step, where, said = restored(run, a.folder, b.peer())
    assert (step, where) == (10, "disk")
    assert "damaged (its checksum does not match)" in said


class Killing(Peer):
    """Kills the keeper as soon as a slice is asked for: the manifest and the headers were there still."""

    def __init__(self, node: Node) -> None:
        super().__init__(node.address, TOKEN)
        self._node = node

    def read_into(self, name: Name, rank: int, at: int, into: memoryview) -> None:
        if into.nbytes == ROWS * COLUMNS * 4:
            self._node.keeper.process.kill()
            self._node.keeper.process.wait()
        super().read_into(name, rank, at, into)


@pytest.mark.parametrize("copies", [False, True])
def test_a_keeper_that_dies_while_it_is_read_from_is_made_up_for(
    copies: bool, run: Path, two: tuple[Node, Node]
) -> None:
    a, b = two
    save(run, 10, term=3)
    spread(two, Name(20, 3), copies)
    shutil.rmtree(a.folder / "copies")
    if not copies:
        step, where, said = restored(run, a.folder, Killing(b))
        assert (step, where) == (10, "disk")
        assert "rank-00001.safetensors cannot be read (the keeper at 127.0.0.1:" in said
        return
    third = folder_on(run, 2)
    hold(third).close()
    with nodes(third) as (c,):
        leave(c.folder, Name(20, 3), 1, world=2)
        assert restored(run, a.folder, Killing(b), c.peer()) == (20, "memory", "")


def test_what_one_rank_cannot_reach_nobody_uses(run: Path, two: tuple[Node, Node]) -> None:
    """A network that lets rank 0 through and not rank 1: all take the next tier, and nobody waits."""
    a, b = two
    save(run, 10, term=3)
    spread(two, Name(20, 3), copies=False)

    def work(rank: int, world: int) -> tuple[int, str]:
        others = [b.peer()] if rank == 0 else []
        return restored(run, a.folder, *others)[:2]

    assert run_ranks(work, 2) == [(10, "disk")] * 2


def test_a_frozen_keeper_is_given_up_after_a_moment(
    run: Path, two: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = two
    monkeypatch.setattr("shoal.wire.GREETING_S", 1.0)
    spread(two, Name(20, 3))
    b.keeper.process.send_signal(signal.SIGSTOP)
    watch = Stopwatch()
    try:
        assert restored(run, a.folder, b.peer()) == (20, "memory", "")
        assert watch.quiet_s() < 10
    finally:
        b.keeper.process.send_signal(signal.SIGCONT)


# What stays in memory, and for how long

HOLDER = """
import sys, time
from pathlib import Path
from shoal.checkpoint.memory.ram import hold
held = hold(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder() -> Iterator[Callable[[Path], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(folder: Path) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def grow_old(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (time.time() - 7200,) * 2)


def test_what_a_dead_run_left_goes_after_an_hour_and_nothing_else_does(
    run: Path, holder: Callable[[Path], subprocess.Popen[bytes]]
) -> None:
    mine = hold(memory_folder(run, 0))
    dead, alive, young = (memory_folder(run.with_name(name), 0) for name in ("dead", "alive", "young"))
    own = memory_folder(run, 1)
    for folder in (dead, young, own):
        process = holder(folder)
        leave(folder, Name(1, 1), 0, world=1)
        process.kill()
        process.wait()
    holder(alive)
    for folder in (dead, alive, own):
        grow_old(folder)
    assert sweep(mine.folder) == [dead]
    assert not dead.parent.exists()
    assert alive.exists()
    assert young.exists()
    assert own.exists(), "it is of the run that starts"
    mine.close()


def test_a_run_that_has_ended_in_order_leaves_nothing(run: Path, tmp_path: Path) -> None:
    holds = [open_folder(run, node) for node in (0, 1)]
    folders = [held.folder for held in holds]
    hold(memory_folder(run, 7)).close()  # a persister of an earlier start used it when this one began
    for rank, folder in enumerate(folders):
        leave(folder, Name(1, 1), rank, world=2)
    forget(folders[0])
    assert folders[1].exists(), "its own processes have not ended yet"
    forget(folders[1])
    forget(folders[1])  # once more does no harm
    assert list((tmp_path / "ram").iterdir()) == []
    for held in holds:
        held.close()


def test_after_a_restore_only_what_was_restored_stays_until_there_is_newer(run: Path) -> None:
    folder = hold(memory_folder(run, 0)).folder
    for step in (10, 20, 30):
        leave(folder, Name(step, 1), 0, world=1)
    (folder / "copies").mkdir()
    shutil.copytree(folder / str(Name(10, 1)), folder / "copies" / str(Name(10, 1)))
    shutil.copytree(folder / str(Name(20, 1)), folder / "copies" / str(Name(20, 1)))
    settle(folder, Name(20, 1))
    assert list(Here(folder).kept()) == [Name(20, 1)]
    assert os.listdir(folder / "copies") == [str(Name(20, 1))]
    leave(folder, Name(25, 2), 0, world=1)
    assert sorted(Here(folder).kept()) == [Name(20, 1), Name(25, 2)]
    leave(folder, Name(26, 2), 0, world=1)
    assert sorted(Here(folder).kept()) == [Name(25, 2), Name(26, 2)]
    assert os.listdir(folder / "copies") == []
    retire(folder, 1)
    assert sorted(Here(folder).kept()) == [Name(25, 2), Name(26, 2)]
    settle(folder, None)
    assert Here(folder).kept() == {}


def test_what_was_forgotten_does_not_come_back(run: Path) -> None:
    """A persister that is late must not make the folder anew: nobody would ever take it away."""
    folder = open_folder(run, 0).folder
    forget(folder)
    with pytest.raises(FileNotFoundError):
        remember(folder, Name(1, 1), 0, b"{}", b"{}")
    assert not folder.exists()


def test_a_folder_that_others_may_write_to_is_refused(run: Path, tmp_path: Path) -> None:
    root = tmp_path / "ram" / f"shoal-{os.getuid()}"
    root.mkdir(parents=True)
    root.chmod(0o777)
    with pytest.raises(SetupError, match="not a folder of this user alone"):
        hold(memory_folder(run, 0))
    shutil.rmtree(root)
    root.symlink_to(tmp_path)
    with pytest.raises(SetupError, match="not a folder of this user alone"):
        hold(memory_folder(run, 0))


def test_runs_of_the_same_name_in_two_places_have_memories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOAL_MEMORY", raising=False)
    here, there = memory_folder("/a/runs/x", 0), memory_folder("/b/runs/x", 0)
    assert here != there
    assert here.parent.parent == there.parent.parent == Path(f"/dev/shm/shoal-{os.getuid()}")
    assert here.parent.name.startswith("x-")
    assert memory_folder("/a/runs/../runs/x", 0) == here
    assert memory_folder("/a/runs/x", 1).parent == here.parent
