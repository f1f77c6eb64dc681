"""A batch on this machine: every unit is done once, whatever becomes of units, of the runner and of its machine."""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.journal.journal import records
from shoal.journal.units import Folder
from tests.batch.place import Place, once_each
from tests.guard.fake import until

UNITS = 200


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_WORKSPACE", str(tmp_path))
    return Place(tmp_path)


SEEDED = """\
echo "this is $1, attempt $SHOAL_UNIT_ATTEMPT of $SHOAL_UNITS"
case $1 in
  20|41|62) [ "$SHOAL_UNIT_ATTEMPT" -ge 2 ] || exit 9 ;;
  50) echo "shoal: no such shard" >&2; exit 78 ;;
  51) echo "wrong option" >&2; exit 2 ;;
  60) kill -9 $$ ;;
  70) ulimit -v 100000; exec PYTHON -S -c 'bytearray(1 << 30)' ;;
  80) sleep 60 & wait ;;
  90) exit 0 ;;
  100) exec PYTHON -S -c 'raise KeyError("no such row")' ;;
esac
echo made >"out-$1"
"""


def test_two_hundred_units_of_which_some_fail_each_in_its_own_way(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    place.command(SEEDED.replace("PYTHON", sys.executable))
    (place.folder / "out-90").mkdir()  # which is there, and then is not
    (place.folder / "out-90").rmdir()
    words = ("--at-once", "4", "--timeout", "3 s", "--retries", "2", "--outputs", "out-{index}")
    assert place.batch(UNITS, *words) == 78
    causes = {50: "data", 51: "user-error", 60: "killed", 70: "host-memory", 80: "timeout", 90: "no-output"}
    causes |= {100: "exception"}
    good = set(range(UNITS)) - causes.keys()
    assert place.ends("done") == once_each(good)
    # Codes 2 and 78 are not tried again, others so often as batch.retries says.
    tries = Counter(dict.fromkeys(good, 1)) + Counter(dict.fromkeys(causes, 3) | {50: 1, 51: 1})
    tries |= Counter({20: 3, 41: 3, 62: 3})
    assert Counter(place.noted()) == tries
    assert place.noted("clashes") == []
    last = {r["unit"]: r for r in place.records("unit_ended") if r.get("final")}
    assert {unit: r["cause"] for unit, r in last.items()} == causes
    assert (last[60]["signal"], last[100]["evidence"]) == ("SIGKILL", "KeyError: 'no such row'")
    assert [r["exit_code"] for r in place.records("unit_ended") if r["unit"] == 20] == [9, 9, 0]
    tally = place.page()["units"]
    assert (tally["done"], tally["failed"], tally["waiting"], tally["attempts"]) == (193, 7, 0, sum(tries.values()))
    close = records(place.run_dir.journal_file)[-1]
    assert (close["kind"], close["status"], close["exit_code"]) == ("close", "failed", 78)
    first = "193 of 200 units done, 7 failed (unit 50 was given bad data; unit 51 was called wrongly; "
    assert close["reason"].startswith(first)

    capsys.readouterr()
    for words in (["ps"], ["ps", "b"], ["report", "b"], ["stop", "b"], ["logs", "b", "--unit", "100"]):
        assert main(words) == 0
    said = capsys.readouterr().out
    assert "193/200" in said
    assert "failed     unit 60: killed, 3 times tried: ended by SIGKILL" in said
    assert "why        timeout, of 1 unit: give a unit more time (batch.timeout)" in said
    assert "run b is not running: 193 of 200 units done" in said
    assert "[100] KeyError: 'no such row'" in said
    assert main(["logs", "b", "--unit", "20", "--attempt", "0"]) == 0
    assert capsys.readouterr().out == "[20] this is 20, attempt 0 of 200\n"

    # What failed is tried again when a person says so, and nothing else.
    before = Counter(place.noted())
    place.command('echo made >"out-$1"\n')
    assert main(["resume", "b", "batch.timeout=30 s"]) == 0
    assert Counter(place.noted()) - before == once_each(causes)
    assert place.ends("done") == once_each(range(UNITS))
    assert main(["resume", "b"]) == 0
    assert sum(Counter(place.noted()).values()) == sum(before.values()) + len(causes)
    assert "batch b is finished: all 200 units are done" in capsys.readouterr().out


def test_a_runner_that_is_killed_again_and_again_does_no_done_unit_twice_and_none_twice_at_a_time(
    place: Place,
) -> None:
    # Each unit has a child that outlives a killed shell: it must be gone before the unit begins again.
    place.command('(sleep 0.02; echo "$1" >>worked) & wait $!\n')
    words, pace, seen = place.words(UNITS, "--at-once", "4"), random.Random(5), 0
    for _ in range(4):
        runner = place.start(*words)
        seen += pace.randrange(5, 30)
        until(lambda wanted=seen: len(place.noted()) >= wanted, within_s=120)
        runner.kill()
        runner.wait()
        words = ["resume", "b"]
    assert main(["resume", "b"]) == 0
    assert place.noted("clashes") == []
    assert place.ends("done") == once_each(range(UNITS))
    # What was under way at a kill was begun again, and nothing else: every begin is accounted for.
    assert Counter(place.noted()) <= place.ends("done") + place.ends("lost")
    assert 0 < len(place.ends("lost")) <= 4 * 4
    done_at: dict[int, float] = {}
    for record in place.records():
        if record["kind"] == "unit_began":
            assert record["unit"] not in done_at, "it was done"
        elif record["outcome"] == "done":
            done_at[record["unit"]] = record["t"]
    ends = [r["status"] for r in records(place.run_dir.journal_file) if r["kind"] == "close"]
    assert ends == ["done"]


def test_a_stop_ends_the_units_and_costs_them_no_retry(place: Place) -> None:
    place.command("[ -e go ] || { sleep 60 & wait; }\n")
    runner = place.start(*place.words(6, "--at-once", "2", "--retries", "0"))
    until(lambda: len(place.noted()) == 2, within_s=120)
    assert main(["stop", "b"]) == 0
    assert runner.wait() == 143
    assert place.ends("stopped") == once_each([0, 1])
    assert place.page()["units"]["failed"] == 0
    (place.folder / "go").touch()
    assert main(["resume", "b"]) == 0
    assert place.ends("done") == once_each(range(6))


def test_units_are_begun_in_their_order_and_not_more_at_once_than_asked(place: Place) -> None:
    place.command('echo x >"at-$1"; ls at-* | wc -l >>many; sleep 0.02; rm "at-$1"\n')
    assert place.batch(20, "--at-once", "1") == 0
    assert place.noted() == list(range(20))
    assert set(place.noted("many")) == {1}


def test_items_are_the_runs_own_from_the_begin(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    odd = ["plain", "with space", 'quote"s', "$HOME; rm -rf x", "{index}", "ünïcode", "-n"]
    (place.folder / "items.txt").write_text("\n".join(odd) + "\n\n")
    command = ["sh", "-c", 'printf "%s|%s|%s\\n" "$1" "$SHOAL_ITEM" "$2" >>said', "sh", "{item}", "n{index:03}"]
    assert main(["batch", "--name", "b", "--items", "items.txt", "--at-once", "1", "--", *command]) == 0
    said = (place.folder / "said").read_text().splitlines()
    assert said == [f"{item}|{item}|n{number:03}" for number, item in enumerate(odd)]
    (place.folder / "items.txt").write_text("others\n")

    def as_if_the_last_were_not_over() -> None:
        Folder(place.run_dir).done(6).unlink()
        Folder(place.run_dir).records(6).unlink()

    as_if_the_last_were_not_over()
    assert main(["resume", "b"]) == 0
    assert (place.folder / "said").read_text().splitlines() == [*said, "-n|-n|n006"]
    Folder(place.run_dir).items_file.write_text("plain\n")
    as_if_the_last_were_not_over()
    assert main(["resume", "b"]) == 78
    assert "has changed since the batch began" in capsys.readouterr().err


def test_what_is_secret_is_in_no_record(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "hush-hush")
    monkeypatch.setenv("SHOAL_TOKEN", "of the agents")
    place.command('echo "got $TOKEN http://me:hush-hush@host" >&2; [ -z "$SHOAL_TOKEN" ]; exit 3\n')
    assert place.batch(1, "--retries", "0") == 78
    for path in (place.run_dir.path / "units" / "blocks").iterdir():
        assert "me:hush-hush@" not in path.read_text()
    assert "hush-hush" not in place.run_dir.journal_file.read_text()


def test_the_keeper_ends_units_whose_runner_is_gone_or_silent(place: Place) -> None:
    import subprocess
    import sys

    from shoal.batch import leftovers

    env = {**os.environ, "SHOAL_BATCH_RUNNER": "0-abc"}
    units = [subprocess.Popen(["sh", "-c", "sleep 600 & wait"], env=env, start_new_session=True) for _ in range(2)]
    other = subprocess.Popen(["sleep", "600"], env={**os.environ, "SHOAL_BATCH_RUNNER": "0-abcd"})
    command = [sys.executable, "-I", "-S", str(Path(leftovers.__file__)), "0-abc"]
    until(lambda: len(leftovers.of_runners([b"0-abc"])) == 4, within_s=60)
    silent = subprocess.Popen([*command, "0.05"], stdin=subprocess.PIPE)  # a runner that stands still
    assert silent.wait() == 0
    assert [unit.wait() for unit in units] == [-signal.SIGKILL] * 2
    assert leftovers.of_runners([b"0-abc"]) == []
    assert other.poll() is None
    other.kill()
    other.wait()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--", "true"], 2, "how many units? Give --units N, or --items FILE with one unit a line."),
        (["--units", "3", "--", "nosuch"], 78, "there is no program nosuch here"),
        (["--units", "3", "--", "./plain"], 78, "may not be executed; `chmod +x` it"),
        (["--units", "0", "--", "true"], 2, "batch.units"),
        (["--units", "3", "--", "echo", "{item}"], 2, "there is no batch.items; set it, or use {index}"),
        (["--units", "3", "--items", "i", "--", "true"], 2, "both say how many units there are"),
        (["--units", "3", "--outputs", "out", "--", "true"], 2, "is the same file for every unit"),
        (["--units", "3", "--timeout", "soon", "--", "true"], 2, "a time such as"),
        (["--units", "3", "--at-once", "5000", "--", "true"], 2, "one node runs at most 4,096"),
        (["--units", "3", "guard.restarts=5", "--", "true"], 2, "it is batch.retries of a batch; set that"),
        (["--units", "3", "train.steps=5", "--", "true"], 2, "a batch runs your command and trains nothing itself"),
        (["--units", "3", "batch.env={SHOAL_UNIT: 5}", "--", "true"], 2, "is what Shoal tells each unit"),
        (["--units", "3", "batch.folder=nowhere", "--", "true"], 2, "is no folder here"),
        (["--items", "nofile", "--", "true"], 78, "which cannot be read (No such file or directory)"),
        (["--items", "empty", "--", "true"], 78, "has no line with an item in it"),
        (["--items", "bytes", "--", "true"], 78, "is no UTF-8"),
        (["--items", "zero", "--", "true"], 78, "has zero bytes"),
        (["--items", "long", "--", "true"], 78, "line 2 has 40,000 characters"),
        (["--items", "fifo", "--", "true"], 78, "is a FIFO, where a file should be"),
        (["--items", ".", "--", "true"], 78, "is a folder, where a file should be"),
    ],
)
def test_mistakes_get_one_sentence_and_leave_no_run(
    place: Place, words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (place.folder / "empty").write_text("\n\n")
    (place.folder / "bytes").write_bytes(b"a\n\xff\n")
    (place.folder / "zero").write_bytes(b"a\0b\n")
    (place.folder / "long").write_text("a\n" + "b" * 40_000 + "\n")
    (place.folder / "plain").write_text("no program")
    os.mkfifo(place.folder / "fifo")
    assert main(["batch", "--name", "b", *words]) == code
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not place.run_dir.path.exists()


def test_another_batch_under_the_same_name_is_refused(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.command("")
    assert place.batch(3) == 0
    assert place.batch(4) == 2
    assert "batch.units was 3, now 4" in capsys.readouterr().err
    assert main(["resume", "b", "batch.units=4"]) == 2
    assert "that would break the history of run 'b'" in capsys.readouterr().err
    assert main(["train", str(place.run_dir.spec_file)]) == 0  # the same run: there is nothing left to do
    for words in (["sample", "b"], ["report", "b", "b2"], ["logs", "b", "--rank", "0"], ["logs", "b", "--unit", "9"]):
        assert main(words) in (2, 78)
    assert place.batch(4, "--fresh") == 0


def test_a_run_file_says_the_same(place: Place) -> None:
    place.command('echo "$SHOAL_ITEM" >>said\n')
    batch = {"command": ["sh", "unit.sh", "{index}"], "items": ["a", 7, "c"], "env": {"LEVEL": 3}, "timeout": "1 min"}
    (place.folder / "b.yaml").write_text(json.dumps({"name": "b", "batch": batch}))
    assert main(["batch", "--at-once", "1", "b.yaml"]) == 0
    assert (place.folder / "said").read_text().split() == ["a", "7", "c"]
