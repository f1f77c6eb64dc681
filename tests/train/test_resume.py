"""Killed at any step and resumed, a run ends with the very bits of a run that nobody disturbed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from shoal.checkpoint import newest
from shoal.decide.auto import decide
from shoal.errors import WRONG_ENVIRONMENT, DataError
from shoal.journal.journal import records
from shoal.journal.rundir import RunDir
from shoal.parallel.place import join
from shoal.spec import dump, load
from shoal.spec.run import Run
from shoal.train.worker import StopFlag, outcome, work
from tests.patience import until
from tests.ranks import rank_outcomes, run_ranks
from tests.train.tiny import digest_of, losses_of, make_data, make_run, steps_of, train_on

pytestmark = pytest.mark.usefixtures("warm_starts", "kept_ranks")

STEPS = 8
LAYOUTS = {"one process": (1, 1, 1), "DDP 2": (2, 2, 1), "FSDP2 2": (2, 1, 2)}


def train_and_die(run: Run, workspace: Path, world: int, step: int, victim: int, saved: bool = False) -> RunDir:
    """Trains from where it was; before that step the victim dies, as if by the kernel, once those before are told;
    `saved`: and once a checkpoint is there, which is written meanwhile."""
    decided = decide(run, workspace, world).run
    run_dir = RunDir.of(run.name, workspace)
    run_dir.path.mkdir(parents=True, exist_ok=True)
    run_dir.spec_file.write_text(dump(decided))
    attempt, asked = len(told(run_dir, "start")), -1

    def ask() -> bool:
        """Before each step: whether to stop."""
        nonlocal asked
        asked += 1
        if int(os.environ["RANK"]) == victim:
            until(lambda: len(told(run_dir, "start")) > attempt, within_s=60)
            begin = told(run_dir, "start")[attempt]["step"]
            if begin + asked == step:
                until(lambda: step == begin or [r["step"] for r in steps_of(run_dir)][-1:] == [step], within_s=60)
                until(lambda: not saved or newest(run_dir.checkpoints) is not None, within_s=60)
                os.kill(os.getpid(), signal.SIGKILL)
        return False

    def rank(rank: int, world: int) -> None:
        os.environ["SHOAL_ATTEMPT"] = str(attempt)
        work(run_dir, decided, join(decided), ask)

    # The others have nothing more to do: they wait for the dead one.
    outcomes = rank_outcomes(rank, world, grace_s=0.2)
    assert -signal.SIGKILL in {o.status for o in outcomes}, outcomes[0].error
    return run_dir


class Fell(Exception):
    pass


def train_and_fall(run: Run, workspace: Path, world: int, step: int) -> RunDir:
    """Trains from the start; before that step all fall over an error, with nothing saved for it. Ranks may be kept:
    for tests in which it does not matter how a run was ended."""
    decided = decide(run, workspace, world).run
    run_dir = RunDir.of(run.name, workspace)
    run_dir.path.mkdir(parents=True, exist_ok=True)
    run_dir.spec_file.write_text(dump(decided))
    asked = -1

    def ask() -> bool:
        nonlocal asked
        asked += 1
        if asked == step:
            raise Fell
        return False

    def rank(rank: int, world: int) -> None:
        with pytest.raises(Fell):
            work(run_dir, decided, join(decided), ask)

    run_ranks(rank, world)
    return run_dir


def told(run_dir: RunDir, kind: str) -> list[dict[str, Any]]:
    return [r for r in records(run_dir.journal_file) if r["kind"] == kind] if run_dir.journal_file.exists() else []


def run_of(data: Path, layout: str, name: str, **changes: object) -> tuple[Run, int]:
    world, replicate, shard = LAYOUTS[layout]
    mesh = {"mesh.dp_replicate": replicate, "mesh.dp_shard": shard, "mesh.micro_batch": 4}
    fixed = {
        "name": name,
        "train.steps": STEPS,
        "checkpoint.every": 3,
        "checkpoint.keep": 2,
        "checkpoint.background": True,
    }
    return make_run(data, **{**fixed, **mesh, **changes}), world


@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_at_any_step_and_resumed_the_parameters_are_bitwise_the_same(layout: str, tmp_path: Path) -> None:
    data = make_data(tmp_path / "data", masked=True)
    run, world = run_of(data, layout, "whole")
    whole = train_on(run, tmp_path, world)
    # On one process before every step; with shards before, at and after a checkpoint, and at the end; of copies, which
    # save as one process does, after one. Each start goes on from where the one before had come to: a bit that is lost
    # in any of them is lost in the end.
    run, world = run_of(data, layout, "killed")
    for step in {"one process": range(STEPS), "FSDP2 2": (1, 3, 4, STEPS - 1), "DDP 2": (4,)}[layout]:
        killed = train_and_die(run, tmp_path, world, step, victim=world - 1)
        assert [r["step"] for r in steps_of(killed)][-1:] == ([step] if step else [])
    resumed = train_on(run, tmp_path, world)
    assert digest_of(resumed) == digest_of(whole)
    losses = [{r["loss"] for r in steps_of(resumed) if r["step"] == step} for step in range(1, STEPS + 1)]
    assert losses == [{loss} for loss in losses_of(whole)]  # a step that was redone is the same step


def test_a_run_told_to_stop_saves_and_goes_on_bitwise(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    run, _ = run_of(data, "one process", "whole")
    whole = train_on(run, tmp_path, 1)
    run, _ = run_of(data, "one process", "stopped", **{"checkpoint.every": 0})
    decided = decide(run, tmp_path, 1).run
    run_dir = RunDir.of(run.name, tmp_path)
    run_dir.path.mkdir(parents=True)
    calls = iter([False] * 5 + [True])
    outcomes = rank_outcomes(lambda r, w: work(run_dir, decided, join(decided), lambda: next(calls)), 1)
    assert "Stopped: stopped after step 5 of 8" in outcomes[0].error
    assert len(steps_of(train_on(run, tmp_path, 1))) == STEPS  # none was taken twice
    assert digest_of(run_dir) == digest_of(whole)


def test_a_run_goes_on_with_another_number_of_processes_on_the_same_samples(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    whole = train_on(run_of(data, "one process", "whole")[0], tmp_path, 1)
    run, world = run_of(data, "FSDP2 2", "moved")
    train_and_die(run, tmp_path, world, 4, victim=0)
    moved = train_on(run_of(data, "one process", "moved")[0], tmp_path, 1)
    last = {r["step"]: r for r in steps_of(moved)}
    assert [r["position"] for r in last.values()] == [16 * i for i in range(STEPS)]
    losses = np.array([r["loss"] for r in last.values()])
    assert np.max(np.abs(losses / losses_of(whole) - 1)) < 1e-5


def test_resuming_on_changed_data_is_refused(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    run, _ = run_of(data, "one process", "moved")
    train_and_die(run, tmp_path, 1, 5, victim=0, saved=True)
    make_data(tmp_path / "data", seed=1)
    with pytest.raises(AssertionError, match=f"{DataError.__name__}: the training data is not what run 'moved'"):
        train_on(run, tmp_path, 1)


def test_resuming_on_bytes_that_were_changed_in_place_ends_before_a_step_is_made_of_them(tmp_path: Path) -> None:
    """Size, time and index stay as they were; and what passes for them with checksums of its own is refused too."""
    data = make_data(tmp_path / "data")
    run, _ = run_of(data, "one process", "flipped")
    killed = train_and_die(run, tmp_path, 1, 5, victim=0, saved=True)
    tokens = data / "shard-00000.tokens"
    changed = tokens.read_bytes().translate(bytes([*range(90), 91, 90, *range(92, 256)]))  # two ids change places
    tokens.write_bytes(changed)
    where = re.escape(f"{tokens} is corrupt: bytes 0 to {len(changed):,} ")
    with pytest.raises(AssertionError, match=f"{DataError.__name__}: {where}"):
        train_on(run, tmp_path, 1)
    assert len(steps_of(killed)) == 5
    index = json.loads((data / "index.json").read_text())
    sums = xxhash.xxh3_64_intdigest(changed).to_bytes(8, "little")
    (data / "shard-00000.sums").write_bytes(sums)
    index["shards"][0]["sums_xxh3"] = xxhash.xxh3_128_hexdigest(sums)
    (data / "index.json").write_text(json.dumps(index))
    with pytest.raises(AssertionError, match=r"not what run 'flipped'.*checksums of its pieces changed"):
        train_on(run, tmp_path, 1)


@pytest.mark.parametrize(
    ("precision", "layout"),
    [
        ("fp32", "one process"),
        ("bf16", "FSDP2 2"),
        pytest.param("fp32", "FSDP2 2", marks=pytest.mark.slow),
        pytest.param("bf16", "DDP 2", marks=pytest.mark.slow),
        pytest.param("fp32", "DDP 2", marks=pytest.mark.slow),
        pytest.param("bf16", "one process", marks=pytest.mark.slow),
    ],
)
def test_evaluation_between_steps_changes_no_bit_and_spoils_no_checkpoint(
    precision: str, layout: str, tmp_path: Path
) -> None:
    """FSDP2 leaves parameters gathered after a forward without backward; what is saved next must be the shards."""
    data, held_out = make_data(tmp_path / "data"), make_data(tmp_path / "held-out", documents=40, seed=5)
    run, world = run_of(data, layout, "without", **{"train.precision": precision, "checkpoint.every": 0})
    without = train_on(run, tmp_path, world)
    changes = {"data.eval": str(held_out), "eval.every": 2, "checkpoint.every": 2, "checkpoint.background": False}
    run, world = run_of(data, layout, "with", **{"train.precision": precision, **changes})
    fallen = train_and_fall(run, tmp_path, world, 5)
    assert [r["step"] for r in steps_of(fallen)][-1:] == [5]
    resumed = train_on(run, tmp_path, world)  # from a checkpoint that was saved right after an evaluation
    assert digest_of(resumed) == digest_of(without)
    saved = newest(resumed.checkpoints)
    assert saved is not None
    assert {entry.dtype for entry in saved.manifest.tensors.values()} == {"F32"}


def test_a_run_whose_checkpoints_are_gone_does_not_quietly_begin_again(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    # In the foreground: else it may be killed before it could write down that it had saved.
    run, _ = run_of(data, "one process", "lost", **{"checkpoint.background": False})
    killed = train_and_die(run, tmp_path, 1, 5, victim=0)
    shutil.rmtree(killed.checkpoints)
    with pytest.raises(AssertionError, match="CheckpointError: run 'lost' had a checkpoint of step 3"):
        train_on(run, tmp_path, 1)


def test_a_run_whose_checkpoints_are_all_bad_ends_with_78_and_one_sentence(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    run, _ = run_of(data, "one process", "bad", **{"checkpoint.background": False})
    killed = train_and_die(run, tmp_path, 1, 7, victim=0)
    names = sorted(p.name for p in killed.checkpoints.glob("step-*"))
    assert names == ["step-00000003-term-1", "step-00000006-term-1"]
    for name in names:
        file = killed.checkpoints / name / "rank-00000.safetensors"
        file.write_bytes(file.read_bytes()[:-1])

    def again(rank: int, world: int) -> tuple[int, str]:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            code = outcome(lambda: load(killed.spec_file).run, killed, StopFlag())
        return code, said.getvalue()

    for _ in range(2):  # the second start is told the same: what may be the last hope is not marked
        [(code, said)] = run_ranks(again, 1)
        assert code == WRONG_ENVIRONMENT
        assert said.startswith("shoal: no checkpoint in ")
        assert said.count("\n") == 1
        assert all(f"{name}: rank-00000.safetensors has " in said for name in names)
