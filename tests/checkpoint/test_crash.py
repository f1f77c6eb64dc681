"""A save that is killed, or that a full disk stops, leaves the checkpoint before it as the newest."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.patience import Stopwatch
from tests.ranks import rank_outcomes, run_ranks

from shoal import checkpoint
from shoal.checkpoint import Name, fault_points, ledger, saving
from shoal.checkpoint import store as stores
from shoal.errors import WRONG_ENVIRONMENT
from shoal.parallel import agree

MIB = 1 << 20


def state(value: float, mib: int = 0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((64, 64), value), "v": torch.full((max(mib, 1) * MIB // 4,), value)}


def restored_step(root: Path) -> int:
    tensors = state(0)
    found = checkpoint.restore(root, tensors)
    assert found is not None
    assert all((t == found.step).all() for t in tensors.values())
    return found.step


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if p.name != ledger.LEDGER)


def arm(fault: str) -> None:
    """As SHOAL_FAULT would, which is read when a process starts."""
    fault_points.fault = fault_points.parse(fault)
    assert fault_points.fault is not None


def die_in_the_middle_of_the_tensors() -> None:
    real, slices = saving.bytes_of, []

    def bytes_of(tensor: torch.Tensor) -> memoryview:
        slices.append(tensor)
        if len(slices) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(tensor)

    saving.bytes_of = bytes_of


# Where it is tried: which rank dies, and how it is made to die there.
POINTS: dict[str, tuple[int, Callable[[], None]]] = {
    **{point: (int(point[-1]), partial(arm, point)) for point in ("write@1", "written@1", "part@1", "written@0")},
    **{f"{point}@0": (0, partial(arm, point)) for point in ("read-back", "before-manifest", "before-publish")},
    "rank 1 in the middle of its tensors": (1, die_in_the_middle_of_the_tensors),
}


@pytest.mark.parametrize("point", POINTS)
def test_killed_in_the_middle_of_a_save_the_previous_one_is_the_newest(point: str, tmp_path: Path) -> None:
    victim, make_it_die = POINTS[point]

    def work(rank: int, world: int) -> None:
        checkpoint.save(tmp_path, 1, state(1), {}, piece_bytes=4096)
        if rank == victim:
            make_it_die()
        checkpoint.save(tmp_path, 2, state(2), {}, piece_bytes=4096)

    outcomes = rank_outcomes(work, 2, timeout_s=60)
    assert outcomes[victim].status == -signal.SIGKILL
    assert outcomes[1 - victim].status != 0, "the other rank lost its peer and must not believe that it saved"
    assert restored_step(tmp_path) == 1

    # The next term saves the same step, and sweeps up what the dead one left.
    def again(rank: int, world: int) -> None:
        checkpoint.save(tmp_path, 2, state(2), {}, term=1)
        if rank == 0:
            checkpoint.prune(tmp_path, keep=2, term=1)

    run_ranks(again, 2)
    assert restored_step(tmp_path) == 2
    assert names(tmp_path) == ["step-00000001-term-0", "step-00000002-term-1"]


def test_killed_right_after_the_publish_the_new_one_is_the_newest(tmp_path: Path) -> None:
    def work(rank: int, world: int) -> None:
        checkpoint.save(tmp_path, 1, state(1), {})
        arm("published")
        checkpoint.save(tmp_path, 2, state(2), {})

    assert rank_outcomes(work, 1)[0].status == -signal.SIGKILL
    assert restored_step(tmp_path) == 2
    assert Name(2, 0) not in ledger.read(stores.Folder(tmp_path)).published, "killed before the ledger knew"
    checkpoint.prune(tmp_path, keep=2)
    assert Name(2, 0) in ledger.read(stores.Folder(tmp_path)).published


def test_killed_while_an_old_one_is_deleted_nothing_half_deleted_is_seen(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, step, state(step), {})

    def work(rank: int, world: int) -> None:
        real_rmtree = stores.shutil.rmtree

        def half(path: Path, **kwargs: Any) -> None:
            if path.exists():
                next(path.glob("*.safetensors")).unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            real_rmtree(path, **kwargs)

        stores.shutil.rmtree = half
        checkpoint.prune(tmp_path, keep=1)

    assert rank_outcomes(work, 1)[0].status == -signal.SIGKILL
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert (found.step, found.skipped) == (2, ())
    checkpoint.prune(tmp_path, keep=1)
    assert names(tmp_path) == ["step-00000002-term-0"]


def test_killed_between_two_deletions_the_newest_is_there(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, state(step), {})

    def work(rank: int, world: int) -> None:
        real, seen = fault_points.reach, []

        def reach(point: str) -> None:
            seen.append(point)
            if len(seen) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            real(point)

        fault_points.reach = reach
        checkpoint.prune(tmp_path, keep=1)

    assert rank_outcomes(work, 1)[0].status == -signal.SIGKILL
    assert names(tmp_path) == ["step-00000002-term-0", "step-00000003-term-0"]
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert (found.step, found.skipped) == (3, ())


def test_a_full_disk_fails_the_save_on_all_ranks_and_training_goes_on(tiny_disk: Path) -> None:
    def work(rank: int, world: int) -> list[str]:
        said = []
        checkpoint.save(tiny_disk, 1, state(1, mib=1), {})
        for _ in range(2):  # the second try finds the space that the first one gave back
            with pytest.raises(checkpoint.SaveError) as e:
                checkpoint.save(tiny_disk, 2, state(2, mib=9), {})
            said.append(str(e.value))
        checkpoint.save(tiny_disk, 3, state(3, mib=1), {})
        return said

    first, second = run_ranks(work, 2)
    assert first == second
    assert all(os.strerror(errno.ENOSPC) in words and "rank " in words for words in first)
    assert names(tiny_disk) == ["step-00000001-term-0", "step-00000003-term-0"]
    assert restored_step(tiny_disk) == 3


def test_a_disk_that_turns_read_only_stops_saving_and_nothing_else(tiny_disk: Path) -> None:
    for step in (1, 2):
        checkpoint.save(tiny_disk, step, state(step), {})
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    with pytest.raises(checkpoint.SaveError, match=re.escape(os.strerror(errno.EROFS))):
        checkpoint.save(tiny_disk, 3, state(3), {})
    assert checkpoint.prune(tiny_disk, keep=1) == []
    assert restored_step(tiny_disk) == 2


def test_a_file_size_limit_on_one_rank_fails_all_of_them_alike(tmp_path: Path) -> None:
    """Needs no privileges: the system refuses rank 1's write half-way, as a quota does."""

    def work(rank: int, world: int) -> tuple[str, float]:
        checkpoint.save(tmp_path, 1, state(1), {})
        if rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        watch = Stopwatch()
        with pytest.raises(checkpoint.SaveError) as e:
            checkpoint.save(tmp_path, 2, state(2), {})
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return str(e.value), watch.quiet_s()

    (first, _), (second, seconds) = run_ranks(work, 2)
    assert first == second
    assert "rank 1" in first
    assert os.strerror(errno.EFBIG) in first
    assert seconds < 20
    assert names(tmp_path) == ["step-00000001-term-0"]
    assert restored_step(tmp_path) == 1


