"""What counts as standing still and what does not: real processes that write a pulse, without a model in them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.guard.fake import FakeRun, alive, until
from tests.guard.pretended import COMPUTES_S, ENDLESS, SLEEPS, WAITS, Group

from shoal.guard.hang import Limits
from shoal.guard.progress import Progress
from shoal.guard.signs import signs_of
from shoal.guard.stacks import frames
from shoal.journal.pulse_file import read_beat, read_sample
from shoal.journal.pulses import make_folder
from shoal.spec.run import Guard


def test_the_rank_that_has_not_reached_where_the_others_wait_is_named(group: Group) -> None:
    watch = group.start(WAITS, "def read(): ready(); time.sleep(600)\nread()", WAITS)
    hang = group.named(watch, within_s=10)
    assert (hang.rank, hang.phase, hang.step, hang.stopped) == (1, "data", 11, False)
    assert hang.stack[0].endswith("read")
    assert [(o.rank, o.phase) for o in hang.others] == [(0, "exchange"), (2, "exchange")]


def test_a_stopped_rank_is_named_also_where_it_may_take_long(group: Group) -> None:
    watch = group.start('pulse.mark("save"); pulse.mark("data", 11); ' + WAITS, f'pulse.mark("save"); {SLEEPS}')
    group.never(watch, 300)  # a save may take half an hour
    os.kill(group.pids[1], signal.SIGSTOP)
    until(lambda: signs_of(group.pids[1]).stopped)
    hang = group.named(watch, within_s=10)
    assert (hang.rank, hang.phase, hang.stopped) == (1, "save", True)
    assert "state T" in hang.evidence


def test_a_short_stop_is_no_hang(group: Group) -> None:
    watch = group.start(*["ready()\nwhile True: pulse.mark('forward'); time.sleep(0.05)"] * 2, sampled=False)
    for _ in range(2):
        os.kill(group.pids[0], signal.SIGSTOP)
        until(lambda: signs_of(group.pids[0]).stopped)
        group.never(watch, 6)
        os.kill(group.pids[0], signal.SIGCONT)
        until(lambda: not signs_of(group.pids[0]).stopped)
        beats = {rank: read_beat(group.folder, rank) for rank in group.pids}
        until(lambda: all(read_beat(group.folder, r) != beats[r] for r in beats), within_s=60)  # noqa: B023
        group.never(watch, 1)


def test_who_is_behind_in_a_collective_is_named_when_the_phases_are_the_same(group: Group) -> None:
    """Rank 2 waits for 0 and 1 in a group of all, 1 waits for 0 in one of theirs, and 0 waits for nobody."""
    begun = ("{'tp/1/a': 7, 'all/0/b': 4}", "{'tp/1/a': 8, 'all/0/b': 4}", "{'tp/2/c': 3, 'all/0/b': 5}")
    at = f'pulse.watch_groups(lambda: {{}}); pulse.mark("backward"); {SLEEPS}'
    hang = group.named(group.start(*[at.replace("{}", g) for g in begun]), within_s=10)
    assert hang.rank == 0
    assert "has not begun collective 8 of group tp" in hang.evidence


def test_a_thread_that_never_lets_go_of_the_interpreter_is_named_with_its_stack(group: Group) -> None:
    # A second thread, so that the one that takes the signal need not be the main one.
    greedy = "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    greedy += 'def greedy(): ready(); ctypes.PyDLL(None).sleep(600)\npulse.mark("forward"); greedy()'
    group.start(f'pulse.mark("forward"); pulse.mark("backward"); {SLEEPS}', greedy, sampled=False)
    told: list[dict] = []
    note: Callable[..., None] = lambda kind, **fields: told.append({"kind": kind, **fields})  # noqa: E731
    progress = Progress(group.pids, group.folder, group.folder, Guard(), note)
    failure = group.looks(progress, 10)
    assert failure is not None
    assert (failure.rank, failure.cause) == (1, "hang")
    (hang,) = told
    assert hang["stack"][0].endswith("greedy"), hang
    everything = Path(hang["stacks"]).read_text()
    assert "greedy" in everything
    assert "rank 0" in everything


def test_the_stack_of_the_main_thread_is_found_whoever_took_the_signal() -> None:
    dump = """Current thread 0x00007f01 (most recent call first):
  File "/x/src/shoal/wire.py", line 85 in receive_into
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Thread 0x00007f02 (most recent call first):
  File "/x/src/shoal/train/loop.py", line 92 in train_step
  File "<string>", line 1 in <module>
