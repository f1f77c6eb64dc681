"""Worker processes that do units, and the parent that hands them out.

A worker is `python -m shoal.data.prepare.workers`: it reads the job and then units as JSON lines from stdin, and writes
reports as JSON lines to stdout. Plain pipes instead of multiprocessing: a script that calls `prepare` then needs no
`if __name__ == "__main__"`, nothing is forked from a process with threads, and a worker whose parent is gone ends at
its next report. Workers also inherit the lock on the output folder, so nobody else writes there while one is left.

A worker may take so much memory and no more (shoal.data.prepare.memory_limit), and the libraries that read tables can
crash. Which piece a worker reads stands in a small file that it shares with its parent: so the input that ended it is
known by name, and is refused, or left out and counted.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from shoal import errors
from shoal.data.prepare.bad_input import Problems
from shoal.data.prepare.child_errors import from_error, to_error
from shoal.data.prepare.memory_limit import LEAN, hold_to, process_bytes
from shoal.data.prepare.out_folder import writing_to
from shoal.data.prepare.table_look import CRASHED, crash
from shoal.data.prepare.unit import Job, Progress, Report, process
from shoal.data.prepare.units import Unit
from shoal.data.tokenizer import BYTE
from shoal.errors import TransientError
from shoal.held_signals import held_back

LeftOut = Mapping[int, Sequence[str]]
OUT_OF_MEMORY = 77  # of a worker, to its parent


def run_here(job: Job, units: Sequence[Unit], report: Report) -> int:
    """All units in this process, one after another; the most memory it ever had, in bytes."""
    tokenizer = job.load_tokenizer()
    for unit in units:
        process(job, unit, tokenizer, report)
    return peak_rss_bytes()


def run_in_workers(job: Job, units: Sequence[Unit], workers: int, lock_fd: int, report: Report) -> int:
    """The units by several processes at once; the sum of the most memory that each ever had, in bytes."""
    waiting = list(reversed(units))
    peaks: dict[int, int] = {}
    crew: list[_Worker] = []
    selector = selectors.DefaultSelector()

    def start(unit: Unit, left_out: LeftOut) -> None:
        with held_back(signal.SIGINT):  # Ctrl-C reaches the whole group; the parent ends its workers
            worker = _Worker(job, lock_fd)
        crew.append(worker)
        selector.register(worker.out, selectors.EVENT_READ, worker)
        worker.hand_out(unit, left_out)

    try:
        for _ in range(min(workers, len(units))):
            start(waiting.pop(), {})
        while any(worker.unit for worker in crew):
            for key, _ in selector.select():
                worker: _Worker = key.data
                messages = worker.messages()
                if messages is None:
                    selector.unregister(worker.out)
                    start(*worker.without_what_ended_it())
                    continue
                for message in messages:
                    if "error" in message:
                        raise to_error(message)
                    if "progress" in message:
                        report(Progress(*message["progress"]))
                    elif "done" in message:
                        peaks[worker.process.pid] = message["peak_rss_bytes"]
                        worker.unit = None
                        if waiting:
                            worker.hand_out(waiting.pop(), {})
    finally:
        selector.close()
        _end([worker.process for worker in crew])
    return sum(peaks.values())


class _Worker:
    """One process, seen from the parent."""

    def __init__(self, job: Job, lock_fd: int) -> None:
        self.unit: Unit | None = None
        self._job = job
        self._left_out: LeftOut = {}
        self._unread = b""
        self._mark = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        mark_fd = self._mark.fileno()
        command = [sys.executable, "-m", "shoal.data.prepare.workers", str(mark_fd)]
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=os.environ | LEAN,
            pass_fds=[lock_fd, mark_fd],
        )
        self.out = _pipe(self.process.stdout)
        self._send(job.to_json())

    def hand_out(self, unit: Unit, left_out: LeftOut) -> None:
        self.unit, self._left_out = unit, left_out
        self._send({"unit": unit.to_json(), "left_out": left_out})

    def messages(self) -> list[dict[str, Any]] | None:
        """What it has said; None: it has ended."""
        data = os.read(self.out.fileno(), 1 << 16)
        if not data:
            return None
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def without_what_ended_it(self) -> tuple[Unit, LeftOut]:
        """Its unit for another try, without the piece that ended it. Raises where bad input is not to be skipped, and
        where the input is not to blame."""
        code = self.process.wait()
        unit, self.unit = self.unit, None
        if unit is None:
            raise TransientError(f"a worker ended with code {code}; run the same command again to go on.")
        number = int.from_bytes(os.pread(self._mark.fileno(), 8, 0), "little")
        path = unit.pieces[number].input.path
        if code == OUT_OF_MEMORY:
            most_mb = _most_bytes(self._job) >> 20
            found = (
                "takes too much memory",
                f"takes more than the {most_mb:,} MiB that a process may have",
                "cut it, or allow more with --max-document-mb and --buffer-mb",
            )
        else:
            found = (CRASHED, *crash(code, path))
        Problems(self._job.skip_bad).found(found[0], lambda: path, *found[1:])
        return unit, {**self._left_out, number: found}

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        stdin = _pipe(self.process.stdin)
        try:
            while data:  # a raw pipe takes what it has room for
                data = data[stdin.write(data) or 0 :]
        except BrokenPipeError:
            pass  # it died; reading from it says so, with its exit code


def _most_bytes(job: Job) -> int:
    return process_bytes(job.reading, 0 if job.tokenizer == BYTE else os.path.getsize(job.tokenizer))


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
        mark_fd = int(sys.argv[1])
        job = Job.from_json(json.loads(sys.stdin.readline()))
        hold_to(_most_bytes(job))
        tokenizer = job.load_tokenizer()
        for line in sys.stdin:
            asked = json.loads(line)
            with writing_to(job.out):
                process(
                    job,
                    Unit.from_json(asked["unit"]),
                    tokenizer,
                    lambda progress: send(progress=progress),
                    # Written to a file, and not said: a unit may have thousands of small files.
                    lambda number: os.pwrite(mark_fd, number.to_bytes(8, "little"), 0),
                    {int(number): found for number, found in asked["left_out"].items()},
                )
            send(done=True, peak_rss_bytes=peak_rss_bytes())
    except MemoryError:
        os._exit(OUT_OF_MEMORY)  # at once: whatever else is done may want memory too
    except Exception as e:
        send(**from_error(e))


if __name__ == "__main__":
    main()
