"""What a death is called: a table of ends as they really look, and the rules that pick the line and the culprit."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.guard.classify import Failure, classify, culprit
from shoal.guard.surroundings import Change, Surroundings, oom_counts
from shoal.guard.workers import Death
from shoal.observe.causes import CAUSES


def death(log: Path, code: int | None = None, number: int | None = None) -> Death:
    return Death(rank=3, pid=1, exit_code=code, signal=number, told=False, t=time.time(), log=log)


def traceback(*exceptions: str) -> str:
    one = 'Traceback (most recent call last):\n  File "loop.py", line 1, in train\n    work()\n'
    return "\n\nDuring handling of the above exception, another exception occurred:\n\n".join(
        one + e for e in exceptions
    )


TABLE = [
    # exit code, signal, end of the log, cause, a part of the evidence
    (2, None, "shoal: train.steps must be at least 1 (run.yaml:4).", "user-error", "train.steps must be"),
    (78, None, "shoal: shard-00001.tokens is damaged: prepare it again.", "data", "is damaged"),
    (78, None, "shoal: step 7 has loss nan and gradient norm nan: no update was made.", "numerics", "loss nan"),
    (78, None, "shoal: no good checkpoint is left in runs/demo.", "checkpoint", "no good checkpoint"),
    (78, None, "shoal: resources.device is cuda but no GPU is visible here.", "environment", "no GPU"),
    (None, signal.SIGKILL, "step 7", "killed", "ended by SIGKILL"),
    (None, signal.SIGTERM, "", "killed", "ended by SIGTERM"),
    (None, signal.SIGSEGV, "Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n  x",
     "crash", "SIGSEGV: Fatal Python error: Segmentation fault"),
    (None, signal.SIGABRT, "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc",
     "host-memory", "bad_alloc"),
    (None, signal.SIGABRT,
     "[rank3]:[E ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)",
     "hang", "Watchdog caught"),
    (None, signal.SIGRTMIN + 3, "", "crash", "signal 37"),
    (75, None, traceback("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
     "device-memory", "2.00 GiB"),
    (1, None, traceback("MemoryError"), "host-memory", "MemoryError"),
    (1, None, traceback("RuntimeError: [enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: can't allocate memory"),
     "host-memory", "DefaultCPUAllocator"),
    (75, None, traceback("OSError: [Errno 28] No space left on device: 'checkpoints/step-1'"), "disk-full", "Errno 28"),
    (75, None, traceback("RuntimeError: [../gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:9"),
     "network", "Connection closed by peer"),
    (75, None, traceback("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:9, unhandled error"),
     "network", "NCCL error"),
    (75, None, traceback("RuntimeError: Timed out waiting 1800000ms for recv operation to complete"),
     "hang", "1800000ms"),
    (1, None, traceback("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"), "hardware", "ECC"),
    (1, None, traceback("KeyError: 'labels'"), "exception", "KeyError: 'labels'"),
    (75, None, traceback("my.module.OddError: who knows"), "exception", "OddError: who knows"),
    (75, None, "shoal: the server is away: try again later.", "exception", "the server is away"),
    (9, None, "", "unknown", "exit code 9, and the log ends with: starting"),
    (1, None, "something odd", "unknown", "ends with: something odd"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "number", "text", "cause", "evidence"), TABLE, ids=[f"{r[3]}-{i}" for i, r in enumerate(TABLE)]
)
def test_each_end_gets_its_class_and_the_line_that_shows_it(
    tmp_path: Path, code: int | None, number: int | None, text: str, cause: str, evidence: str
) -> None:
    log = tmp_path / "rank.log"
    log.write_text("starting\n" + text + "\n")
    failure = classify(death(log, code, number))
    assert failure.cause == cause
    assert evidence in failure.evidence
    assert "\n" not in failure.evidence
    assert failure.retry == (code not in (2, 78))
    assert failure.advice


def test_the_cause_of_a_chain_of_exceptions_beats_what_it_led_to(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    log.write_text(traceback("torch.OutOfMemoryError: CUDA out of memory.", "RuntimeError: Connection closed by peer"))
    assert classify(death(log, 75)).cause == "device-memory"


def test_an_error_that_was_survived_long_ago_explains_nothing(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    log.write_text(
        "warning: OSError: No space left on device\n" + traceback("OSError: No space left on device")
        + "\n" + "step\n" * 50 + traceback("KeyError: 'labels'") + "\n"
    )  # fmt: skip
    assert classify(death(log, 1)).evidence == "KeyError: 'labels'"
    log.write_text(traceback("OSError: No space left on device") + "\n" + "step\n" * 50)
    assert classify(death(log, 1)).cause == "unknown"


def test_a_long_log_is_read_from_its_end_and_a_missing_one_is_no_error(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    log.write_bytes(b"\xff\xfe step\n" * 200_000 + traceback("KeyError: 'x'").encode())
    begin = time.process_time()
    assert classify(death(log, 1)).cause == "exception"
    assert time.process_time() - begin < 0.5
    assert classify(death(tmp_path / "none", 1)).cause == "unknown"


def test_evidence_is_bounded_and_holds_no_password(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    log.write_text(traceback("ValueError: cannot reach https://user:hunter2@host/x " + "y" * 5000))
    evidence = classify(death(log, 1)).evidence
    assert "hunter2" not in evidence
    assert len(evidence) <= 400


def test_a_real_traceback_of_a_real_process_is_understood(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    with open(log, "wb") as out:
        code = "x = bytearray(1 << 62)"
        process = subprocess.run([sys.executable, "-c", code], stdout=out, stderr=out)
    failure = classify(death(log, process.returncode))
    assert (failure.cause, failure.evidence, failure.exit_code) == ("host-memory", "MemoryError", 1)


def test_sigkill_with_the_kernels_memory_counter_raised_is_out_of_memory(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job.slice\n")
    group = tmp_path / "sys/fs/cgroup/job.slice"
    group.mkdir(parents=True)
    (group / "memory.events").write_text("low 0\nhigh 0\nmax 4\noom 0\noom_kill 2\noom_group_kill 0\n")
    before = Surroundings.now(tmp_path, root=tmp_path)
    assert before.change().oom_kills == 0
    (group / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 1\noom_kill 3\noom_group_kill 0\n")
    failure = classify(death(tmp_path / "none", None, signal.SIGKILL), before.change())
    assert failure.cause == "host-memory"
    assert (
        failure.evidence == "SIGKILL, and the kernel ran out of memory and killed 1 process(es) in this control group"
    )


def test_the_first_version_of_control_groups_and_the_machines_counter_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/a/b\n1:cpu:/\n")
    (tmp_path / "proc/vmstat").write_text("pgfault 1\noom_kill 7\n")
    group = tmp_path / "sys/fs/cgroup/memory/a/b"
    group.mkdir(parents=True)
    (group / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    assert oom_counts(tmp_path) == {"this control group": 5, "this machine": 7}
    assert "this machine" in oom_counts()  # the kernel that runs this test has the counter


def test_a_full_disk_is_suspected_when_the_log_had_no_room_for_the_reason(tmp_path: Path) -> None:
    assert classify(death(tmp_path / "none", 1), Change(free_bytes=0)).cause == "disk-full"
    assert classify(death(tmp_path / "none", 1), Change(free_bytes=1 << 40)).cause == "unknown"


def test_the_culprit_is_the_first_that_is_no_consequence() -> None:
    lost, killed, raised = Failure(0, "network", ""), Failure(2, "killed", ""), Failure(1, "exception", "")
    assert culprit([lost, killed, raised]) is killed
    assert culprit([lost, Failure(1, "network", "")]) is lost
    assert culprit([]) is None


def test_every_class_has_its_runbook() -> None:
    runbooks = Path(__file__).parents[2] / "docs" / "runbooks"
    assert {p.stem for p in runbooks.glob("*.md")} - {"README"} >= set(CAUSES)
