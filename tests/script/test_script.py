"""A script of which nothing is known, under the supervisor: real processes, no torch."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.errors import TOLD_TO_STOP, WRONG_USAGE
from shoal.spec.script import GIVEN
from tests.patience import limit, until
from tests.script.conftest import QUICK, ScriptRun

AGAIN = "again = os.environ['TORCHELASTIC_RESTART_COUNT'] != '0'\nrank = int(os.environ['RANK'])\n"


def test_each_process_is_told_what_torchrun_tells_it(script: ScriptRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "7")  # of somebody else's shell
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    text = """
    import json
    told = {name: os.environ.get(name) for name in json.loads(sys.argv[1])}
    json.dump({**told, "folder": os.getcwd(), "argv": sys.argv[2:]}, open(f"told-{os.environ['RANK']}", "w"))
    """
    asked = json.dumps([*sorted(GIVEN), "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF"])
    # What looks like one of ours, after the script, is the script's.
    theirs = ("--name", "other", "--debug", "-h", "guard.restarts=9", "--", "a b", "")
    assert script.run(text, "--processes", "2", args=(asked, *theirs)) == 0
    told = [json.loads(script.file(f"told-{rank}")) for rank in (0, 1)]
    assert [one["RANK"] for one in told] == [one["LOCAL_RANK"] for one in told] == ["0", "1"]
    for one in told:
        assert (one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"], one["GROUP_RANK"]) == ("2", "2", "0")
        assert (one["TORCHELASTIC_RUN_ID"], one["TORCHELASTIC_RESTART_COUNT"]) == ("demo", "0")
        assert one["MASTER_PORT"] == told[0]["MASTER_PORT"]
        assert one["OMP_NUM_THREADS"] == "3"
        assert one["PYTORCH_ALLOC_CONF"] is None
        assert one["argv"] == list(theirs)
        assert one["folder"] == str(script.folder)
    assert script.one("close")["reason"] == "the script has ended with exit code 0"


def test_a_killed_rank_is_named_with_its_signal_and_the_script_started_again(script: ScriptRun) -> None:
    text = f"""
    {AGAIN.replace(chr(10), chr(10) + "    ")}
    print("attempt", again, flush=True)
    if not again and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if not again:
        time.sleep(600)
    """
    assert script.run(text, "--processes", "2") == 0
    failure = script.one("failure")
    assert (failure["rank"], failure["cause"], failure["signal"]) == (1, "killed", "SIGKILL")
    assert failure["action"] == "restart 1 of 3 anew (script.resume is empty) in 0.01 s"
    assert "begins anew: script.resume does not say how" in script.one("warning")["text"]
    assert len(script.records("attempt")) == 2
    assert "attempt True" in script.out  # what rank 0 prints is seen
    assert "rank 1: killed (ended by SIGKILL)" in script.err


def test_a_stopped_rank_is_named_with_the_line_it_stands_at(script: ScriptRun) -> None:
    text = f"""
    {AGAIN.replace(chr(10), chr(10) + "    ")}
    def stands_still():
        os.kill(os.getpid(), signal.SIGSTOP)
    if not again:
        stands_still() if rank == 1 else time.sleep(600)
    """
    assert script.run(text, "--processes", "2", "guard.hang=1s") == 0
    hang = script.one("hang")
    assert (hang["rank"], hang["stopped"]) == (1, True)
    assert hang["stack"][0].endswith("stands_still")
    assert "is in state T" in script.one("failure")["evidence"]


def test_a_rank_that_waits_for_another_forever_is_found_with_its_stack(script: ScriptRun) -> None:
    text = f"""
    import socket
    {AGAIN.replace(chr(10), chr(10) + "    ")}
    def waits_for_ever():
        a, b = socket.socketpair()
        a.recv(1)
    if not again:
        waits_for_ever()
    """
    assert script.run(text, "--processes", "2", "guard.hang=1s") == 0
    hang = script.one("hang")
    assert hang["stack"][0].endswith("waits_for_ever")
    assert "no CPU time, no reading or writing and no log line" in hang["evidence"]
    assert Path(hang["stacks"]).read_text().count("in waits_for_ever") == 2


def test_a_hang_is_found_without_the_probe_too(script: ScriptRun, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = script.folder / "py-spy"
    spy.write_text(f"#!{sys.executable}\nprint('Thread 1 (idle): \"MainThread\"\\n    asleep (train.py:9)')\n")
    spy.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.folder}:/usr/bin:/bin")
    text = f"""
    {AGAIN.replace(chr(10), chr(10) + "    ")}
    assert "shoal.script.probe" not in sys.modules
    if not again:
        threading.Event().wait()
    """
    assert script.run(text, "--no-probe", "guard.hang=1s") == 0
    assert script.one("hang")["stack"] == ["train.py:9 asleep"]


def test_a_script_that_loads_data_in_other_processes_does_not_hang(script: ScriptRun) -> None:
    text = """
    import subprocess
    busy = "import time; end = time.process_time() + 1.5\\nwhile time.process_time() < end: pass"
    subprocess.run([sys.executable, "-S", "-c", busy])
    """
    assert script.run(text, "guard.hang=0.5s") == 0
    assert script.records("hang") == []


@pytest.mark.parametrize(
    ("ends", "code", "attempts", "cause"),
    [
        ("sys.exit(3)", 3, 2, "unknown"),
        ("raise ValueError('no such thing')", 1, 2, "exception"),
        ("import argparse; argparse.ArgumentParser().parse_args(['--nonsense'])", 2, 1, "user-error"),
        ("import no_such_package", 1, 1, "exception"),
    ],
)
def test_the_exit_code_of_the_script_is_handed_on(
    script: ScriptRun, ends: str, code: int, attempts: int, cause: str
) -> None:
    assert script.run(ends, "guard.restarts=1") == code
    assert len(script.records("attempt")) == attempts
    assert script.records("failure")[-1]["cause"] == cause
    assert script.one("close")["exit_code"] == code


def started(script: ScriptRun, text: str, *options: str) -> subprocess.Popen[str]:
    words = ["run", "--name", "demo", *QUICK, *options, str(script.write(text))]
    return subprocess.Popen([sys.executable, "-m", "shoal", *words], text=True, stdout=subprocess.PIPE)


def test_a_script_that_leaves_in_order_when_told_is_stopped_and_not_done(script: ScriptRun) -> None:
    text = """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    open("ready", "w").close()
    while os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(0.05)
    """
    process = started(script, text)
    try:
        until(lambda: (script.folder / "ready").exists(), 60)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=limit(60))
    finally:
        process.kill()
    assert process.returncode == TOLD_TO_STOP
    assert script.one("close")["reason"] == "told to stop (SIGTERM); its processes have ended"
    assert script.shoal("resume", "demo") == 0
    assert script.records("close")[-1]["status"] == "done"


def test_a_stop_is_handed_on_and_one_that_ignores_it_is_ended(script: ScriptRun) -> None:
    text = """
    rank = os.environ["RANK"]
    def told(*_):
        open(f"told-{rank}", "w").close()
        if rank == "0":
            sys.exit(0)
    signal.signal(signal.SIGTERM, told)
    open(f"ready-{rank}", "w").close()
    while True:
        time.sleep(0.05)
    """
    process = started(script, text, "--processes", "2", "guard.grace_s=0.5")
    try:
        until(lambda: all((script.folder / f"ready-{rank}").exists() for rank in (0, 1)), 60)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=limit(60))
    finally:
        process.kill()
    assert process.returncode == TOLD_TO_STOP
    assert (script.folder / "told-0").exists()
    assert (script.folder / "told-1").exists()
    assert script.one("close")["status"] == "stopped"


def test_odd_scripts_come_to_their_end(script: ScriptRun) -> None:
    """It prints much without a newline, forks, closes what it has not opened, and ends."""
    text = """
    for _ in range(16):
        sys.stdout.write("x" * (1 << 20))
    sys.stdout.flush()
    if os.fork() == 0:
        os.setsid()
        os._exit(7)
    os.closerange(0, 64)
    """
    assert script.run(text) == 0
    assert len(script.out) < 6 << 20  # of sixteen: what stands in the log is not all shown
    assert script.shoal("logs", "demo", "-n", "1") == 0
    assert script.shoal("report", "demo", "--no-png") == 0
    assert "train.py · 1 process" in script.out
    assert script.shoal("ps", "demo") == 0
    assert "the script has ended with exit code 0" in script.out
    assert script.shoal("show", "demo") == 0
    assert "script.path" in script.out
    assert "model." not in script.out


def test_the_probe_is_in_the_rank_alone_and_hides_no_sitecustomize(
    script: ScriptRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    (script.folder / "mine").mkdir()
    (script.folder / "mine" / "sitecustomize.py").write_text("import os; os.environ['MINE'] = 'was run'\n")
    monkeypatch.setenv("PYTHONPATH", str(script.folder / "mine"))
    text = """
    import subprocess
    assert os.environ.pop("MINE") == "was run"
    assert "shoal.script.probe" in sys.modules
    assert sys.modules["sitecustomize"].__file__.endswith("mine/sitecustomize.py")
    assert not any("probe_path" in folder for folder in sys.path), sys.path
    look = "import os, sys; assert 'shoal.script.probe' not in sys.modules; assert os.environ['MINE']"
    sys.exit(subprocess.run([sys.executable, "-c", look]).returncode)
    """
    assert script.run(text, "guard.restarts=0") == 0, script.log()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("trian.py", "there is no file trian.py; did you mean train.py?"),
        ("nothing", "there is no file nothing; give the script's path."),
        ("folder", "is a folder; give the Python file that trains, such as folder/inside.py."),
        ("train.sh", "train.sh:1 is no Python 3."),
        ("zeros", "is no Python 3."),
        ("pipe", "is a FIFO, where a file should be; give the Python file that trains."),
        ("run.yaml", "has no section `script:`; `shoal train run.yaml` trains it."),
    ],
)
def test_what_is_no_script_is_said_in_one_sentence(script: ScriptRun, path: str, said: str) -> None:
    import os

    script.write("")
    (script.folder / "folder").mkdir()
    (script.folder / "folder" / "inside.py").touch()
    (script.folder / "train.sh").write_text("python train.py $@\n")
    (script.folder / "zeros").write_bytes(bytes(100))
    (script.folder / "run.yaml").write_text("name: a\ndata: {train: x}\ntrain: {steps: 3}\n")
    os.mkfifo(script.folder / "pipe")
    assert script.shoal("run", path) == WRONG_USAGE
    assert said in script.err
    assert script.err.count("\n") == 1
    assert not (script.folder / "runs").exists()


RUN_FILE = "name: demo\nscript: {path: train.py, args: [--lr, 1e-3]}\ntrack: {mlflow: false}\n"


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "run.yaml"),
        ("plan", "review", "run.yaml"),
        ("check", "run.yaml"),
        ("profile", "run.yaml"),
        ("swarm", "create", "run.yaml"),
        ("data", "look", "run.yaml"),
        ("sample", "demo"),
        ("checkpoint", "ls", "demo"),
        ("checkpoint", "export", "demo", "there"),
    ],
    ids=" ".join,
)
def test_a_verb_about_other_runs_refuses_a_script_in_one_sentence(script: ScriptRun, words: tuple[str, ...]) -> None:
    script.write("print(sys.argv[1:])")
    (script.folder / "run.yaml").write_text(RUN_FILE)
    if "demo" in words:
        assert script.shoal("run", "run.yaml") == 0
        assert "['--lr', '1e-3']" in script.out
    assert script.shoal(*words) == WRONG_USAGE, script.out + script.err
    assert "script" in script.err
    assert len(script.err.strip().splitlines()) == 1, script.err


def test_a_run_goes_on_as_it_was_and_refuses_to_be_another(script: ScriptRun) -> None:
    assert script.run("print(sys.argv[1:])", args=("a",)) == 0
    assert script.shoal("run", "--name", "demo", *QUICK, "train.py", "a") == 0
    assert "run demo is finished" in script.out
    assert script.shoal("run", "--name", "demo", *QUICK, "train.py", "b") == WRONG_USAGE
    assert "script.args was ['a'], now ['b']" in script.err
    assert script.shoal("run", *QUICK, "train.py", "b") == 0
    assert script.shoal("run", *QUICK, "train.py", "b") == 0
    assert sorted(path.name for path in (script.folder / "runs").iterdir()) == ["demo", "train", "train-2"]
    script.write("print('other')")
    assert script.shoal("resume", "demo", "script.args=[c]") == 0
    assert "the run goes on with other code than it was begun with (script" in script.err
