"""Runs many commands beside each other, as many as there is room for; whoever wants a result waits for that one.

    crew = Crew(logs, room=16)
    crew.add(Task("two ranks", [(command, env), (command, env)], ranks=2))      # starts when there is room
    crew.done("two ranks")                                                     # what it printed, or Failed

A task whose command fails is ended with all of its processes, and so is one that outlives its limit; the others go on.
What is raised names the exception of the process that began it. Nothing here knows of GPUs but `visible`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.guard.classify import Failure, classify, culprit
from shoal.guard.workers import Death
from tests.patience import Stopwatch

WORDS_S = 2.0  # for the last words of those that lost a peer, and of those that are told to stop
_STACK = re.compile(r'^  File ".*?([^/]+/[^/]+)", line (\d+) in (\S+)$', re.MULTILINE)


class Failed(AssertionError):
    """In one sentence first: it becomes a line of a table."""


@dataclass(frozen=True)
class Task:
    name: str
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]]  # with what each has in its environment
    ranks: int = 1  # that it takes room for
    limit_s: float = 180.0  # of a quiet machine, from its start
    folder: Path | None = None  # in which the commands run
    stacks: bool = False  # its processes print where they stand on SIGUSR1


@dataclass
class _Running:
    task: Task
    processes: list[subprocess.Popen[bytes]]
    watch: Stopwatch = field(default_factory=Stopwatch)


class Crew:
    def __init__(self, logs: Path, room: int, gpus: int = 0) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._logs, self._room, self._gpus = logs, room, gpus
        self._waiting: list[Task] = []
        self._running: list[_Running] = []
        self._known: set[str] = set()
        self._ended: dict[str, Failed | None] = {}
        self._next_gpu = 0
        self._changed = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def add(self, task: Task) -> None:
        """Of several with one name the first counts."""
        with self._changed:
            if task.name not in self._known:
                self._known.add(task.name)
                self._waiting.append(task)
                self._changed.notify_all()

    def done(self, name: str) -> str:
        """Waits for it; what its first command wrote to stdout."""
        assert name in self._known, name
        with self._changed:
            self._changed.wait_for(lambda: name in self._ended)
            failed = self._ended[name]
        if failed:
            raise failed
        return _log(self._logs, name, 0, "out").read_text(errors="replace")

    def close(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        with self._changed:
            while not self._over:
                self._start_what_fits()
                for running in list(self._running):
                    if (end := self._look(running)) is not None:
                        self._running.remove(running)
                        self._ended[running.task.name] = end or None
                        self._changed.notify_all()
                self._changed.wait(0.1)
            for running in self._running:
                _end(running.processes)

    def _start_what_fits(self) -> None:
        for task in list(self._waiting):
            busy = sum(running.task.ranks for running in self._running)
            if self._running and busy + task.ranks > self._room:
                continue
            self._waiting.remove(task)
            self._running.append(_Running(task, self._started(task)))

    def _started(self, task: Task) -> list[subprocess.Popen[bytes]]:
        visible = self._visible(task.ranks)
        processes = []
        for number, (command, env) in enumerate(task.commands):
            out, err = (_log(self._logs, task.name, number, stream) for stream in ("out", "err"))
            with open(out, "wb") as to_out, open(err, "wb") as to_err:
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=task.folder,
                        env={**os.environ, **visible, **env},
                        stdin=subprocess.DEVNULL,
                        stdout=to_out,
                        stderr=to_err,
                        process_group=0,  # in this process's session: the suite ends all that is left of it
                    )
                )
        return processes

    def _visible(self, ranks: int) -> dict[str, str]:
        """Of several GPUs the next ones, so that tasks beside each other have others."""
        if self._gpus < 2:
            return {}
        mine = [(self._next_gpu + i) % self._gpus for i in range(min(ranks, self._gpus))]
        self._next_gpu = (mine[-1] + 1) % self._gpus
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, mine))}

    def _look(self, running: _Running) -> Failed | bool | None:
        """None: it runs; False: it has ended well; else how it failed. What it has left running is ended with it."""
        codes = [p.poll() for p in running.processes]
        late = running.watch.quiet_s() > running.task.limit_s
        if None in codes and not any(codes) and not late:
            return None
        if not any(codes) and None not in codes:
            return False
        if late and running.task.stacks:
            for process in running.processes:
                _signal(process, signal.SIGUSR1)
        self._changed.wait_for(lambda: self._over, WORDS_S)
        codes = [p.poll() for p in running.processes]
        _end(running.processes)
        return self._failed(running.task, codes, late)

    def _failed(self, task: Task, codes: list[int | None], late: bool) -> Failed:
        errors = [_log(self._logs, task.name, number, "err") for number in range(len(codes))]
        if late and not any(codes):
            stood = {rank: _stood(log) for rank, log in enumerate(errors)}
            where = "; ".join(f"rank {rank} in {at}" for rank, at in stood.items() if at)
            return Failed(f"{task.name}: ended after {task.limit_s:g} s{where and ', '}{where}{_tails(errors)}")
        failures = [classify(death_of(rank, code, errors[rank])) for rank, code in enumerate(codes) if code]
        first = culprit(failures)
        assert first is not None
        rank = f" rank {first.rank}" if len(codes) > 1 else ""
        return Failed(f"{task.name}:{rank} {words_of(first)}{_tails(errors)}")


def words_of(failure: Failure) -> str:
    how = f"exit code {failure.exit_code}" if failure.exit_code is not None else "a signal"
    return f"{failure.evidence or how} [{failure.cause}, {how}]"


def death_of(rank: int, code: int, log: Path) -> Death:
    exited, signalled = (None, -code) if code < 0 else (code, None)
    return Death(rank, 0, exited, signalled, told=False, t=time.time(), log=log)


def _stood(log: Path) -> str:
    """The innermost frame of ours on the main thread's stack, which faulthandler prints last."""
    frames = _STACK.findall(log.read_text(errors="replace").rpartition("Current thread")[2])
    return next((f"{file}:{line} {name}" for file, line, name in frames if "threading" not in file), "")


def _tails(logs: Sequence[Path]) -> str:
    return "".join(f"\n--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Told to stop first: a drill and a supervisor put away what they have started in sessions of their own."""
    for process in processes:
        _signal(process, signal.SIGTERM)
    end = time.monotonic() + 5 * WORDS_S
    while any(p.poll() is None for p in processes) and time.monotonic() < end:
        time.sleep(0.02)
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    if process.poll() is None:
        process.send_signal(number)


def _log(logs: Path, name: str, number: int, stream: str) -> Path:
    plain = "".join(c if c.isalnum() else "-" for c in name)
    return logs / f"{plain}-{number}.{stream}"
