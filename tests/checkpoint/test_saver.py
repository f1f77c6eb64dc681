"""Saves in the background, with things done to the trainer, to its persisters and to the disk."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.checkpoint.trainer import (
    Plan,
    State,
    codes_of,
    entries,
    faults_met,
    last_step,
    left_in_memory,
    life,
    log,
    persisters,
    published_step,
    running,
    until,
)
from tests.patience import Stopwatch
from tests.ranks import run_ranks
from tests.services import S3Server, s3_server
from xxhash import xxh3_128_hexdigest

from shoal import checkpoint
from shoal.checkpoint import Name, ledger
from shoal.checkpoint.blocks import Digests, file_of
from shoal.checkpoint.part import Part, write_known
from shoal.checkpoint.publish import complete
from shoal.checkpoint.saving import contents_of
from shoal.checkpoint.store import Folder
from shoal.errors import DONE, TOLD_TO_STOP, WRONG_ENVIRONMENT

MIB = 1 << 20


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(tmp_path)


@pytest.fixture
def small_disk(plan: Plan, tiny_disk: Path) -> Path:
    """The checkpoints are on a disk of 8 MiB."""
    plan.run_dir.path.mkdir(parents=True)
    (plan.run_dir.path / "checkpoints").symlink_to(tiny_disk)
    return tiny_disk


def warnings(plan: Plan) -> str:
    return "\n".join(r["text"] for r in log(plan, "warning"))


def newest(plan: Plan) -> Name:
    found = checkpoint.newest(plan.root, verify=True)
    assert found is not None
    return found.name


def start_is_good(plan: Plan, at_least: int) -> int:
    """A further start of the run, to its end; the step it went on from."""
    assert life(plan) == [DONE, DONE]
    starts = [log(plan, "start", rank)[-1] for rank in range(plan.world)]
    assert all(start["good"] for start in starts)
    assert starts[0]["step"] >= at_least
    until(lambda: not persisters(plan))
    assert not left_in_memory(plan)
    return int(starts[0]["step"])


def waits_for_the_disk(plan: Plan) -> bool:
    """Whether both ranks have taken a snapshot and a fault holds up its writing."""
    return faults_met(plan) == plan.fault_times and last_step(plan) > log(plan, "checkpoint")[-1]["step"] + plan.every


def test_a_persister_that_is_killed_in_mid_write_is_replaced_and_the_save_is_tried_again(plan: Plan) -> None:
    plan = replace(plan, kib=32 * 1024, steps=400)
    with running(plan) as ranks:

        def half_written() -> list[Path]:
            files = plan.root.glob(".tmp-step-*/rank-00001.safetensors")
            return [file for file in files if size_of(file) and not (file.with_suffix(".json")).exists()]

        until(half_written)
        os.kill(persisters(plan)[1], signal.SIGKILL)
        step = int(until(lambda: log(plan, "checkpoint"))[0]["step"])
        for pid in ranks.pids:
            os.kill(pid, signal.SIGTERM)
        assert codes_of(ranks) == [TOLD_TO_STOP, TOLD_TO_STOP]
    assert not log(plan, "checkpoint_failed")
    assert step == plan.every
    start_is_good(replace(plan, steps=last_step(plan) + 5), at_least=last_step(plan))


def size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def test_a_save_in_flight_is_finished_without_its_worker_and_the_next_start_uses_it(plan: Plan) -> None:
    plan = replace(plan, fault="write:sleep=1", fault_times=2, memory=False)
    with running(plan) as ranks:
        until(lambda: waits_for_the_disk(plan))
        before = published_step(plan)
        for pid in ranks.pids:
            os.kill(pid, signal.SIGKILL)
    assert newest(plan).step == before == plan.fault_at
    until(lambda: not persisters(plan))
    assert newest(plan).step == 15
    assert start_is_good(replace(plan, fault=""), at_least=15) == 15


def test_a_snapshot_is_the_state_of_its_step_however_soon_the_next_one_changes_it(plan: Plan) -> None:
    """The copies take tens of milliseconds here, and nothing lies between them and the next update but `settle`."""
    plan = replace(plan, kib=64 * 1024, step_s=0.0, steps=13, every=4)
    with running(plan) as ranks:
        until(lambda: published_step(plan) >= 4)
        for pid in ranks.pids:
            os.kill(pid, signal.SIGKILL)
    until(lambda: not persisters(plan))
    for name in filter(None, map(Name.of, entries(plan))):
        assert restored(plan, before=Name(name.step + 1, 0)) == name.step


def test_what_a_dead_persister_has_written_is_not_written_again(tmp_path: Path) -> None:
    """Rank 0 may be reading it, or just renaming the folder around it."""
    store, name, said = Folder(tmp_path), Name(7, 1), []
    contents = contents_of({"w": torch.ones(8)}, block_bytes=64)
    data = memoryview(contents.header(name) + bytes(32))
    digests = Digests(64)
    digests.update(data[-32:])
    file = file_of(data.nbytes, data.nbytes - 32, xxh3_128_hexdigest(data[:-32]), 64, digests.finish())
    part = Part(0, 1, file, contents.packed)

    def chunks() -> Iterator[memoryview]:
        said.append("written")
        yield data

    for _ in range(2):
        write_known(store, name, 0, chunks(), lambda: part)
    assert said == ["written"]
    complete(store, name, 1, {})
    write_known(store, name, 0, chunks(), lambda: part)
    assert said == ["written"]
    assert complete(store, name, 1, {}).name == name, "it is published, and may be said to be"
    assert sorted(os.listdir(tmp_path)) == ["ledger", str(name)]


def test_a_slow_disk_defers_saves_and_never_holds_up_training(plan: Plan) -> None:
    plan = replace(plan, steps=80, fault="write:sleep=0.7", fault_times=99)
    assert life(plan) == [DONE, DONE]
    took = sorted(r["seconds"] for r in log(plan, "took") if r["step"] not in (plan.fault_at + 1, plan.steps))
    assert took[-1] < 0.5, "no step has waited for a write"
    saved = [r["step"] for r in log(plan, "checkpoint")]
    assert len([step for step in saved if step > plan.fault_at]) <= 4, "every fifth of 68 steps was due"
    assert "the checkpoint that is due at step 20 waits: that of step 15 is still being written" in warnings(plan)
    assert not log(plan, "checkpoint_failed")
    assert newest(plan).step == plan.steps


def test_a_persister_that_hangs_holds_up_saves_and_not_training(plan: Plan) -> None:
    plan = replace(plan, steps=100_000)
    with running(plan) as ranks:
        until(lambda: len(persisters(plan)) == 2 and published_step(plan) > 0)
        stopped = persisters(plan)[1]
        os.kill(stopped, signal.SIGSTOP)
        stood = last_step(plan)
        until(lambda: last_step(plan) > stood + 30)
        assert "is still being written" in warnings(plan)
        assert published_step(plan) <= stood + plan.every, "at most what was under way"
        os.kill(stopped, signal.SIGCONT)
        until(lambda: published_step(plan) > stood + 30)
        for pid in ranks.pids:
            os.kill(pid, signal.SIGTERM)
        assert codes_of(ranks) == [TOLD_TO_STOP, TOLD_TO_STOP]
    assert newest(plan).step == last_step(plan)


@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_fails_saves_and_they_succeed_when_there_is_room_again(
    plan: Plan, small_disk: Path, background: bool
) -> None:
    plan = replace(plan, steps=100_000, kib=512, background=background)
    with running(plan) as ranks:
        until(lambda: published_step(plan) > 0)
        fill(small_disk, leave=600 * 1024)
        failed = until(lambda: log(plan, "checkpoint_failed"))
        stood = last_step(plan)
        until(lambda: last_step(plan) > stood + 10)
        (small_disk / "ballast").unlink()
        until(lambda: published_step(plan) > stood + 10)
        for pid in ranks.pids:
            os.kill(pid, signal.SIGTERM)
        assert codes_of(ranks) == [TOLD_TO_STOP, TOLD_TO_STOP]
    assert os.strerror(errno.ENOSPC) in failed[0]["error"]
    assert newest(plan).step == last_step(plan)
    start_is_good(replace(plan, steps=last_step(plan) + 10), at_least=last_step(plan))
    assert len(entries(plan)) == 1 + plan.keep, f"what failed saves have left is swept: {entries(plan)}"


def test_a_save_that_fails_gives_back_the_room_that_it_had_taken(plan: Plan, small_disk: Path) -> None:
    """Else the journal, on the same disk, could not even say so. One rank finds no room; the other's file is dropped
    before the next try, and no more than that is ever left."""
    plan = replace(plan, steps=100_000, kib=512, again_s=0.5)
    with running(plan) as ranks:
        until(lambda: published_step(plan) > 0)
        fill(small_disk, leave=600 * 1024)
        for tries in (1, 2, 3):
            until(lambda n=tries: len(log(plan, "checkpoint_failed")) == n)
            left = list(plan.root.glob(".tmp-step-*/*.safetensors"))
            assert len(left) <= 1
            assert shutil.disk_usage(small_disk).free > 32 * 1024
        for pid in ranks.pids:
            os.kill(pid, signal.SIGKILL)


def fill(disk: Path, leave: int) -> None:
    """While the run saves: what it takes between the look and the writing may be too much."""

    def filled() -> bool:
        try:
            (disk / "ballast").write_bytes(bytes(max(0, 8 * MIB - shutil.disk_usage(disk).used - leave)))
        except OSError:
            (disk / "ballast").unlink()
            return False
        return True

    until(filled)


def test_a_disk_that_turns_read_only_costs_saves_and_nothing_else(plan: Plan, small_disk: Path) -> None:
    plan = replace(plan, steps=100_000)
    with running(plan) as ranks:
        until(lambda: published_step(plan) > 0)
        remount(small_disk, "ro")
        failed = until(lambda: log(plan, "checkpoint_failed"))
        published, stood = published_step(plan), last_step(plan)
        until(lambda: last_step(plan) > stood + 10)
        assert published_step(plan) == published
        remount(small_disk, "rw")
        until(lambda: published_step(plan) > stood + 10)
        for pid in ranks.pids:
            os.kill(pid, signal.SIGTERM)
        assert codes_of(ranks) == [TOLD_TO_STOP, TOLD_TO_STOP]
    assert os.strerror(errno.EROFS) in failed[0]["error"]
    assert newest(plan).step == last_step(plan)


def remount(disk: Path, how: str) -> None:
    """Not while somebody has a file open for writing: the kernel refuses that, and a breaking disk does not ask."""

    def mounted() -> bool:
        return subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], capture_output=True).returncode == 0

    until(mounted)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR2, marks=pytest.mark.slow)])
def test_told_to_stop_while_a_save_is_in_flight_it_saves_and_ends_with_143(plan: Plan, number: int) -> None:
    plan = replace(plan, steps=100_000, fault="write:sleep=1", fault_times=2)
    with running(plan) as ranks:
        until(lambda: waits_for_the_disk(plan))
        watch = Stopwatch()
        os.kill(ranks.pids[1], number)  # one hears it, all stop
        assert codes_of(ranks) == [TOLD_TO_STOP, TOLD_TO_STOP]
        assert watch.quiet_s() < plan.spec().guard.grace_s
    saved = [r["step"] for r in log(plan, "checkpoint")]
    assert saved[-2:] == [15, last_step(plan)]
    assert newest(plan).step == last_step(plan)
    start_is_good(replace(plan, steps=last_step(plan) + 5, fault=""), at_least=last_step(plan))


def test_a_trainer_that_was_believed_dead_ends_and_nothing_of_it_is_used(plan: Plan) -> None:
    """Stopped, replaced, continued: as a machine that comes back."""
    zombie = replace(plan, steps=100_000)
    with running(zombie) as old:
        until(lambda: published_step(plan) > 0)
        for pid in old.pids:
            os.kill(pid, signal.SIGSTOP)
        until(lambda: not [name for name in entries(plan) if name.startswith(".tmp-")])
        went_on_from = newest(plan)
        # The new one reads a journal and a clock of its own; what they share is the store and the memory.
        new = replace(plan, steps=went_on_from.step + 30, step_s=0.05)
        with running(new) as replacing:
            until(lambda: newest(plan).term > went_on_from.term)
            for pid in old.pids:
                os.kill(pid, signal.SIGCONT)
            assert codes_of(old) == [WRONG_ENVIRONMENT, WRONG_ENVIRONMENT]
            assert codes_of(replacing) == [DONE, DONE]
    errors = [log(plan, "error", rank)[-1]["text"] for rank in (0, 1)]
    assert all("has taken over" in text for text in errors)
    assert newest(plan) == Name(new.steps, went_on_from.term + 1)
    assert restored(plan) == new.steps


def test_a_save_that_is_published_after_the_next_start_has_claimed_is_never_used(plan: Plan) -> None:
    zombie = replace(plan, fault="before-publish:sleep=1.5", memory=False)
    with running(zombie) as old:
        until(lambda: faults_met(plan))
        for pid in old.pids:
            os.kill(pid, signal.SIGKILL)
        assert ledger.claim([Folder(plan.root)], plan.fault_at) == 2
        until(lambda: "step-00000015-term-1" in entries(plan))
    until(lambda: not persisters(plan))
    assert newest(plan) == Name(plan.fault_at, 1)
    assert start_is_good(plan, at_least=plan.fault_at) == plan.fault_at


def test_rank_0_does_not_wait_for_ranks_that_were_replaced(plan: Plan) -> None:
    zombie = replace(plan, fault="snapshot@1", patience_s=600, memory=False)
    assert -signal.SIGKILL in life(zombie)
    waiting = persisters(plan)
    assert 0 in waiting, "it has a snapshot, and rank 1 never will"
    assert start_is_good(plan, at_least=plan.fault_at) == plan.fault_at
    assert not persisters(plan)


def test_memory_that_somebody_cleans_up_costs_nothing_but_the_memory(plan: Plan) -> None:
    plan = replace(plan, steps=100_000)
    with running(plan) as ranks:
        until(lambda: published_step(plan) > 0)
        shutil.rmtree(plan.ram)
        stood = last_step(plan)
        until(lambda: published_step(plan) > stood)
        for pid in ranks.pids:
            os.kill(pid, signal.SIGTERM)
        assert codes_of(ranks) == [TOLD_TO_STOP, TOLD_TO_STOP]
    start_is_good(replace(plan, steps=last_step(plan) + 5), at_least=last_step(plan))


def test_a_second_store_that_is_away_holds_up_nothing_and_gets_the_newest_when_it_is_back(plan: Plan) -> None:
    copies = plan.folder / "copies"
    plan = replace(plan, steps=100_000, remote=copies.as_uri())

    def there() -> int:
        return max((name.step for name in map(Name.of, os.listdir(copies / "fake")) if name), default=-1)

    with running(plan) as ranks:
        until(lambda: log(plan, "uploaded"))
        copies.rename(plan.folder / "away")
        copies.write_text("not a folder")
        published = published_step(plan)
        until(lambda: "is tried again" in warnings(plan))
        until(lambda: published_step(plan) > published + 2 * plan.every)
        until(lambda: "are not copied while an earlier one is on its way" in warnings(plan))
        copies.unlink()
        (plan.folder / "away").rename(copies)
        stood = last_step(plan)
        until(lambda: there() > stood)
        for pid in ranks.pids:
            os.kill(pid, signal.SIGTERM)
        assert codes_of(ranks) == [TOLD_TO_STOP, TOLD_TO_STOP]
    assert there() == last_step(plan) == newest(plan).step
    until(lambda: not persisters(plan))


def test_stopped_right_after_a_save_that_was_not_to_be_copied_it_is_copied_all_the_same(plan: Plan) -> None:
    copies = plan.folder / "copies"
    plan = replace(plan, steps=100, every=4, step_s=0.25, remote=copies.as_uri())
    with running(plan) as ranks:
        until(lambda: log(plan, "start"))
        copies.rename(plan.folder / "away")
        copies.write_text("not a folder")
        # Just before a save, while the copy of the one before is on its way, so that this one gets none. (On a busy
        # machine a save may take longer than the steps between: then it is a later one.)
        until(lambda: last_step(plan) % 4 == 3 and published_step(plan) == last_step(plan) - 3)
        stood = last_step(plan)
        os.kill(ranks.pids[0], signal.SIGTERM)
        assert codes_of(ranks) == [TOLD_TO_STOP, TOLD_TO_STOP]
    assert published_step(plan) == last_step(plan) == stood + 1
    copies.unlink()
    (plan.folder / "away").rename(copies)
    until(lambda: not persisters(plan))
    assert checkpoint.newest(copies / "fake", verify=True).step == stood + 1


@pytest.fixture
def mortal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with s3_server(tmp_path / "seaweed") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        server.make_bucket("copies")
        yield server


def newest_copy(plan: Plan) -> int:
    """Verified to the last byte, in a process of its own: what has asked a bucket cannot be forked any more."""

    def look(rank: int, world: int) -> int:
        found = checkpoint.newest(f"{plan.remote}/fake", verify=True)
        return -1 if found is None else found.step

    return int(run_ranks(look, 1)[0])


@pytest.mark.cluster
def test_an_s3_server_that_dies_and_returns_has_the_newest_again_and_training_never_stops(
    plan: Plan, mortal: S3Server
) -> None:
    plan = replace(plan, steps=1_000_000, remote="s3://copies/runs", patience_s=120.0)
    with running(plan, timeout_s=240) as ranks:
        until(lambda: log(plan, "uploaded"))
        mortal.kill()
        killed_at = last_step(plan)
        until(lambda: "is tried again" in warnings(plan), within_s=90)
        until(lambda: published_step(plan) > killed_at + 3 * plan.every)
        assert max(r["seconds"] for r in log(plan, "took")) < 2, "no step has waited for the server"
        mortal.start()
        returned_at = last_step(plan)
        until(lambda: log(plan, "uploaded")[-1]["step"] > returned_at, within_s=90)
        for pid in ranks.pids:
            os.kill(pid, signal.SIGTERM)
        assert codes_of(ranks) == [TOLD_TO_STOP, TOLD_TO_STOP]
    assert newest(plan).step == last_step(plan)
    until(lambda: not persisters(plan))
    assert newest_copy(plan) == last_step(plan)
    assert not log(plan, "checkpoint_failed")


@pytest.mark.cluster
def test_a_run_that_is_told_to_stop_while_s3_is_away_stops_in_time_and_is_copied_later(
    plan: Plan, mortal: S3Server
) -> None:
    plan = replace(plan, steps=20, remote="s3://copies/runs", patience_s=120.0)
    assert life(plan, timeout_s=120) == [DONE, DONE]
    assert newest_copy(plan) == 20
    mortal.kill()
    plan = replace(plan, steps=1_000_000)
    with running(plan, timeout_s=180) as ranks:  # it cannot ask for the copies, and goes on from what is here
        until(lambda: published_step(plan) > 25, within_s=90)
        watch = Stopwatch()
        for pid in ranks.pids:
            os.kill(pid, signal.SIGTERM)
        assert codes_of(ranks) == [TOLD_TO_STOP, TOLD_TO_STOP]
        assert watch.quiet_s() < plan.spec().guard.grace_s
    assert "going on from what is here" in warnings(plan)
    mortal.start()
    until(lambda: not persisters(plan), within_s=120)
    assert newest_copy(plan) == newest(plan).step == last_step(plan)


def restored(plan: Plan, before: Name | None = None) -> int:
    """The step of what one process can load, of which every bit is checked."""
    tensors = State(0, plan.world, plan.kib).tensors() | State(1, plan.world, plan.kib).tensors()
    found = checkpoint.newest(plan.root, before=before)
    assert found is not None
    checkpoint.load(found, tensors)
    for rank in range(plan.world):
        for name, tensor in State(rank, plan.world, plan.kib).after(found.step).items():
            assert (tensors[name] == tensor).all()
    return found.step
