"""Worker processes that do units, and the parent that hands them out.

A worker is `python -m shoal.data.prepare_workers`: it reads the job and then units as JSON lines from stdin, and writes
reports as JSON lines to stdout. Plain pipes instead of multiprocessing: a script that calls `prepare` then needs no
`if __name__ == "__main__"`, nothing is forked from a process with threads, and a worker whose parent is gone ends at
its next report. Workers also inherit the lock on the output folder, so nobody else writes there while one is left.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from shoal import errors
from shoal.data.messages import from_error, to_error
from shoal.data.prepare_folder import writing_to
from shoal.data.prepare_unit import Job, Progress, Report, process
from shoal.data.units import Unit
from shoal.errors import ShoalError, TransientError
from shoal.signals import held_back


def run_here(job: Job, units: Sequence[Unit], report: Report) -> int:
    """All units in this process, one after another; the most memory it ever had, in bytes."""
    tokenizer = job.load_tokenizer()
    for unit in units:
        process(job, unit, tokenizer, report)
    return peak_rss_bytes()


def run_in_workers(job: Job, units: Sequence[Unit], workers: int, lock_fd: int, report: Report) -> int:
    """The units by several processes at once; the sum of the most memory that each ever had, in bytes."""
    waiting = list(reversed(units))
    busy: dict[int, Unit] = {}
    peaks: dict[int, int] = {}
    started: list[subprocess.Popen[bytes]] = []
    selector = selectors.DefaultSelector()
    try:
        with held_back(signal.SIGINT):  # Ctrl-C reaches the whole group; the parent ends its workers
            for _ in range(min(workers, len(units))):
                worker = _start(job, lock_fd)
                started.append(worker)
                selector.register(_pipe(worker.stdout), selectors.EVENT_READ, worker)
                busy[worker.pid] = _hand_out(worker, waiting.pop())
        unread = {worker.pid: b"" for worker in started}
        while busy:
            for key, _ in selector.select():
                worker = key.data
                data = os.read(key.fd, 1 << 16)
                if not data:
                    raise _ended(worker, busy.get(worker.pid))
                *lines, unread[worker.pid] = (unread[worker.pid] + data).split(b"\n")
                for line in lines:
                    message = json.loads(line)
                    if "error" in message:
                        raise to_error(message)
                    if "progress" in message:
                        report(Progress(*message["progress"]))
                        continue
                    peaks[worker.pid] = message["peak_rss_bytes"]
                    del busy[worker.pid]
                    if waiting:
                        busy[worker.pid] = _hand_out(worker, waiting.pop())
    finally:
        selector.close()
        _end(started)
    return sum(peaks.values())


def _start(job: Job, lock_fd: int) -> subprocess.Popen[bytes]:
    # One thread each: the cores are taken by the other workers.
    env = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "shoal.data.prepare_workers"]
    worker = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=env, pass_fds=[lock_fd]
    )
    _send(worker, job.to_json())
    return worker


def _hand_out(worker: subprocess.Popen[bytes], unit: Unit) -> Unit:
    _send(worker, unit.to_json())
    return unit


def _send(worker: subprocess.Popen[bytes], message: dict[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    stdin = _pipe(worker.stdin)
    try:
        while data:  # a raw pipe takes what it has room for
            data = data[stdin.write(data) or 0 :]
    except BrokenPipeError:
        pass  # it died; reading from it says so, with its exit code


def _ended(worker: subprocess.Popen[bytes], unit: Unit | None) -> ShoalError:
    code = worker.wait()
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    likely = " (often that is the system running out of memory: use fewer --workers)" if code == -signal.SIGKILL else ""
    doing = f" while it read {unit.pieces[0].input.path}" if unit else ""
    return TransientError(f"a worker {how}{doing}{likely}; run the same command again to go on.")


def _end(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    """A worker that has no unit ends when its input does; one that has is not waited for."""
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.wait()
        _pipe(worker.stdin).close()
        _pipe(worker.stdout).close()


def _pipe(end: IO[bytes] | None) -> IO[bytes]:
    assert end is not None
    return end


def peak_rss_bytes() -> int:
    """The most memory this process ever had. Not ru_maxrss, which begins at the size of the parent on Linux."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # not Linux
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


def main() -> None:
    """The worker."""
    # Whatever a library prints must not get between the messages.
    messages = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(**message: Any) -> None:
        try:
            messages.write(json.dumps(message) + "\n")
            messages.flush()
        except BrokenPipeError:
            os._exit(errors.TRANSIENT)  # the parent is gone

    try:
        job = Job.from_json(json.loads(sys.stdin.readline()))
        tokenizer = job.load_tokenizer()
        for line in sys.stdin:
            with writing_to(job.out):
                process(job, Unit.from_json(json.loads(line)), tokenizer, lambda progress: send(progress=progress))
            send(done=True, peak_rss_bytes=peak_rss_bytes())
    except Exception as e:
        send(**from_error(e))


if __name__ == "__main__":
    main()
