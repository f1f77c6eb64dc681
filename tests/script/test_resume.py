"""A restart goes on from the newest checkpoint of the script that is whole, in the script's own way; else anew."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from pathlib import Path

import pytest

from shoal.script.checkpoints import written
from shoal.script.finished import Folder, unfinished
from shoal.script.whole import problem
from tests.script.conftest import ScriptRun

SAVES = """
import zipfile
def save(name, half=False):
    with zipfile.ZipFile(name, "w") as archive:
        archive.writestr("model/data.pkl", b"x" * 5000)
    if half:
        os.truncate(name, 3000)
print("arguments", sys.argv[1:], flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.makedirs("out", exist_ok=True)
    save("out/step-1.pt")
    os.utime("out/step-1.pt", (time.time() + 1, time.time() + 1))
    save("out/step-2.pt", half=True)
    os.utime("out/step-2.pt", (time.time() + 2, time.time() + 2))
    sys.exit(1)
"""
RESUME = ("--resume", "--from '{checkpoint}' --go", "--checkpoints", "out/*.pt")


def test_a_half_written_checkpoint_is_not_used(script: ScriptRun) -> None:
    assert script.run(SAVES, *RESUME, args=("a",)) == 0
    whole, half = (str(script.folder / "out" / f"step-{n}.pt") for n in (1, 2))
    assert "arguments ['a']\n" in script.log(0)
    assert f"arguments ['a', '--from', '{whole}', '--go']\n" in script.log(1)
    assert script.one("failure")["action"] == f"restart 1 of 3 from {whole} in 0.01 s"
    (said,) = [record["text"] for record in script.records("warning")]
    assert said.startswith(f"checkpoint {half} is not used: it is half-written or damaged (")
    decision = next(record for record in script.records("decision") if record["key"] == "script.resume")
    assert decision["value"] == whole
    assert script.records("start")[1]["path"] == whole


def test_a_checkpoint_from_before_the_run_is_none_of_its_own(script: ScriptRun) -> None:
    (script.folder / "out").mkdir()
    with zipfile.ZipFile(script.folder / "out" / "old.pt", "w") as archive:
        archive.writestr("x", b"x")
    os.utime(script.folder / "out" / "old.pt", (1e9, 1e9))
    fails = "sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')"
    assert script.run(fails, *RESUME) == 0
    assert script.one("failure")["action"] == "restart 1 of 3 anew (there is no whole checkpoint) in 0.01 s"
    assert "begins anew: there is no whole checkpoint of this run" in script.one("warning")["text"]


def test_resume_goes_on_as_a_restart_does(script: ScriptRun) -> None:
    assert script.run(SAVES, *RESUME, "guard.restarts=0") == 1
    assert script.shoal("resume", "demo") == 0
    assert str(script.folder / "out" / "step-1.pt") in script.log(1)


def test_only_a_restart_knows_its_checkpoint(script: ScriptRun) -> None:
    assert script.run("", args=("--from", "{checkpoint}")) == 2
    assert "script.args has {checkpoint}, which is known at a restart alone; move it to script.resume" in script.err


def archive(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as made:
        for name in names or ("model/data.pkl", "model/data/0"):
            made.writestr(name, os.urandom(2000))
    return path


def tensors(path: Path) -> Path:
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    return path


def test_whole_files_are_whole(tmp_path: Path) -> None:
    assert problem(archive(tmp_path / "a.pt")) is None
    assert problem(tensors(tmp_path / "model.safetensors")) is None
    (tmp_path / "trainer_state.json").write_text("{}")
    (tmp_path / ".shoal-save-x").mkdir()
    (tmp_path / ".shoal-save-x" / "half.pt").write_bytes(b"PK")
    assert problem(tmp_path) is None


@pytest.mark.parametrize("kept", [0, 3, 30, 1000, 2500, 4200])
def test_a_file_that_was_cut_anywhere_is_not_whole(tmp_path: Path, kept: int) -> None:
    path = archive(tmp_path / "a.pt")
    os.truncate(path, kept)
    assert problem(path) is not None


def test_damage_is_said_in_words(tmp_path: Path) -> None:
    flipped = archive(tmp_path / "a.pt")
    data = bytearray(flipped.read_bytes())
    data[500] ^= 1
    flipped.write_bytes(data)
    assert problem(flipped) == "is damaged (the checksum of model/data.pkl is wrong)"
    short = tensors(tmp_path / "b.safetensors")
    os.truncate(short, short.stat().st_size - 1)
    assert "and its header says" in str(problem(short))
    (tmp_path / "c.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    assert problem(tmp_path / "c.safetensors") == "has no whole header"
    (tmp_path / "d.pt").write_bytes(b"\x80\x02}q\x00.")
    assert "cannot be verified" in str(problem(tmp_path / "d.pt"))
    assert "cannot be read (No such file" in str(problem(tmp_path / "none.pt"))
    os.mkfifo(tmp_path / "pipe.pt")
    assert "is a FIFO" in str(problem(tmp_path / "pipe.pt"))


def test_a_folder_is_as_whole_as_its_parts(tmp_path: Path) -> None:
    assert "so nobody can tell" in str(problem(tmp_path))
    tensors(tmp_path / "model-1.safetensors")
    index = {"weight_map": {"w": "model-1.safetensors", "v": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "names model-2.safetensors, which is not there" in str(problem(tmp_path))
    tensors(tmp_path / "model-2.safetensors")
    assert problem(tmp_path) is None
    os.truncate(archive(tmp_path / "optimizer.pt"), 100)
    assert str(problem(tmp_path)).startswith("is not whole: optimizer.pt is half-written")


def test_a_folder_of_a_framework_has_what_is_written_last(tmp_path: Path) -> None:
    archive(tmp_path / "__0_0.distcp")
    assert ".metadata, which torch.distributed.checkpoint writes last, is not in" in str(problem(tmp_path))
    (tmp_path / ".metadata").write_bytes(b"x")
    assert problem(tmp_path) is None
    inner = tmp_path / "pytorch_model_fsdp_0"
    inner.mkdir()
    archive(inner / "__0_0.distcp")
    assert "is not in pytorch_model_fsdp_0" in str(problem(tmp_path))
    archive(inner / "__1_0.distcp")
    (inner / "__0.metadata").write_bytes(b"x")
    assert "is not in pytorch_model_fsdp_0" in str(problem(tmp_path))
    (inner / "__1.metadata").write_bytes(b"x")  # as without collectives
    assert problem(tmp_path) is None


FOLDERS = """
import zipfile
def save(name):
    with zipfile.ZipFile(name, "w") as archive:
        archive.writestr("model/data.pkl", b"x" * 500)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    for step, files in ((8, ("model.pt", "random_0.pt", "zero_1.pt")), (16, ("model.pt", "zero_0.pt"))):
        os.makedirs(f"out/step-{step}")
        for file in files:
            save(f"out/step-{step}/{file}")
            os.utime(f"out/step-{step}/{file}", (time.time() + step, time.time() + step))
    sys.exit(1)
"""


def test_a_folder_that_lacks_what_an_older_one_has_is_not_used(script: ScriptRun) -> None:
    assert script.run(FOLDERS, "--resume", "{checkpoint}", "--checkpoints", "out/*") == 0
    assert script.records("start")[1]["path"] == str(script.folder / "out" / "step-8")
    (said,) = [record["text"] for record in script.records("warning")]
    assert said.endswith("step-16 is not used: it is not whole: it has no random_N.pt, and step-8 has")


class Folders:
    """Checkpoints of a script, the oldest first: each is made by the so many-th start of its processes."""

    def __init__(self, at: Path) -> None:
        self._at = at
        self._made: list[Folder] = []

    def add(self, *files: str, start: int = 0, world: int = 2) -> None:
        path = self._at / f"c{10 * len(self._made) + 10}"
        for file in files:
            (path / file).parent.mkdir(parents=True, exist_ok=True)
            (path / file).write_bytes(b"x")
        self._made.append(Folder(path, start, world))

    @property
    def unfinished(self) -> dict[str, str]:
        return {path.name: said for path, said in unfinished(self._made[::-1]).items()}


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path)


def test_two_halves_do_not_make_each_other_whole(folders: Folders) -> None:
    folders.add("model.pt", "optim.pt")
    folders.add("model.pt")  # killed
    folders.add("model.pt", start=1)  # and again
    assert folders.unfinished == {
        "c20": "is not whole: it has no optim.pt, and c10 has",
        "c30": "is not whole: it has no optim.pt, and c10 has",
    }


def test_a_script_that_writes_less_from_now_on_is_believed_in_the_end(folders: Folders) -> None:
    """Else a run that is killed after each save would never get on."""
    folders.add("model.pt", "scaler.pt")
    for start in range(1, 5):
        folders.add("model.pt", start=start)
    assert folders.unfinished.keys() == {"c20", "c30"}


def test_a_folder_without_all_ranks_is_unfinished(folders: Folders) -> None:
    for _ in range(2):
        folders.add("model_0.pt", "model_1.pt", "zero/rank_0_optim.pt", "zero/rank_1_optim.pt")
    folders.add("model_0.pt", "zero/rank_0_optim.pt", start=1, world=1)  # on one process: that is all of them
    folders.add("model_0.pt", "model_1.pt", "zero/rank_0_optim.pt", start=2)
    assert folders.unfinished == {"c40": "is not whole: it has 1 of 2 files zero/rank_N_optim.pt, and c20 has"}


def test_what_is_no_state_may_come_and_go(folders: Folders) -> None:
    folders.add("model.pt", "notes.txt", ".DS_Store", "run-a.json", "best.pt", "of-abc.pt")
    folders.add("model.pt", "metrics.json", "is_best", "run-b.json", "of-def.pt")
    folders.add("model.pt", "run-c.json", "of-ghi.pt")
    assert not folders.unfinished


def test_a_script_that_saves_again_had_finished_the_save_before(folders: Folders) -> None:
    folders.add("model.pt", "ema.pt")
    folders.add("model.pt")
    folders.add("model.pt")
    assert folders.unfinished.keys() == set()


def test_the_first_folder_of_the_trainer_has_its_state(folders: Folders) -> None:
    folders.add("model.safetensors", "training_args.bin")
    assert "trainer_state.json, which the Trainer of transformers writes last" in folders.unfinished["c10"]
    folders.add("model.safetensors", "training_args.bin", "optimizer.pt")  # an older script, without such a state
    assert folders.unfinished == {}
    folders.add("model.safetensors", "training_args.bin", "optimizer.pt", "trainer_state.json")
    folders.add("model.safetensors", "training_args.bin", "optimizer.pt", "trainer_state.json")
    folders.add("model.safetensors", "training_args.bin", "optimizer.pt", start=1)
    assert "it has no trainer_state.json, and c40 has" in folders.unfinished["c50"]


def test_what_was_written_deep_in_a_folder_is_seen(tmp_path: Path) -> None:
    """Else one that is known to be whole would be trusted after it was written over."""
    (tmp_path / "last" / "shards").mkdir(parents=True)
    file = archive(tmp_path / "last" / "shards" / "model.pt")
    times = []
    for at in (1000.0, 2000.0):
        os.utime(file, (at, at))
        for folder in (file.parent, file.parent.parent):
            os.utime(folder, (500.0, 500.0))
        times.append(written(str(tmp_path / "last")))
    assert times == [1000.0, 2000.0]


def test_a_folder_may_hold_exactly_as_many_files_as_are_borne(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.script.whole.MOST_FILES", 2)
    for name in "ab":
        archive(tmp_path / f"{name}.pt")
    assert problem(tmp_path) is None
    archive(tmp_path / "c.pt")
    assert problem(tmp_path) == "holds more than 2 files"