"""
    assert frames(dump) == ("shoal/train/loop.py:92 train_step", "<string>:1 <module>")
    assert frames("") == ()


def test_reading_from_a_slow_disk_is_no_hang(group: Group) -> None:
    """It reads a little, all the time, for much longer than the limit."""
    slow = "ready(); f = open('/dev/zero', 'rb', buffering=0)\nwhile f.read(8192): time.sleep(0.02)"
    watch = group.start(WAITS, slow)

    def reads() -> None:
        before = signs_of(group.pids[1]).io_bytes
        until(lambda: signs_of(group.pids[1]).io_bytes > before + 8192, within_s=60)

    group.never(watch, 20, reads)


COMPILER = "exec(compile('ready(); time.sleep(600)', '/x/torch/_dynamo/convert_frame.py', 'exec'))"
# As the backward pass does on a GPU: compiled when it is first needed, in a thread of autograd's.
IN_A_THREAD = f"thread = threading.Thread(target=lambda: {COMPILER}); thread.start(); thread.join()"


@pytest.mark.parametrize("compiler", [COMPILER, IN_A_THREAD], ids=["main thread", "another thread"])
def test_compiling_is_no_hang(group: Group, compiler: str) -> None:
    """Known by a frame of the compiler in a stack, in any step."""
    group.never(group.start(f'pulse.mark("backward"); {WAITS}', f'pulse.mark("backward")\n{compiler}'), 300)


def test_a_rank_that_computes_is_told_and_not_ended(group: Group) -> None:
    group.start('pulse.mark("forward"); ' + WAITS, ENDLESS)
    told: list[dict] = []
    note: Callable[..., None] = lambda kind, **fields: told.append({"kind": kind, **fields})  # noqa: E731
    progress = Progress(group.pids, group.folder, group.folder, Guard(), note)
    assert group.looks(progress, 12, group.computes(1), COMPUTES_S) is None
    (slow,) = told  # once
    assert (slow["kind"], slow["rank"], slow["phase"], slow["action"]) == ("slow", 1, "forward", "wait")
    assert "at work without progress in forward of step 11" in slow["evidence"]
    assert "slow, or a live-lock" in slow["evidence"]


@pytest.mark.parametrize("on_hang", ["restart", "wait"])
def test_a_rank_that_computes_is_ended_after_the_time_that_the_run_file_says(group: Group, on_hang: str) -> None:
    group.start('pulse.mark("forward"); ' + WAITS, ENDLESS)
    told: list[dict] = []
    note: Callable[..., None] = lambda kind, **fields: told.append({"kind": kind, **fields})  # noqa: E731
    guard = Guard(livelock="9 s", on_hang=on_hang)
    progress = Progress(group.pids, group.folder, group.folder, guard, note)
    failure = group.looks(progress, 12, group.computes(1), COMPUTES_S)
    assert [(t["kind"], t["rank"], t["action"]) for t in told] == [("slow", 1, "wait"), ("hang", 1, on_hang)]
    assert told[1]["seconds"] >= 9
    assert (failure is not None) == (on_hang == "restart")


def test_a_rank_that_has_computed_and_then_sleeps_is_named(group: Group) -> None:
    """What it has worked before does not excuse it for longer than a rank that never did."""
    stop = group.folder / "stop"
    both = f'pulse.mark("forward"); ready()\nwhile not os.path.exists({str(stop)!r}): pass\ntime.sleep(600)'
    watch = group.start('pulse.mark("forward"); ' + WAITS, both)
    assert all(h is None or h.works for h in group.asked(watch, 12, group.computes(1), COMPUTES_S))
    stop.touch()
    until(lambda: (s := read_sample(group.folder, 1)) and signs_of(group.pids[1]).state == "S" and s)
    began = group.now
    hang = group.named(watch, within_s=12)
    assert (hang.rank, hang.works) == (1, False)
    assert group.now - began < 10


def test_one_that_waits_is_not_named_for_another_that_computes_at_the_same_place(group: Group) -> None:
    """Nothing shows who is behind: the same marks, no counts of collectives. Rank 1 is at work, so they wait for it."""
    watch = group.start(f'pulse.mark("forward"); {SLEEPS}', ENDLESS)
    found = [h for h in group.asked(watch, 12, group.computes(1), COMPUTES_S) if h is not None]
    assert found
    assert all((h.rank, h.works) == (1, True) for h in found)


def test_before_a_step_was_measured_nobody_hangs_for_being_slow(group: Group) -> None:
    """In the third step no step has been measured yet: the first two say nothing about it."""
    watch = group.start(SLEEPS, WAITS, steps=2)
    beat = read_beat(group.folder, 0)
    assert beat is not None
    assert (beat.steps, beat.slowest_s) == (3, 0.0)
    group.never(watch, 600)


def test_slow_steps_have_a_longer_limit(group: Group) -> None:
    slow = 'pulse.mark("data", 11); time.sleep(0.6)\npulse.mark("data", 12); ready(); time.sleep(600)'
    watch = group.start(slow, slow, limits=Limits(quick_s=0.4))
    beats = [read_beat(group.folder, rank) for rank in group.pids]
    slowest_s = max(beat.slowest_s for beat in beats if beat is not None)
    assert slowest_s >= 0.6
    assert group.named(watch).seconds >= 2.5 * slowest_s


def test_a_machine_that_stood_still_makes_nobody_hang(group: Group) -> None:
    """The watch was not asked for a minute: it has seen one tick, not a minute of silence."""
    watch = group.start(SLEEPS, SLEEPS, limits=Limits(quick_s=5.0))
    assert watch.verdict(group.now) is None
    assert watch.verdict(group.now + 60) is None


def test_the_supervisor_restarts_a_run_that_hangs(fake: FakeRun) -> None:
    stop = {"attempt": 0, "rank": 1, "step": 12, "do": "stop"}
    fake.plan(stop, guard={"hang": "1 s"})
    assert fake.supervise() == 0
    (hang,), (failure,) = fake.records("hang"), fake.records("failure")
    assert (hang["rank"], hang["stopped"], hang["action"], hang["attempt"]) == (1, True, "restart", 0)
    assert (failure["rank"], failure["cause"]) == (1, "hang")
    assert failure["evidence"] == hang["evidence"]
    assert "restart 1 of 3 from step 10" in failure["action"]
    assert not any(alive(pid) for attempt in fake.records("attempt") for pid in attempt["pids"])


def test_told_to_wait_the_supervisor_says_it_once_and_goes_on(fake: FakeRun) -> None:
    stop = {"attempt": 0, "rank": 1, "step": 12, "do": "stop"}
    fake.plan(stop, guard={"hang": "1 s", "on_hang": "wait"})
    supervisor = fake.start()
    until(lambda: fake.records("hang"), within_s=120)
    time.sleep(0.5)  # it goes on hanging, and nothing more is said
    os.kill(fake.pids()[1], signal.SIGCONT)
    supervisor.wait(120)
    assert supervisor.returncode == 0
    assert [hang["action"] for hang in fake.records("hang")] == ["wait"]
    assert not fake.records("failure")
    assert any("goes on" in w["text"] for w in fake.records("warning"))


def test_off_means_off(group: Group) -> None:
    group.start(WAITS, SLEEPS)
    os.kill(group.pids[1], signal.SIGSTOP)
    until(lambda: signs_of(group.pids[1]).stopped)
    for hang, names_it in (("off", False), ("auto", True)):
        told: list[str] = []
        note: Callable[..., None] = lambda kind, told=told, **_: told.append(kind)  # noqa: E731
        progress = Progress(group.pids, group.folder, group.folder, Guard(hang=hang), note)
        failures = [progress.look(float(second)) for second in range(20)]  # no need to wait for them
        assert (any(failures), "hang" in told) == (names_it, names_it)


def test_pulses_of_a_killed_supervisor_are_swept_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_MEMORY", str(tmp_path))
    script = "from shoal.journal.pulses import make_folder; print(make_folder())"
    left = Path(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip())
    assert left.is_dir()
    mine = make_folder()
    assert mine.is_dir()
    assert not left.exists()
    assert make_folder().is_dir()
    assert mine.is_dir()


def test_without_a_supervisor_the_first_two_watch_each_other(tmp_path: Path) -> None:
    """As under torchrun; it is said once."""
    stopped = 0
    program = """
import os, sys, time
from pathlib import Path
os.environ.update(RANK=sys.argv[1], LOCAL_RANK=sys.argv[1], LOCAL_WORLD_SIZE="3")
from shoal.guard.beside import pulse_of_this_process, watch_beside
from shoal.spec.run import Guard
pulse, folder = pulse_of_this_process()
watch_beside(folder, Path(sys.argv[2]), Guard(hang="1 s"), None)
print("ready", flush=True)
for step in range(1000):
    pulse.mark("data", step)
    time.sleep(0.05)
"""
    said = tmp_path / "said"
    with open(said, "w") as out:
        start = lambda rank: subprocess.Popen(  # noqa: E731
            [sys.executable, "-c", program, str(rank), str(tmp_path)], stderr=out, stdout=out
        )
        ranks = [start(rank) for rank in range(3)]
    try:
        until(lambda: said.read_text().count("ready") == 3, within_s=60)
        time.sleep(0.5)
        os.kill(ranks[stopped].pid, signal.SIGSTOP)
        until(lambda: "hangs" in said.read_text(), within_s=60)
        time.sleep(0.5)  # for one more that would say the same
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    lines = [line for line in said.read_text().splitlines() if "hangs" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"shoal: rank {stopped} hangs: stopped in data")
