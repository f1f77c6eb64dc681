"""The probe in a torch script: it sees the steps, and changes no bit of what the script makes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.journal.journal import records
from shoal.journal.pulse import Pulse
from shoal.journal.pulse_file import read_beat
from shoal.script.atomic_save import Saver
from shoal.script.probe import Probe
from shoal.script.recorder import Recorder
from tests.script.conftest import QUICK, ScriptRun
from tests.slow import some_slow

STEPS = 6
# Dropout, so that random numbers count; a loader with a process of its own; two optimizers; a gradient scaler.
LOOP = f"""
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
rank, world, out = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), sys.argv[1]
torch.manual_seed(rank)
if world > 1:
    dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 8))
net = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model
first, second = torch.optim.AdamW(model[0].parameters(), lr=1e-2), torch.optim.SGD(model[2].parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu")
loader = iter(DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=4, shuffle=True, num_workers=1))
for step in range({STEPS}):
    given = 0.0
    for micro in range(2):
        (x,) = next(loader)
        loss = (net(x) - x).square().mean() / 2
        scaler.scale(loss).backward()
        given += loss.item()
    scaler.step(first), scaler.step(second), scaler.update()
    first.zero_grad(), second.zero_grad()
    print("loss", given, flush=True)
    if rank == 0 and step == 3:
        torch.save(model.state_dict(), f"{{out}}/middle.pt")
if rank == 0:
    state = {{"model": model.state_dict(), "first": first.state_dict(), "second": second.state_dict()}}
    torch.save({{**state, "random": torch.get_rng_state()}}, f"{{out}}/final.pt")
if world > 1:
    dist.destroy_process_group()
