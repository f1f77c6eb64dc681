"""This machine as a scheduler: the agents of a job under one shell script, which outlives the shell that sent it.

The script is what `--render` prints. It keeps the agents, passes signals on and writes down how they ended, since of a
process that is not one's own child nobody can ask that later. Several nodes are several agents here, each in a process
group of its own: a launch over nodes can be tried out before there is a cluster.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from shoal.errors import DONE, TOLD_TO_STOP, SetupError
from shoal.launch.backend import Phase, Rendered, State
from shoal.launch.job import Job
from shoal.launch.local_script import ENDED, SCRIPT, folder_of, script
from shoal.launch.request import Request
from shoal.observe.logs import Reader
from shoal.plain_file import open_plain, read_words
from shoal.processes import began, boot

LOOK_EVERY_S = 0.2
LAST_WORDS_BYTES = 8 * 1024
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2)


class Local:
    name = "local"

    def render(self, request: Request) -> list[Rendered]:
        return [Rendered(SCRIPT, script(request))]

    def submit(self, request: Request) -> Job:
        bash = shutil.which("bash")
        if bash is None:
            raise SetupError("launching on this machine needs bash, which is not on the PATH; install it.")
        text, secrets = script(request), request.secret_env()
        request.bundle.unpack_into(Path(request.there))
        folder = folder_of(request.there, request.name)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ENDED).unlink(missing_ok=True)
            (folder / SCRIPT).write_text(text)
            log = folder / "node-0.log"
            log.touch()
        except OSError as e:
            raise SetupError(f"cannot write {folder} ({e.strerror}); mend that, or name another --workspace.") from e
        out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            pid = os.posix_spawn(
                bash,
                ["bash", str(folder / SCRIPT)],
                {**os.environ, **secrets},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, out, 1),
                    (os.POSIX_SPAWN_DUP2, out, 2),
                ],
                setsid=True,
                setsigdef=_SIGNALS,  # `shoal launch … &` of a script is deaf to Ctrl-C, and what it starts with it
            )
        finally:
            os.close(out)
        where = {"host": socket.gethostname(), "boot": boot()}
        since, launch = began(pid), request.launch
        return Job(
            request.name, self.name, f"{pid}-{since}", time.time(), launch.nodes, launch.gpus, request.there,
            request.bundle.sha256, where,
        )  # fmt: skip

    def states(self, jobs: Sequence[Job]) -> Mapping[str, State]:
        return {job.id: _state(job) for job in jobs}

    def logs(self, job: Job, follow: bool, lines: int | None) -> Iterator[str]:
        folder = folder_of(job.workspace, job.run)
        readers = {path: Reader(str(n), path, 0) for n, path in _logs(folder).items()}
        said = [line for reader in readers.values() for line in reader.new_lines(flush=not follow)]
        yield from said if lines is None else said[max(0, len(said) - lines) :]
        while follow:
            over = not _alive(job)
            for n, path in _logs(folder).items():
                yield from readers.setdefault(path, Reader(str(n), path, 0)).new_lines(flush=over)
            if over:
                return
            time.sleep(LOOK_EVERY_S)

    def stop(self, job: Job, now: bool) -> None:
        if elsewhere := _elsewhere(job):
            raise SetupError(f"run '{job.run}' {elsewhere}; stop it there.")
        if _alive(job):
            with suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(_pid(job), signal.SIGTERM)
                if now:
                    os.kill(_pid(job), signal.SIGQUIT)


def _logs(folder: Path) -> dict[int, Path]:
    numbers = ((path.stem.removeprefix("node-"), path) for path in folder.glob("node-*.log"))
    return dict(sorted((int(number), path) for number, path in numbers if number.isdecimal() and len(number) < 10))


def _state(job: Job) -> State:
    nodes = (job.where.get("host", "?"),)
    if elsewhere := _elsewhere(job):
        return State("unknown", f"it {elsewhere}, which alone knows how it goes; ask there", nodes)
    if _alive(job):
        return State("running", f"pid {_pid(job)} on this machine", nodes, started=job.submitted)
    folder = folder_of(job.workspace, job.run)
    try:
        pid, code = map(int, read_words(folder / ENDED, 1000).split())
        ended = (folder / ENDED).stat().st_mtime
    except (OSError, ValueError):
        pid, code, ended = 0, 0, None
    if pid != _pid(job):
        why = "its process went away without a word: it was killed, or the machine went down"
        return State("gone", why, nodes, started=job.submitted)
    phase, why = _how(code, folder)
    return State(phase, why, nodes, started=job.submitted, ended=ended, exit_code=code)


def _how(code: int, folder: Path) -> tuple[Phase, str]:
    if code == DONE:
        return "done", "it is done"
    if code == TOLD_TO_STOP:
        return "stopped", "it was told to stop"
    said = _last_words(folder / "node-0.log")
    return "failed", f"exit code {code}" + (f": {said}" if said else "")


def _last_words(log: Path) -> str | None:
    """The sentence that Shoal ends with, else the last line."""
    try:
        with open(open_plain(log), "rb") as f:
            f.seek(max(0, os.fstat(f.fileno()).st_size - LAST_WORDS_BYTES))
            lines = [line.strip() for line in f.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return None
    last = lines[-1] if lines else None
    said = next((line.removeprefix("shoal: ") for line in reversed(lines) if line.startswith("shoal: ")), last)
    return said.rstrip(".") if said else None


def _pid(job: Job) -> int:
    """Its own; 0 where what stands there is none, and must not be sent a signal."""
    number = job.id.partition("-")[0]
    return int(number) if number.isdecimal() and 0 < len(number) < 10 else 0


def _alive(job: Job) -> bool:
    """A number alone may be another process by now, so its start is asked too, and whether the machine is the same."""
    if _elsewhere(job) or job.where.get("boot") != boot():
        return False
    pid, since = _pid(job), job.id.partition("-")[2]
    if not pid:
        return False
    with suppress(ChildProcessError):  # where this process started it: nobody else clears it away
        os.waitpid(pid, os.WNOHANG)
    return bool(since) and since == began(pid)


def _elsewhere(job: Job) -> str | None:
    host = job.where.get("host")
    return None if host == socket.gethostname() else f"runs on {host}"
