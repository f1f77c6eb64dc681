"""What counts as standing still and what does not: real processes that write a pulse, without a model in them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.guard.fake import FakeRun, alive, until

from shoal.guard import hang as hang_module
from shoal.guard.hang import Hang, Limits, Watch
from shoal.guard.progress import Progress
from shoal.guard.pulses import make_folder
from shoal.guard.signs import signs_of
from shoal.guard.stacks import frames
from shoal.observe.pulse import read_beat, read_sample
from shoal.spec.run import Guard

QUICK = Limits(quick_s=1.0, long_s=600.0)
# A worker that has made some steps, then does what it is told by the code that follows.
PRELUDE = """
import ctypes, os, sys, threading, time
from pathlib import Path
from shoal.observe.pulse import Pulse
pulse = Pulse(Path(sys.argv[1]), int(sys.argv[2]))
for step in range(10):
    for phase in ("data", "exchange", "forward", "backward", "optimizer", "record"):
        pulse.mark(phase, step if phase == "data" else None)
pulse.mark("data", 10)
"""


class Group:
    """Processes that pretend to be the ranks of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, *programs: str, limits: Limits = QUICK) -> Watch:
        for rank, program in enumerate(programs):
            command = [sys.executable, "-c", PRELUDE + program, str(self.folder), str(rank)]
            self._processes[rank] = subprocess.Popen(command)
        until(lambda: all((b := read_beat(self.folder, r)) and b.steps >= 11 for r in self._processes))
        until(lambda: all((s := read_sample(self.folder, r)) and s.stack for r in self._processes))
        return Watch(self.pids, self.folder, limits)

    @property
    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self._processes.items()}

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    group = Group(tmp_path)
    yield group
    group.end()


def named(watch: Watch, within_s: float = 60.0) -> Hang:
    return until(lambda: watch.verdict(time.monotonic()), within_s)


def never(watch: Watch, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        hang = watch.verdict(time.monotonic())
        assert hang is None, hang.evidence
        time.sleep(0.05)


SLEEPS = "time.sleep(600)"
WAITS = 'pulse.mark("exchange"); time.sleep(600)'


def test_the_rank_that_has_not_reached_where_the_others_wait_is_named(group: Group) -> None:
    hang = named(group.start(WAITS, "def read(): time.sleep(600)\nread()", WAITS))
    assert (hang.rank, hang.phase, hang.step, hang.stopped) == (1, "data", 11, False)
    assert hang.stack[0].endswith("read")
    assert [(o.rank, o.phase) for o in hang.others] == [(0, "exchange"), (2, "exchange")]


def test_a_stopped_rank_is_named_also_where_it_may_take_long(group: Group) -> None:
    watch = group.start('pulse.mark("save"); pulse.mark("data", 11); ' + WAITS, 'pulse.mark("save"); time.sleep(600)')
    never(watch, 1.5)  # a save may take half an hour
    os.kill(group.pids[1], signal.SIGSTOP)
    hang = named(watch)
    assert (hang.rank, hang.phase, hang.stopped) == (1, "save", True)
    assert "state T" in hang.evidence


def test_a_short_stop_is_no_hang(group: Group) -> None:
    watch = group.start(*["while True: pulse.mark('forward'); time.sleep(0.05)"] * 2)
    for _ in range(2):
        os.kill(group.pids[0], signal.SIGSTOP)
        never(watch, 0.5)
        os.kill(group.pids[0], signal.SIGCONT)
        never(watch, 0.3)


def test_who_is_behind_in_a_collective_is_named_when_the_phases_are_the_same(group: Group) -> None:
    """Rank 2 waits for 0 and 1 in a group of all, 1 waits for 0 in one of theirs, and 0 waits for nobody."""
    begun = ("{'tp/1/a': 7, 'all/0/b': 4}", "{'tp/1/a': 8, 'all/0/b': 4}", "{'tp/2/c': 3, 'all/0/b': 5}")
    at = 'pulse.watch_groups(lambda: {}); pulse.mark("backward"); time.sleep(600)'
    hang = named(group.start(*[at.replace("{}", g) for g in begun]))
    assert hang.rank == 0
    assert "has not begun collective 8 of group tp" in hang.evidence


def test_a_thread_that_never_lets_go_of_the_interpreter_is_named_with_its_stack(group: Group) -> None:
    # A second thread, so that the one that takes the signal need not be the main one.
    greedy = "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    greedy += 'def greedy(): ctypes.PyDLL(None).sleep(600)\npulse.mark("forward"); greedy()'
    group.start('pulse.mark("forward"); pulse.mark("backward"); time.sleep(600)', greedy)
    told: list[dict] = []
    note: Callable[..., None] = lambda kind, **fields: told.append({"kind": kind, **fields})  # noqa: E731
    progress = Progress(group.pids, group.folder, group.folder, Guard(hang="1 s"), note)
    failure = until(lambda: progress.look(time.monotonic()), 15)
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
    slow = "f = open('/dev/zero', 'rb', buffering=0)\nwhile f.read(8192): time.sleep(0.1)"
    never(group.start(WAITS, slow), 2.5)


def test_compiling_is_no_hang(group: Group) -> None:
    """Known by a frame of the compiler in the stack, in any step."""
    compiler = "code = compile('time.sleep(600)', '/x/torch/_dynamo/convert_frame.py', 'exec')\nexec(code)"
    never(group.start(WAITS, compiler), 2.0)


def test_a_rank_that_computes_gets_longer(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_module, "BUSY_SHARE", 0.02)  # of a core, which it may have to share with many
    endless = 'pulse.mark("forward")\nwhile True: pass'
    watch = group.start('pulse.mark("forward"); ' + WAITS, endless, limits=Limits(quick_s=0.6))
    never(watch, 1.2)
    assert named(watch).rank == 1  # an endless loop is one all the same


def test_slow_steps_have_a_longer_limit(group: Group) -> None:
    slow = 'pulse.mark("data", 11); time.sleep(0.6)\npulse.mark("data", 12); time.sleep(600)'
    watch = group.start(slow, slow, limits=Limits(quick_s=0.4))
    began = until(lambda: (b := read_beat(group.folder, 0)) and b.step == 12 and time.monotonic())
    hang = named(watch)
    assert time.monotonic() - began > 1.2
    assert hang.seconds > 1.2


def test_a_machine_that_stood_still_makes_nobody_hang(group: Group) -> None:
    """The watch was not asked for a minute: it has seen one tick, not a minute of silence."""
    watch = group.start(SLEEPS, SLEEPS, limits=Limits(quick_s=5.0))
    now = time.monotonic()
    assert watch.verdict(now) is None
    assert watch.verdict(now + 60) is None


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
    until(lambda: fake.records("hang"))
    time.sleep(0.5)  # it goes on hanging, and nothing more is said
    os.kill(fake.pids()[1], signal.SIGCONT)
    supervisor.wait(30)
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
    script = "from shoal.guard.pulses import make_folder; print(make_folder())"
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