"""


def made(script: ScriptRun, out: str, *options: str) -> dict[str, bytes]:
    """The files that the script has made."""
    (script.folder / out).mkdir()
    assert script.shoal("run", "--name", out, *QUICK, "guard.restarts=0", *options, "train.py", out) == 0, script.err
    return {path.name: path.read_bytes() for path in sorted((script.folder / out).iterdir())}


@pytest.mark.parametrize("processes", some_slow([1, 2], slow=[2]))
def test_the_probe_changes_no_bit_and_sees_each_step(script: ScriptRun, processes: int) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    script.write(LOOP)
    seen = made(script, "on", "--processes", str(processes))
    said = [float(line.split()[1]) for line in script.out.splitlines() if line.startswith("loss")]
    if processes == 1:  # by Python alone, without anything of Shoal
        (script.folder / "off").mkdir()
        subprocess.run([sys.executable, "train.py", "off"], check=True, capture_output=True)
        bare = {path.name: path.read_bytes() for path in sorted((script.folder / "off").iterdir())}
    else:
        bare = made(script, "off", "--processes", "2", "--no-probe")
    assert list(seen) == ["final.pt", "middle.pt"]  # and nothing beside them
    assert seen == bare
    journal = records(script.folder / "runs" / "on" / "journal.jsonl")
    steps = [record for record in journal if record["kind"] == "step"]
    assert sum(record.get("steps", 1) for record in steps) == steps[-1]["step"] == STEPS
    assert steps[-1]["loss"] == pytest.approx(said[-1], abs=1e-6)  # not the scaled one
    assert (steps[-1]["micro_batches"], steps[-1]["lr"]) == (2, 1e-2)
    saves = [record for record in journal if record["kind"] == "checkpoint"]
    assert [(Path(save["path"]).name, save["step"]) for save in saves] == [("middle.pt", 4), ("final.pt", STEPS)]
    assert saves[1]["keys"] == ["model", "first", "second", "random"]
    assert saves[1]["bytes"] == len(seen["final.pt"])


def test_a_hang_after_some_steps_names_the_rank_that_does_not_come(script: ScriptRun) -> None:
    text = """
    rank, again = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    if again:
        sys.exit(0)
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    def does_not_come():
        threading.Event().wait()
    for step in range(10):
        if step == 6 and rank == 1:
            does_not_come()
        weight.sum().backward()
        dist.all_reduce(weight.grad)
        optimizer.step()
    """
    assert script.run(text, "--processes", "2", "guard.hang=5s") == 0, script.log()
    hang = script.one("hang")
    assert (hang["rank"], hang["step"]) == (1, 7)
    assert any(frame.endswith("does_not_come") for frame in hang["stack"]), hang
    assert "all_reduce" in Path(hang["stacks"]).read_text()


class Optimizer:
    param_groups = ({"lr": 0.1},)


@pytest.mark.parametrize(
    ("order", "steps"),
    [("aaaa", 4), ("abababab", 4), ("abbbabbb", 6), ("aaabbbb", 6), ("abcabc", 2)],
    ids=["one", "in turns", "one more often", "one after the other", "three"],
)
def test_of_several_optimizers_the_steps_of_one_count(tmp_path: Path, order: str, steps: int) -> None:
    probe = Probe(Pulse(tmp_path, 0), None, Saver("run-0"), 0)
    optimizers = {name: Optimizer() for name in order}
    for name in order:
        probe._after_step(optimizers[name], (), {})
    assert probe._step == steps


def test_what_only_some_ranks_do_is_a_phase_and_no_mark(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path, 0)
    pulse.mark("forward", 3, marks=3072)
    pulse.mark("save", marks=3072)
    beat = read_beat(tmp_path, 0)
    assert beat is not None
    assert (beat.phase, beat.marks, beat.step) == ("save", 3072, 3)


def test_a_save_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    place = tmp_path / "model.pt"
    place.write_text("old")
    place.chmod(0o640)
    (tmp_path / ".shoal-save-run-0-left").mkdir()  # by a process that was killed

    def fails(file: str) -> None:
        Path(file).write_text("ha")
        raise RuntimeError("no space")

    saver = Saver("run-0")
    with pytest.raises(RuntimeError, match="no space"):
        saver.save(fails, str(place))
    assert (place.read_text(), [path.name for path in tmp_path.iterdir()]) == ("old", ["model.pt"])
    names = []
    saver.save(lambda file: (names.append(Path(file).name), Path(file).write_text("new")), str(place))
    assert (place.read_text(), names) == ("new", ["model.pt"])
    assert place.stat().st_mode & 0o777 == 0o640
    link = tmp_path / "latest.pt"
    link.symlink_to(place)
    saver.save(lambda file: (names.append(Path(file).name), Path(file).write_text("newer")), str(link))
    assert (link.is_symlink(), place.read_text(), names[-1]) == (True, "newer", "latest.pt")
    with pytest.raises(FileNotFoundError):
        saver.save(lambda file: Path(file).write_text("x"), str(tmp_path / "nowhere" / "x.pt"))
    saver.save(lambda file: Path(file).write_text("x"), "/dev/null")


def test_a_script_that_takes_the_journals_file_number_is_not_written_into(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "journal.jsonl", 0)
    saved = tmp_path / "model.pt"
    saved.touch()
    recorder.saved(1, str(saved), 0.0, [])
    assert recorder._journal is not None
    number = recorder._journal.fileno()
    theirs = os.open(tmp_path / "theirs", os.O_CREAT | os.O_WRONLY)
    os.dup2(theirs, number)
    recorder.saved(2, str(saved), 0.0, [])
    assert (tmp_path / "theirs").read_bytes() == b""
    assert [record["step"] for record in records(tmp_path / "journal.jsonl")] == [1, 2]
    os.close(theirs)


def test_steps_of_a_millisecond_share_a_record(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "journal.jsonl", 0)
    for step in range(1, 101):
        recorder.step(step, 0.5, {"t": 1000.0 + step / 1000, "begin": 1000.0 + (step - 1) / 1000})
    recorder.rest()
    found = records(tmp_path / "journal.jsonl")
    assert len(found) < 8
    assert sum(record.get("steps", 1) for record in found) == 100
    assert [a["t"] for a in found[:-1]] == pytest.approx([b["begin"] for b in found[1:]])


def test_a_defect_of_the_probe_does_not_end_the_training(script: ScriptRun) -> None:
    text = """
    import types
    fake = types.ModuleType("torch")
    import shoal.script.probe as probe
    probe.begin_here().hook(fake)
    print("goes on")
    """
    assert script.run(text, "guard.restarts=0") == 0
    assert "shoal: the probe ends (" in script.out
    assert "goes on" in script.out
