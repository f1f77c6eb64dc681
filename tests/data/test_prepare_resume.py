"""Killed, stopped, out of disk, changed under its feet: a rerun ends with the bytes of an undisturbed run."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from shoal.cli.main import main
from tests.data.preparing import files_of, make_texts, read_texts, shoal, write_jsonl
from tests.patience import Stopwatch, limit

UNIT_BYTES = 20_000
TEXTS = make_texts(2500)  # about 40 units


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("corpus") / "a.jsonl", TEXTS)


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """By two workers, in a process of their own."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    with start(corpus, out) as p:
        _, err = p.communicate(timeout=limit(120))
    assert p.returncode == 0, err
    return files_of(out)


def start(corpus: Path, out: Path, *more: object, workers: int = 2, **options: object) -> subprocess.Popen[str]:
    arguments = ("data", "prepare", corpus, "--out", out, "--eval-fraction", 0.1, "--workers", workers, *more)
    return shoal(*arguments, unit_bytes=UNIT_BYTES, **options)


def finish(corpus: Path, out: Path, *more: object) -> str:
    """In this process, by itself: any number of workers writes the same bytes (test_prepare.py)."""
    arguments = ("data", "prepare", corpus, "--out", out, "--eval-fraction", 0.1, "--workers", 1, *more)
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.setattr("shoal.data.prepare.units.MIN_UNIT_BYTES", UNIT_BYTES)
        code = main([str(word) for word in arguments])
    assert code == 0, said.getvalue()
    return said.getvalue()


def records(out: Path) -> list[Path]:
    return list((out / ".prepare").glob("unit-*.json"))


def half_way(p: subprocess.Popen[str], out: Path) -> None:
    """Until some units are done. A run that is over by then would prove nothing."""
    watch = Stopwatch()
    while len(records(out)) < 4:
        assert p.poll() is None, "it ended before it could be disturbed"
        assert watch.quiet_s() < 60
        time.sleep(0.002)


