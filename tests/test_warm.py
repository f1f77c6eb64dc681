"""A warm start is a start: what is seen from outside, and from inside, is that of an executed program."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.guard.workers import TIED
from tests import ranks  # noqa: F401  # which has torch
from tests.patience import limit
from tests.warm import Warm, _ours, possible

pytestmark = pytest.mark.skipif(not possible(), reason="processes cannot say here what their command line is")
# A module of "Shoal" in the folder of the test; it shows what a program can see of itself.
PROGRAM = """
import atexit, json, os, signal, sys
open_ = {fd: os.path.realpath(f"/proc/self/fd/{fd}") for fd in range(3, 200)}
atexit.register(lambda: print("left", flush=True))
print(json.dumps({
    "argv": sys.argv[1:], "name": __name__, "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0),
    "folder": os.getcwd(), "mark": os.environ.get("MARK"), "all": len(os.environ),
    "files": [fd for fd, path in open_.items() if path == sys.argv[1]],
    "pipes": sum("pipe:" in path for path in open_.values()),
    "handlers": [signal.getsignal(n) is signal.SIG_DFL for n in (signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1)],
    "words": open("/proc/self/cmdline").read().split(chr(0))[:-1],
    "loaded": "shoal.guard.workers" in sys.modules, "libraries": "torch" in sys.modules,
    "mark_in_proc": b"MARK=here" in open("/proc/self/environ", "rb").read().split(bytes(1)),
}), flush=True)
if "wait" in sys.argv:
    signal.pause()
if "refuse" in sys.argv:
    sys.exit("no")
raise SystemExit(int(sys.argv[-1])) if sys.argv[-1].isdigit() else ValueError("wrong")
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shoal_shown.py").write_text(PROGRAM)
    monkeypatch.setattr("tests.warm._ours", lambda words: "shoal_shown" in words)


def start(folder: Path, *arguments: object, tied: bool = False, **options: object) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "shoal_shown", *map(str, arguments)]
    before = [sys.executable, "-I", "-S", str(TIED), str(os.getpid())] if tied else []
    given = {"env": {"MARK": "here", "PATH": os.environ["PATH"]}, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return Warm([*before, *words], cwd=folder, text=True, **{**given, **options})


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize("tied", [False, True])
def test_a_program_sees_what_it_would_have_been_given(tied: bool, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with (
        open(kept, "w") as file,
        open(kept) as other,
        start(tmp_path, kept, 7, tied=tied, pass_fds=[file.fileno()], start_new_session=True) as process,
    ):
        out, err = process.communicate(timeout=limit(60))
        assert (process.returncode, err) == (7, "")
        line, left = out.splitlines()
        said = json.loads(line)
        assert left == "left"
        assert said["files"] == [file.fileno()], other
    assert said["pipes"] == 0, "what others read or write is open in none but those whom it was given"
    assert said["argv"] == [str(kept), "7"]
    assert said["name"] == "__main__"
    assert (said["pid"], said["parent"], said["session"]) == (process.pid, os.getpid(), process.pid)
    assert (said["folder"], said["mark"], said["all"]) == (str(tmp_path), "here", 2)
    assert said["handlers"] == [True, True, True]
    assert said["words"] == [sys.executable, "-m", "shoal_shown", str(kept), "7"]
    assert said["mark_in_proc"]
    assert (said["loaded"], said["libraries"]) == (False, True)


@pytest.mark.usefixtures("program")
def test_it_is_ended_by_signals_and_by_what_it_does_not_catch(tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
        with start(tmp_path, tmp_path, "wait") as process:
            assert process.stdout is not None
            assert process.stdout.readline()
            process.send_signal(number)
            _, err = process.communicate(timeout=limit(60))
            assert process.returncode == -number, err
    with start(tmp_path, tmp_path, "else") as process:
        _, err = process.communicate(timeout=limit(60))
        assert process.returncode == 1
        assert err.endswith("ValueError: wrong\n")
    with start(tmp_path, tmp_path, "refuse") as process:
        assert process.communicate(timeout=limit(60))[1] == "no\n"
        assert process.returncode == 1


def test_only_shoal_itself_is_begun_so() -> None:
    words = [sys.executable, "-m", "shoal.train", "--worker", "runs/x"]
    assert _ours(words)
    assert _ours([sys.executable, "-I", "-S", str(TIED), "17", *words])
    assert not _ours([sys.executable, "-I", "-S", str(TIED), "17", "sleep", "9"])
    assert not _ours([sys.executable, "-m", "pytest"])
    assert not _ours([sys.executable, "-c", "import shoal"])
    assert not _ours(["python3", "-m", "shoal"])