def test_what_cannot_be_written_is_refused_before_anything_is_published(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, torch.Tensor], dict[str, Any], str]] = [
        ({"w": torch.zeros(2, dtype=torch.complex64)}, {}, "'w' has dtype torch.complex64"),
        (state(1), {"loss": float("nan")}, "JSON compliant"),
        (state(1), {"rng": object()}, "JSON serializable"),
    ]
    for tensors, extra, words in wrong:
        with pytest.raises(checkpoint.SaveError, match=words):
            checkpoint.save(tmp_path, 1, tensors, extra)
        assert list(tmp_path.iterdir()) == []


def test_a_state_that_the_ranks_see_differently_is_not_published(tmp_path: Path) -> None:
    """A tensor that only one rank has would be a hole: found when saving, not on the day of the resume."""

    def work(rank: int, world: int) -> str:
        tensors = {"w": torch.ones(4), **({"only here": torch.ones(8)} if rank == 0 else {})}
        with pytest.raises(checkpoint.SaveError) as e:
            checkpoint.save(tmp_path, 1, tensors, {})
        return str(e.value)

    said = run_ranks(work, 2)
    assert said[0] == said[1]
    assert "the ranks do not agree on who writes tensor 'w'" in said[0]
    assert list(tmp_path.iterdir()) == []