def workers_of(p: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(p.pid).children()


def kill_the_parent(p: subprocess.Popen[str]) -> None:
    p.send_signal(signal.SIGKILL)


def kill_a_worker(p: subprocess.Popen[str]) -> None:
    workers_of(p)[0].kill()


def terminate(p: subprocess.Popen[str]) -> None:
    p.terminate()


def interrupt_the_group(p: subprocess.Popen[str]) -> None:
    os.killpg(p.pid, signal.SIGINT)  # what Ctrl-C does: the workers get it too


@pytest.mark.parametrize(
    ("disturb", "workers", "code", "sentence"),
    [
        (kill_the_parent, 2, -9, ""),
        (kill_the_parent, 1, -9, ""),
        (kill_a_worker, 2, 75, "a worker was killed by SIGKILL while it read"),
        (terminate, 2, 143, "stopped by SIGTERM: finished parts are kept; run the same command again to go on."),
        (terminate, 1, 143, "stopped by SIGTERM"),
        (interrupt_the_group, 2, 143, "stopped by SIGINT"),
    ],
)
def test_a_rerun_after_a_violent_end_gives_the_undisturbed_bytes(
    corpus: Path,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    disturb: Callable[[subprocess.Popen[str]], None],
    workers: int,
    code: int,
    sentence: str,
) -> None:
    out = tmp_path / "out"
    with start(corpus, out, workers=workers, start_new_session=True) as p:
        half_way(p, out)
        left = workers_of(p) if workers > 1 else []
        disturb(p)
        _, err = p.communicate(timeout=limit(60))
    assert p.returncode == code, err
    assert sentence in err
    assert len(err.splitlines()) <= 1  # no traceback, of parent or worker
    assert not list(out.glob("*/index.json"))
    # At once: the workers of a killed parent may still be alive, and must not write into what comes now.
    said = finish(corpus, out)
    assert "going on with what was begun" in said
    assert files_of(out) == undisturbed
    _, alive = psutil.wait_procs(left, timeout=limit(10))
    assert not alive


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seconds of work: it must not have ended by then."""
    return write_jsonl(tmp_path_factory.mktemp("long") / "long.jsonl", TEXTS * 20)


@pytest.mark.parametrize("wait_s", [0.0, 0.1, 0.3])
def test_ctrl_c_while_the_workers_start_says_one_sentence(long: Path, tmp_path: Path, wait_s: float) -> None:
    with start(long, tmp_path / "out", start_new_session=True) as p:
        watch = Stopwatch()
        while not workers_of(p):
            assert watch.quiet_s() < 60
            time.sleep(0.001)
        time.sleep(wait_s)
        interrupt_the_group(p)
        _, err = p.communicate(timeout=limit(60))
    assert p.returncode == 143, err
    assert err.startswith("shoal: stopped by SIGINT: ")
    assert len(err.splitlines()) == 1


def test_killed_again_and_again_it_still_gets_there(
    corpus: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = 0
    for _ in range(3):
        with start(corpus, out) as p:
            while len(records(out)) < done + 5:
                assert p.poll() is None
                time.sleep(0.002)
            p.kill()
        assert len(records(out)) >= done + 5  # what was finished before is kept
        done = len(records(out))
    finish(corpus, out)
    assert files_of(out) == undisturbed


@pytest.mark.parametrize("change", ["input", "option"])
def test_another_input_or_option_starts_over_and_says_so(
    corpus: Path, undisturbed: dict[str, bytes], tmp_path: Path, change: str
) -> None:
    mine = tmp_path / "a.jsonl"
    mine.write_bytes(corpus.read_bytes() if change == "option" else corpus.read_bytes() + b'{"text": "one more"}\n')
    out = tmp_path / "out"
    with start(mine, out, *(["--shard-tokens", 300] if change == "option" else [])) as p:
        half_way(p, out)
        p.terminate()
    if change == "input":
        mine.write_bytes(corpus.read_bytes())
    said = finish(mine, out)
    assert "the input or the options have changed" in said
    assert {name: data for name, data in files_of(out).items() if not name.endswith("index.json")} == {
        name: data for name, data in undisturbed.items() if not name.endswith("index.json")
    }


def test_two_at_once_do_not_write_into_one_folder(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with start(corpus, out) as first:
        half_way(first, out)
        first.send_signal(signal.SIGSTOP)
        for worker in workers_of(first):
            worker.suspend()
        try:
            with start(corpus, out) as second:
                _, err = second.communicate(timeout=limit(60))
            assert second.returncode == 78
            assert "another `shoal data prepare` is writing to" in err
        finally:
            for worker in workers_of(first):
                worker.resume()
            first.send_signal(signal.SIGCONT)
        assert first.wait(timeout=limit(120)) == 0
    assert sorted(read_texts(out / "train") + read_texts(out / "eval")) == sorted(TEXTS)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_one_sentence_and_a_rerun_goes_on(
    corpus: Path, undisturbed: dict[str, bytes], tmp_path: Path, workers: int
) -> None:
    """A real small file system where one can be mounted; elsewhere a limit on the size of files, which fails alike."""
    out = tmp_path / "disk" / "out"
    out.parent.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", out.parent], capture_output=True)
    small = mounted.returncode == 0
    try:
        quota = None if small else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, 8_000))
        with start(corpus, out, workers=workers, preexec_fn=quota) as p:
            _, err = p.communicate(timeout=limit(120))
        assert p.returncode == 78, err
        assert "there is no room left to write" in err
        assert "run the same command again: it goes on where it stopped" in err
        assert len(err.splitlines()) == 1
        if small:
            assert records(out)
            subprocess.run(["mount", "-o", "remount,size=64m", out.parent], check=True)
        finish(corpus, out)
        assert files_of(out) == undisturbed
    finally:
        if small:
            subprocess.run(["umount", out.parent], check=True)


def test_a_folder_that_may_not_be_written_to_is_named(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with start(corpus, tmp_path / "file" / "out") as p:
        _, err = p.communicate(timeout=limit(60))
    assert p.returncode == 78
    assert "cannot be written" in err
