"""Who works on which block: one at a time, also when runners die, stand still, or come at the same moment."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.batch.owned import Owned
from shoal.errors import UsageError
from shoal.guard.classify import Failure
from shoal.journal.claims import Claim, Claims, Runner, Watch, read_runner, round_of, write_runner
from shoal.journal.rundir import RunDir
from shoal.journal.units import BLOCKS, Folder, Plan, Summary, created, read_summary, write_summary
from shoal.observe.batch import Tallier
from shoal.spec.batch import Batch
from shoal.values import BadValue
from tests.guard.fake import until

BATCH = Batch(command=("true",), units=1, retries=0)
ELSEWHERE = "another machine"


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    found = Folder(RunDir(tmp_path))
    found.make()
    return found


def runner(folder: Folder, node: int = 0, **changes: object) -> Runner:
    me = replace(Runner.me(node, 1), **changes)  # type: ignore[arg-type]
    write_runner(folder, me)
    return me


def claims(folder: Folder, blocks: int, me: Runner, round_: int = 1, lease_s: float = 1e9) -> Claims:
    return Claims(folder, blocks, round_, me, 0, Watch(folder, lease_s))


def taken(of: Claims) -> list[int]:
    found = []
    while (claim := of.take(0.0)) is not None:
        found.append(claim.block)
    return found


def test_processes_that_claim_at_the_same_moment_never_get_the_same_block(folder: Folder, tmp_path: Path) -> None:
    (begin_read, begin_write), (end_read, end_write) = os.pipe(), os.pipe()
    children = []
    for node in range(6):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                mine = claims(folder, 150, runner(folder, node))
                os.close(begin_write)
                os.close(end_write)
                os.read(begin_read, 1)  # ends for all of them at once
                (tmp_path / f".took-{node}").write_text(json.dumps(taken(mine)))
                (tmp_path / f".took-{node}").rename(tmp_path / f"took-{node}")
                os.read(end_read, 1)  # else the others take over what is its own
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    os.close(begin_write)
    until(lambda: len(list(tmp_path.glob("took-*"))) == 6, within_s=60)
    os.close(end_write)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * 6
    took = [json.loads((tmp_path / f"took-{node}").read_text()) for node in range(6)]
    assert sorted(block for one in took for block in one) == list(range(150))


def test_the_blocks_of_a_runner_are_taken_over_when_it_is_gone_and_not_before(folder: Folder) -> None:
    alive, left = runner(folder), runner(folder)
    dead_here = runner(folder, since="1")  # its number is another process now
    dead_elsewhere = runner(folder, machine=ELSEWHERE)
    for i, who in enumerate((alive, left, dead_here, dead_elsewhere)):
        assert Claims(folder, 4, 1, who, i, Watch(folder)).take(0.0) is not None
    write_runner(folder, replace(left, left=143))
    assert taken(claims(folder, 4, runner(folder))) == [1, 2], "they are gone by what they say or are"
    watch = Watch(folder, 0.0)
    assert not watch.gone(dead_elsewhere.id), "it is seen for the first time"
    write_runner(folder, replace(dead_elsewhere, beat=1))
    assert not watch.gone(dead_elsewhere.id), "it has counted up"
    assert watch.gone(dead_elsewhere.id), "it has not, since"
    write_runner(folder, replace(dead_elsewhere, beat=2))
    assert watch.gone(dead_elsewhere.id), "its units are others' by now"
    assert Claims(folder, 4, 1, runner(folder), 3, watch).take(0.0) == Claim(3, 2)


def test_a_claim_half_written_is_somebodys_until_the_lease_is_over(folder: Folder) -> None:
    (folder.blocks / "00000.1.claim").write_text('{"runner":')
    other = claims(folder, 1, runner(folder), lease_s=0.0)
    assert taken(other) == []
    assert taken(other) == [0]
    assert (folder.blocks / "00000.2.claim").exists()


def test_what_was_done_between_a_look_and_a_claim_is_not_begun_again(folder: Folder) -> None:
    first, second = (claims(folder, 2, runner(folder)) for _ in range(2))
    assert second.take(0.0) is not None  # it has looked: block 1 is free
    assert taken(first) == [1]
    write_summary(folder, 1, Summary(1, 1))
    (folder.blocks / "00001.1.claim").unlink()  # as NFS may show it
    assert taken(second) == []


def test_failed_units_are_open_again_in_the_next_round_alone(folder: Folder) -> None:
    plan = folder.begin(3, None)
    assert (plan.block, plan.blocks, round_of(folder, "job-1"), round_of(folder, "job-1")) == (1, 3, 1, 1)
    mine = claims(folder, 3, runner(folder))
    for block in taken(mine):
        owned = Owned(folder, plan, block, 1)
        owned.next(0.0)
        owned.began(block, "0-x", "0-x.0.log")
        if block == 1:
            assert not owned.failed(block, Failure(None, "killed", "why", None, 9), BATCH, 0.1)
        else:
            owned.done(block, 0.1)
        owned.close()
        mine.closed(block)
    assert mine.all_closed
    assert taken(claims(folder, 3, runner(folder))) == [], "a scheduler's next start is of the same round"
    assert round_of(folder, "job-2") == 2
    assert round_of(folder, None) == 3, "a person's"
    again = claims(folder, 3, runner(folder), round_=3)
    assert taken(again) == [1]
    assert taken(claims(folder, 3, runner(folder), round_=3)) == [], "it is held"
    assert Owned(folder, plan, 1, 3).next(0.0) == 1


def test_a_unit_whose_runner_dies_again_and_again_is_given_up(folder: Folder) -> None:
    plan = folder.begin(1, None)
    starts = 0
    while not (owned := Owned(folder, plan, 0, 1)).over:
        owned.next(0.0)
        owned.began(0, "0-x", "0-x.0.log")
        starts += 1
    owned.close()
    assert starts == 11
    summary = read_summary(folder.done(0))
    assert summary is not None
    assert summary.causes == {"supervisor-lost": 1}


def test_a_million_units_are_a_few_thousand_files_of_which_a_view_reads_the_short_ones(folder: Folder) -> None:
    plan = folder.begin(1_000_000, None)
    assert plan == Plan(1_000_000, 500)
    assert plan.blocks == BLOCKS
    for block in range(plan.blocks - 1):
        write_summary(folder, block, Summary(1, 500, took_s=500.0))
    owned = Owned(folder, plan, plan.blocks - 1, 1)
    for unit in range(999_500, 999_510):
        assert owned.next(0.0) == unit
        owned.began(unit, "0-x", "0-x.0.log")
    (RunDir(folder.path.parent).journal_file).touch()
    tally = Tallier(RunDir(folder.path.parent)).count()
    assert tally is not None
    assert tally.sentence() == "999,500 of 1,000,000 units done, 10 run, 490 wait"


def test_one_plan_for_all_that_come(folder: Folder) -> None:
    assert folder.begin(2, b"a\nb\n") == folder.begin(2, b"a\nb\n")
    assert folder.read_items() == ["a", "b"]
    with pytest.raises(UsageError, match="is of other items"):
        folder.begin(2, b"a\nc\n")
    with pytest.raises(UsageError, match="is of other items"):
        folder.begin(2, None)
    assert not created(folder.plan_file, b"other")


@pytest.mark.parametrize("said", ["", "[]", '{"round": -1}', '{"round": 1, "done": 1e99}', "{" * 100, '{"x": 1}'])
def test_what_others_wrote_there_is_checked(folder: Folder, said: str) -> None:
    folder.done(0).write_text(said)
    with pytest.raises(BadValue):
        read_summary(folder.done(0))
    (folder.runners / "0-x.json").write_text(said)
    assert read_runner(folder.runners / "0-x.json") is None
    folder.plan_file.write_text(said)
    with pytest.raises(BadValue):
        folder.plan()
