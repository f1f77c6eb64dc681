"""What the supervisor does when workers die: real processes, real signals, fake training."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.guard.fake import KILL, FakeRun, alive, until
from tests.patience import Stopwatch, limit

from shoal.checkpoint.memory.ram import hold, memory_folder
from shoal.errors import UsageError
from shoal.guard import supervise as supervising
from shoal.guard.budget import Budget
from shoal.guard.workers import allocator_env
from shoal.journal import lock
from shoal.journal.index import blocks_of
from shoal.journal.journal import Journal, Record
from shoal.journal.keep import Keeper
from shoal.journal.reading import told
from shoal.observe.follow import Follower


def test_killed_worker_is_restarted_from_the_newest_checkpoint_and_the_run_finishes(fake: FakeRun) -> None:
    fake.plan({"attempt": 0, "rank": 1, "step": 12, "do": "signal", "signal": KILL})
    assert fake.supervise() == 0
    assert [a["attempt"] for a in fake.records("attempt")] == [0, 1]
    (failure,) = fake.records("failure")
    assert (failure["rank"], failure["cause"], failure["signal"], failure["exit_code"]) == (
        1,
        "killed",
        "SIGKILL",
        None,
    )
    assert fake.records("start")[1]["step"] == 10
    assert "restart 1 of 3 from step 10" in failure["action"]
    close = fake.records("close")[-1]
    assert (close["session"], close["status"], close["exit_code"]) == (0, "done", 0)
    assert close["reason"] == "all 20 steps are done"


def test_budget_spent_without_progress_gives_up_with_75_and_one_sentence(
    fake: FakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.plan({"rank": 0, "step": 1, "do": "signal", "signal": KILL}, guard={"restarts": 2})
    assert fake.supervise() == 75
    assert len(fake.records("attempt")) == 3
    close = fake.records("close")[-1]
    assert (close["status"], close["exit_code"]) == ("failed", 75)
    assert close["reason"].startswith("gave up after 2 restarts in a row without progress: rank 0 failed (killed)")
    assert "give up" in fake.records("failure")[-1]["action"]
    said = capsys.readouterr().err
    assert said.count("gave up after 2 restarts") == 1
    assert said.count("restart 1 of 2") == 1


def test_the_supervisor_keeps_the_index_of_its_journal(fake: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "Keeper", lambda path: Keeper(path, 500))
    fake.plan()
    assert fake.supervise() == 0
    journal = fake.run_dir.journal_file
    indexed = blocks_of(journal, 1 << 40)[:-1]  # the last one is what no index has yet
    assert indexed, "blocks were written while the run went on"
    assert told(journal).column("step").tolist() == [r["step"] for r in fake.records("step")]


def test_progress_refills_the_budget(fake: FakeRun) -> None:
    # Five deaths with a budget of one restart: each attempt gets further than the last, so each is the first in a row.
    fake.plan(
        *({"attempt": i, "rank": 0, "step": 5 * i + 7, "do": "signal", "signal": KILL} for i in range(5)),
        steps=35,
        world=1,
        guard={"restarts": 1},
    )
    assert fake.supervise() == 0
    assert len(fake.records("attempt")) == 6
    assert all("restart 1 of 1" in f["action"] for f in fake.records("failure"))


def test_going_over_old_steps_again_is_no_progress(fake: FakeRun) -> None:
    # It dies at step 9 every time, after some steps since the checkpoint; none of them is new after the first death.
    fake.plan({"rank": 0, "step": 9, "do": "signal", "signal": KILL}, world=1, guard={"restarts": 2})
    assert fake.supervise() == 75
    # The first death came after progress, so two restarts follow it.
    assert len(fake.records("attempt")) == 3


def test_a_scheduler_that_starts_the_job_again_does_not_refill_the_budget_but_a_person_does(fake: FakeRun) -> None:
    fake.plan({"rank": 0, "step": 1, "do": "exit", "code": 75}, world=1, guard={"restarts": 2})
    assert fake.supervise(job="123") == 75
    assert len(fake.records("attempt")) == 3
    assert fake.supervise(job="123") == 75
    assert len(fake.records("attempt")) == 4, "the second start had one attempt and no restarts"
    assert fake.supervise() == 75
    assert len(fake.records("attempt")) == 7


def test_backoff_doubles_in_a_row_and_starts_again_after_progress() -> None:
    budget = Budget(restarts=3, backoff_s=1.0)
    assert [budget.spend(progressed=False) for _ in range(4)] == [1.0, 2.0, 4.0, None]
    assert budget.spend(progressed=True) == 1.0
    assert Budget(restarts=20, backoff_s=1.0, used=19).spend(progressed=False) == 60.0
    assert Budget(restarts=0, backoff_s=1.0).spend(progressed=True) is None


def test_backoff_is_really_waited_for(fake: FakeRun) -> None:
    fake.plan({"rank": 0, "step": 1, "do": "exit", "code": 75}, world=1, guard={"restarts": 2, "backoff_s": 0.4})
    assert fake.supervise() == 75
    deaths = [f["t"] for f in fake.records("failure")]
    starts = [a["t"] for a in fake.records("attempt")]
    assert [f["action"].rpartition(" in ")[2] for f in fake.records("failure")[:2]] == ["0.4 s", "0.8 s"]
    assert 0.4 <= starts[1] - deaths[0] < 5
    assert 0.8 <= starts[2] - deaths[1] < 5


@pytest.mark.parametrize(("code", "cause"), [(2, "user-error"), (78, "data")])
def test_codes_that_a_retry_cannot_cure_are_passed_on_at_once(fake: FakeRun, code: int, cause: str) -> None:
    fake.plan(
        {
            "rank": 1,
            "step": 2,
            "do": "exit",
            "code": code,
            "say": "shoal: shard-00003 is damaged: prepare the data again.",
        }
    )
    assert fake.supervise() == code
    (failure,) = fake.records("failure")
    assert (failure["rank"], failure["cause"], failure["exit_code"]) == (1, cause, code)
    assert failure["evidence"] == "shard-00003 is damaged: prepare the data again."
    assert len(fake.records("attempt")) == 1


@pytest.mark.parametrize("code", [1, 75, 137])
def test_other_codes_are_retried(fake: FakeRun, code: int) -> None:
    fake.plan({"attempt": 0, "rank": 0, "step": 2, "do": "exit", "code": code}, world=1)
    assert fake.supervise() == 0
    assert [f["exit_code"] for f in fake.records("failure")] == [code]


def test_all_workers_leaving_with_143_is_a_stop_not_a_failure(fake: FakeRun) -> None:
    """A scheduler may signal every process of the job."""
    fake.plan(*({"rank": r, "step": 4, "do": "exit", "code": 143} for r in (0, 1)))
    assert fake.supervise() == 143
    assert fake.records("failure") == []
    assert fake.records("close")[-1]["status"] == "stopped"


def test_losing_a_peer_that_has_saved_and_left_is_part_of_the_stop(fake: FakeRun) -> None:
    lost = "RuntimeError: Connection reset by peer"
    fake.plan(
        {"rank": 0, "step": 4, "do": "exit", "code": 143},
        {"rank": 1, "step": 4, "do": "exit", "code": 75, "say": lost, "after_s": 0.2},
    )
    assert fake.supervise() == 143
    assert fake.records("failure") == []


def test_the_culprit_is_the_rank_that_failed_by_itself_even_if_it_is_seen_last(fake: FakeRun) -> None:
    lost = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242"
    fake.plan(
        {"attempt": 0, "rank": 0, "step": 3, "do": "exit", "code": 75, "say": lost},
        {"attempt": 0, "rank": 2, "step": 3, "do": "raise", "text": "an odd thing", "after_s": 0.7},
        world=3,
        step_s=0.02,
    )
    assert fake.supervise() == 0
    (failure,) = fake.records("failure")
    assert (failure["rank"], failure["cause"], failure["evidence"]) == (2, "exception", "ValueError: an odd thing")


def test_survivors_that_hear_nothing_are_killed_and_cost_half_a_second(fake: FakeRun) -> None:
    fake.plan(
        {"attempt": 0, "rank": 0, "step": 3, "do": "deaf"},
        {"attempt": 0, "rank": 1, "step": 3, "do": "signal", "signal": KILL, "after_s": 0.5},
        guard={"grace_s": 600},
    )
    assert fake.supervise() == 0
    death, again = fake.records("failure")[0]["at"], fake.records("attempt")[1]["t"]
    assert 0.5 <= again - death < 300  # and not the grace


def test_a_worker_that_stays_when_the_others_have_finished_is_named(fake: FakeRun) -> None:
    fake.plan({"attempt": 0, "rank": 1, "step": 21, "do": "deaf"}, guard={"grace_s": 0.5})
    assert fake.supervise() == 0
    failure = fake.records("failure")[0]  # on a busy machine an honest one may be late in the next attempt
    assert (failure["rank"], failure["cause"]) == (1, "hang")
    assert failure["evidence"] == "still running 0.5 s after rank 0 had finished"


def test_a_worker_that_computes_after_the_others_have_finished_may_end(fake: FakeRun) -> None:
    """Long after the grace: what it does is not known, but it does something."""
    fake.plan({"attempt": 0, "rank": 1, "step": 21, "do": "busy", "cpu_s": 1.2}, guard={"grace_s": 0.15})
    assert fake.supervise() == 0
    assert not fake.records("failure")


def test_children_that_a_dead_worker_leaves_behind_are_ended(fake: FakeRun) -> None:
    fake.plan({"rank": 0, "step": 2, "do": "child"}, {"rank": 0, "step": 3, "do": "exit", "code": 78}, world=1)
    assert fake.supervise() == 78
    child = int((fake.run_dir.path / "child-0").read_text())
    until(lambda: not alive(child))


def test_workers_get_their_place_in_the_environment(fake: FakeRun) -> None:
    fake.plan({"attempt": 0, "rank": 0, "step": 1, "do": "exit", "code": 75}, steps=2)
    assert fake.supervise() == 0
    env = json.loads((fake.run_dir.path / "env-1-1.json").read_text())
    expected = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "SHOAL_ATTEMPT": "1"}
    assert (expected | allocator_env(os.environ)).items() <= env.items()
    assert int(env["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)
    rank_0 = json.loads((fake.run_dir.path / "env-1-0.json").read_text())
    first = json.loads((fake.run_dir.path / "env-0-0.json").read_text())
    assert rank_0["SHOAL_RENDEZVOUS"] == env["SHOAL_RENDEZVOUS"] != first["SHOAL_RENDEZVOUS"]
    assert not os.path.exists(os.path.dirname(env["SHOAL_RENDEZVOUS"].removeprefix("file://")))


def test_blocks_of_gpu_memory_can_grow_unless_the_user_has_said_otherwise() -> None:
    assert allocator_env({}) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert allocator_env({name: "max_split_size_mb:512"}) == {}


def test_each_rank_of_each_attempt_has_its_log(fake: FakeRun) -> None:
    fake.plan({"attempt": 0, "rank": 1, "step": 3, "do": "raise", "text": "an odd thing"})
    assert fake.supervise() == 0
    logs = sorted(str(p.relative_to(fake.run_dir.logs)) for p in fake.run_dir.logs.rglob("*.log"))
    assert logs == [f"attempt-00{a}/rank-0000{r}.log" for a in (0, 1) for r in (0, 1)]
    assert "ValueError: an odd thing" in (fake.run_dir.logs / "attempt-000/rank-00001.log").read_text()


def test_attempts_and_sessions_count_over_the_life_of_the_run(fake: FakeRun) -> None:
    fake.plan({"attempt": 0, "rank": 0, "step": 3, "do": "exit", "code": 78}, world=1)
    assert fake.supervise() == 78
    assert fake.supervise() == 0
    assert [a["attempt"] for a in fake.records("attempt")] == [0, 1]
    assert [(o["session"], o["resumed"]) for o in fake.records("open")] == [(0, False), (1, True)]
    assert [c["session"] for c in fake.records("close")] == [0, 1]


def test_a_second_supervisor_of_the_same_run_is_refused_with_the_pid(fake: FakeRun) -> None:
    fake.plan(steps=10_000)
    first = fake.start()
    until(lambda: fake.records("step"))
    with pytest.raises(
        UsageError, match=rf"run 'demo' is already running as pid {first.pid}; `shoal logs -f demo .*` follows it"
    ):
        fake.supervise()
    holder = lock.holder(fake.run_dir)
    assert holder
    assert holder.pid == first.pid
    assert len(fake.records("open")) == 1
    first.send_signal(signal.SIGTERM)
    assert first.wait(limit(15)) == 143
    assert lock.holder(fake.run_dir) is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_told_to_stop_the_workers_save_and_the_exit_code_is_143(fake: FakeRun, number: int) -> None:
    fake.plan(steps=10_000, save_s=0.3)
    process = fake.start()
    until(lambda: fake.records("step"))
    pids = fake.pids()
    process.send_signal(number)
    assert process.wait(limit(15)) == 143
    assert not any(map(alive, pids))
    assert fake.records("stopping")[0]["signal"] == signal.Signals(number).name
    close, step = fake.records("close")[-1], fake.records("step")[-1]["step"]
    assert close["status"] == "stopped"
    assert (fake.run_dir.checkpoints / f"step-{step:08d}-term-0" / "manifest.json").exists()
    assert fake.records("failure") == []


def test_ctrl_c_in_a_terminal_reaches_the_supervisor_alone(fake: FakeRun) -> None:
    """A terminal signals the whole foreground group: workers must not be in it, or they would stop half-way."""
    fake.plan(steps=10_000)
    process = fake.start()
    until(lambda: fake.records("step"))
    assert all(os.getpgid(pid) == pid != os.getpgid(process.pid) for pid in fake.pids())
    process.send_signal(signal.SIGINT)
    assert process.wait(limit(15)) == 143


def test_workers_that_do_not_stop_are_killed_after_the_grace(fake: FakeRun) -> None:
    fake.plan({"rank": 0, "step": 2, "do": "deaf"}, {"rank": 1, "step": 2, "do": "deaf"}, guard={"grace_s": 1.0})
    process = fake.start()
    until(lambda: (fake.run_dir.path / "deaf-0").exists() and (fake.run_dir.path / "deaf-1").exists())
    pids, watch, began = fake.pids(), Stopwatch(), time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(limit(15)) == 143
    assert time.monotonic() - began > 0.9
    assert watch.quiet_s() < 8
    assert not any(map(alive, pids))
    assert "not every worker could save" in fake.records("close")[-1]["reason"]


def test_a_stop_before_the_first_step_does_not_speak_of_a_loss(fake: FakeRun) -> None:
    fake.plan({"rank": 0, "step": 1, "do": "deaf"}, world=1, guard={"grace_s": 0.5})
    process = fake.start()
    until(lambda: (fake.run_dir.path / "deaf-0").exists())
    process.send_signal(signal.SIGINT)
    assert process.wait(limit(15)) == 143
    assert fake.records("step") == []
    assert fake.records("close")[-1]["reason"] == "told to stop (SIGINT); nothing to save yet"


@pytest.mark.parametrize(("code", "mend"), [(78, True), (2, True), (75, False)])
def test_what_to_do_next_is_true_and_works_as_typed(
    fake: FakeRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, code: int, mend: bool
) -> None:
    fake.plan({"rank": 0, "step": 2, "do": "exit", "code": code}, world=1, guard={"restarts": 0})
    name, folder = fake.run_dir.name, fake.run_dir.workspace
    assert fake.supervise() == code
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  next")]
    resume = f"`shoal resume {name} --workspace {folder}`"
    assert (
        any(line.endswith(f"fix the cause above (docs/runbooks has what to do), then {resume}") for line in shown)
        is mend
    )
    assert any(line.endswith(f"{resume}: go on") for line in shown) is not mend
    monkeypatch.chdir(folder)
    assert fake.supervise() == code
    assert "--workspace" not in capsys.readouterr().out


def test_a_second_ctrl_c_ends_it_at_once(fake: FakeRun) -> None:
    fake.plan({"rank": 0, "step": 2, "do": "deaf"}, world=1, guard={"grace_s": 60.0})
    process = fake.start()
    until(lambda: (fake.run_dir.path / "deaf-0").exists())
    process.send_signal(signal.SIGINT)
    until(lambda: fake.records("stopping"))
    watch = Stopwatch()
    process.send_signal(signal.SIGINT)
    assert process.wait(limit(15)) == 143
    assert watch.quiet_s() < 10  # of 60


def test_told_to_stop_during_the_backoff_it_stops_at_once(fake: FakeRun) -> None:
    fake.plan({"rank": 0, "step": 2, "do": "exit", "code": 75}, world=1, guard={"backoff_s": 60.0})
    process = fake.start()
    until(lambda: fake.records("failure"))
    watch = Stopwatch()
    process.send_signal(signal.SIGTERM)
    assert process.wait(limit(15)) == 143
    assert watch.quiet_s() < 10  # of 60
    assert fake.records("close")[-1]["status"] == "stopped"


def test_a_worker_that_cannot_save_when_told_to_stop_says_why(fake: FakeRun) -> None:
    fake.plan(steps=10_000, world=1, unsaved="OSError: [Errno 28] No space left on device")
    process = fake.start()
    until(lambda: fake.records("step"))
    process.send_signal(signal.SIGTERM)
    assert process.wait(limit(15)) == 143
    (failure,) = fake.records("failure")
    assert (failure["cause"], failure["action"]) == ("disk-full", "stop")


def test_killing_the_supervisor_with_9_leaves_no_worker_and_the_next_start_says_so(fake: FakeRun) -> None:
    fake.plan(steps=400)
    process = fake.start()
    until(lambda: fake.records("step"))
    pids = fake.pids()
    process.kill()
    process.wait()
    until(lambda: not any(map(alive, pids)))
    fake.plan(steps=20)
    assert fake.supervise() == 0  # the kernel has freed the lock
    (failure,) = fake.records("failure")
    assert failure["cause"] == "supervisor-lost"
    assert f"pid {process.pid}" in failure["evidence"]


def test_a_journal_that_cannot_be_written_does_not_end_the_run(
    fake: FakeRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullAtTheWrongMoment(Journal):
        def append(self, kind: str, **fields: object) -> Record:
            if kind in ("failure", "attempt"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().append(kind, **fields)

    monkeypatch.setattr(supervising, "Journal", FullAtTheWrongMoment)
    fake.plan({"attempt": 0, "rank": 1, "step": 3, "do": "signal", "signal": KILL})
    assert fake.supervise() == 0
    assert "No space left on device" in capsys.readouterr().err
    assert [s["attempt"] for s in fake.records("start")] == [0, 1]  # its own count goes on


def test_a_defect_of_the_display_does_not_end_the_run(
    fake: FakeRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Follower) -> bool:
        raise KeyError("tokens")

    monkeypatch.setattr(Follower, "poll", broken)
    fake.plan()
    assert fake.supervise() == 0
    assert capsys.readouterr().err.count("nothing more is shown (KeyError: 'tokens' in broken)") == 1


def test_a_terminal_that_goes_away_does_not_end_the_run(fake: FakeRun) -> None:
    fake.plan({"attempt": 0, "rank": 1, "step": 3, "do": "signal", "signal": KILL}, steps=60)
    process = fake.start()
    assert process.stdout
    assert process.stderr
    process.stdout.close()
    process.stderr.close()
    assert process.wait(limit(20)) == 0
    assert fake.records("close")[-1]["status"] == "done"


def test_the_supervisor_never_imports_torch() -> None:
    modules = "shoal.guard.supervise, shoal.cli.train, shoal.cli.resume, shoal.cli.stop"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=limit(60)).returncode == 0


def test_a_supervisor_that_gives_up_gives_back_the_memory_of_its_killed_workers(
    fake: FakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SHOAL_MEMORY", str(tmp_path / "ram"))
    left = hold(memory_folder(fake.run_dir.path, 0))
    (left.folder / "step-00000001-term-1").mkdir()
    (left.folder / "step-00000001-term-1" / "rank-00000.safetensors").write_bytes(b"gigabytes")
    left.close()
    fake.plan({"rank": 0, "step": 1, "do": "signal", "signal": KILL}, world=1, guard={"restarts": 0})
    assert fake.supervise() == 75
    assert not left.folder.exists()
