"""Files of a data set are looked at by one process for all that see the same disk; counted call by call."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.data import local_folder, node_disk
from shoal.data.index import index_in
from shoal.decide.auto import decide
from shoal.errors import DataError
from shoal.spec.run import Run
from shoal.train import open_data
from shoal.train.open_data import open_together
from tests.ranks import rank_outcomes, run_ranks
from tests.train.tiny import make_data, make_run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("together") / "data")


@contextmanager
def counted(under: Path) -> Iterator[Counter[str]]:
    """Calls of this process that ask a file system for something below a folder."""
    calls: Counter[str] = Counter()
    real = {name: getattr(os, name) for name in ("stat", "open", "lstat")}

    def counting(name: str) -> Any:
        def call(path: Any, *args: Any, **more: Any) -> Any:
            if isinstance(path, str | os.PathLike) and str(os.fspath(path)).startswith(str(under) + os.sep):
                calls[name] += 1
                calls[os.path.basename(os.fspath(path))] += 1
            return real[name](path, *args, **more)

        return call

    try:
        for name in real:
            setattr(os, name, counting(name))
        yield calls
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def opened(rank: int, world: int, run: Run, root: Path, shared: bool, nodes: int) -> tuple[int, int, str]:
    """(questions about shards, indexes read, what was opened) of one rank; ranks of a node follow each other."""
    os.environ["LOCAL_RANK"] = str(rank % (world // nodes))
    open_data.is_shared = lambda path: shared
    with counted(root) as calls:
        found = open_together(run.data.train, run.data, root)
    return calls["stat"] + calls["lstat"], calls["index.json"], found[0].fingerprint


def test_one_looks_and_the_others_hear(data: Path) -> None:
    run, index = make_run(data), index_in(data)
    assert index is not None
    files = sum(len(shard.files) for shard in index.shards)
    assert files >= 3
    on_one_disk = run_ranks(opened, 4, run, data, True, 2)
    assert [stats for stats, _, _ in on_one_disk] == [on_one_disk[0][0], 0, 0, 0]
    assert on_one_disk[0][0] >= files
    assert [bool(read) for _, read, _ in on_one_disk] == [True, False, False, False]
    assert {name for _, _, name in on_one_disk} == {index.fingerprint}
    disks_of_their_own = run_ranks(opened, 4, run, data, False, 2)
    assert [bool(stats) for stats, _, _ in disks_of_their_own] == [True, False, True, False]


def test_what_is_missing_on_one_node_ends_all_with_one_sentence(data: Path, tmp_path: Path) -> None:
    whole, half = tmp_path / "whole", tmp_path / "half"
    for copy in (whole, half):
        shutil.copytree(data, copy)
    index = index_in(data)
    assert index is not None
    lost = half / index.shards[0].tokens_file.name
    lost.unlink()

    def work(rank: int, world: int) -> str:
        os.environ["LOCAL_RANK"] = "0"  # each is a node, with a disk of its own
        run = make_run(whole if rank == 0 else half)
        try:
            open_together(run.data.train, run.data, tmp_path)
        except DataError as e:
            return str(e)
        return ""

    first, second = run_ranks(work, 2)
    assert second == f"{lost} is missing; copy the data set again, or prepare it again with --overwrite."
    assert first == f"rank 1: {second}"


def test_an_index_that_rank_0_cannot_read_ends_all(tmp_path: Path) -> None:
    run = make_run(tmp_path / "nowhere")

    def work(rank: int, world: int) -> None:
        open_together(run.data.train, run.data, tmp_path)

    outcomes = rank_outcomes(work, 2)
    assert all("there is no folder" in outcome.error for outcome in outcomes)


def test_a_start_looks_at_each_file_once(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor's part: what closes the length, the layout and the vocabulary reads indexes alone."""
    looked: list[str] = []
    real = local_folder.LocalFolder.look
    monkeypatch.setattr(
        local_folder.LocalFolder, "look", lambda self, index: (looked.append(self.where), real(self, index))
    )
    decide(make_run(data, **{"train.steps": "auto", "train.epochs": 1}), Path.cwd())
    assert looked == [str(data)]


def test_many_files_are_looked_at_side_by_side_and_the_wrong_one_is_named(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_folder, "FEW", 1)
    index = index_in(data)
    assert index is not None
    folder = local_folder.LocalFolder(data)
    folder.look(index)
    wrong = index.shards[-1].docs_file.name
    real = os.stat
    short = lambda path, *a, **k: real(data / "index.json") if str(path).endswith(wrong) else real(path, *a, **k)  # noqa: E731
    monkeypatch.setattr(os, "stat", short)
    with pytest.raises(DataError, match=rf"{wrong} has [\d,]+ bytes and the index says"):
        folder.look(index)


def test_which_disks_are_shared() -> None:
    mounts = "22 1 254:1 / / rw shared:1 - ext4 /dev/vda1 rw\n30 22 0:30 / /lustre rw shared:3 - lustre mds:/x rw"
    assert node_disk.is_shared(Path("/lustre/data"), mounts)
    assert not node_disk.is_shared(Path("/data"), mounts)