def test_a_name_is_written_once(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, state(1), {}, term=1)
    with pytest.raises(checkpoint.SaveError, match="step-00000001-term-1 is there already"):
        checkpoint.save(tmp_path, 1, state(9), {}, term=1)
    assert restored_step(tmp_path) == 1
    checkpoint.save(tmp_path, 1, state(1), {}, term=2)
    assert names(tmp_path) == ["step-00000001-term-1", "step-00000001-term-2"]


def test_a_writer_that_was_replaced_publishes_nothing_and_all_its_ranks_end(tmp_path: Path) -> None:
    def work(rank: int, world: int) -> tuple[int, str]:
        term = ledger.claim([stores.Folder(tmp_path)], -1) if rank == 0 else 0
        term = agree.from_rank_0(term)
        checkpoint.save(tmp_path, 1, state(1), {}, term)
        if rank == 0:
            assert ledger.claim([stores.Folder(tmp_path)], 1) == term + 1
        with pytest.raises(ledger.Fenced) as e:
            checkpoint.save(tmp_path, 2, state(2), {}, term)
        return e.value.exit_code, str(e.value)

    first, second = run_ranks(work, 2)
    assert first == second
    assert first[0] == WRONG_ENVIRONMENT
    assert "term 2 has taken over" in first[1]
    assert names(tmp_path) == ["step-00000001-term-1"]


def test_a_ledger_that_was_deleted_gives_no_term_twice_and_no_old_branch_back(tmp_path: Path) -> None:
    folder = [stores.Folder(tmp_path)]
    assert ledger.claim(folder, -1) == 1
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, state(step), {}, term=1)
    assert ledger.claim(folder, 1) == 2  # somebody went back to step 1, on purpose or because 2 and 3 were bad
    checkpoint.save(tmp_path, 2, state(2), {}, term=2)
    assert restored_step(tmp_path) == 2
    shutil.rmtree(tmp_path / ledger.LEDGER)
    assert restored_step(tmp_path) == 2, "and not 3, which is of the branch that was left"
    assert ledger.claim(folder, 2) == 3
    checkpoint.save(tmp_path, 3, state(3), {}, term=3)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.name == Name(3, 3)


def test_a_stray_folder_with_a_later_term_in_its_name_hides_nothing(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 5, state(5), {}, term=1)
    shutil.copytree(tmp_path / "step-00000005-term-1", tmp_path / "step-00000001-term-7")
    assert restored_step(tmp_path) == 5
    assert ledger.claim([stores.Folder(tmp_path)], 5) == 8


def test_what_a_rank_said_of_its_file_is_sealed_until_the_manifest_is_written(tmp_path: Path) -> None:
    def work(rank: int, world: int) -> str:
        real = fault_points.reach

        def reach(point: str) -> None:
            if point == "part" and rank == 1:
                path = next(tmp_path.glob(".tmp-*/rank-00001.json"))
                path.write_text(path.read_text().replace('"world":2', '"world":3'))
            real(point)

        fault_points.reach = reach
        with pytest.raises(checkpoint.SaveError) as e:
            checkpoint.save(tmp_path, 1, state(1), {})
        return str(e.value)

    said = run_ranks(work, 2)
    assert said[0] == said[1]
    assert "what a rank said of its file is damaged" in said[0]
    assert names(tmp_path) == []
