"""What the stages of a cut model save is a checkpoint as any other: verified, sampled, resumed from, put together."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import checkpoint
from shoal.checkpoint import ledger
from shoal.checkpoint.saving import SaveError
from shoal.checkpoint.store import Folder
from shoal.cli.main import main
from shoal.decide.auto import decide
from shoal.errors import CheckpointError, SpecError, TransientError
from shoal.guard.begin import write_spec
from shoal.journal.journal import Journal, records
from shoal.journal.rundir import RunDir
from shoal.spec.begun import differences
from shoal.spec.run import Run
from shoal.stages.layers import StageLayers
from shoal.stages.peer import Peer
from shoal.stages.states import saves_at
from tests.stages.test_layers import CPU, STEPS, trained
from tests.stages.test_layers import a_run as any_run
from tests.train.tiny import digest_of, make_data, train_on

CUT = {"swarm.stages": {"count": 2, "activations": "fp32"}}


def a_run(data: Path, **changes: Any) -> Run:
    """Of a model that can be sampled with the tokenizer of bytes."""
    return any_run(data, **{"model.vocab_size": 257, **changes})


@dataclass(frozen=True)
class Cut:
    """A run over two peers, as it lies on their disks; saved after step 3 and 6."""

    data: Path
    folders: list[Path]
    digests: list[str]

    def copy(self, to: Path) -> list[Path]:
        return [shutil.copytree(folder, to / f"stage-{i + 1}") for i, folder in enumerate(self.folders)]


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Cut:
    torch.set_num_threads(1)  # as the plain run: bits are compared
    folder = tmp_path_factory.mktemp("cut")
    data = make_data(folder / "data")
    run = a_run(data, **CUT)
    pond, _ = trained([1, 1], run, folder)
    folders = [folder / stage[0][:8] for stage in pond.layout]
    for there in folders:  # as `stage_peer` does
        write_spec(RunDir(there), run)
        Journal(there / "journal.jsonl").append("start", step=0)
    return Cut(data, folders, [pond.works[stage[0]].digest() for stage in pond.layout])


@pytest.fixture(scope="module")
def plain(cut: Cut, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return train_on(a_run(cut.data, **{"checkpoint.every": 3}), tmp_path_factory.mktemp("plain"), 1)


def said(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, str, str]:
    code = main([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_stage_has_checkpoints_that_the_verbs_know(cut: Cut, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in cut.folders:
        code, out, _ = said(capsys, "checkpoint", "ls", folder, "--json")
        assert (code, [(row["step"], row["good"]) for row in json.loads(out)]) == (0, [(3, True), (6, True)])
        assert said(capsys, "checkpoint", "verify", folder)[0] == 0
    code, _, err = said(capsys, "sample", f"{cut.folders[1]}", "--tokenizer", "byte")
    assert code == 78
    assert "holds stage 2 of 2 of a model cut over peers: make one run of all 2 by `shoal checkpoint join" in err
    assert err.count("\n") == 1


def test_joined_stages_are_a_run_that_is_sampled_exported_and_gone_on_with_to_the_bits_of_one_process(
    cut: Cut, plain: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = RunDir.of("tiny", tmp_path)
    code, out, err = said(capsys, "checkpoint", "join", *reversed(cut.folders), run_dir.path, "--step", "3")
    assert (code, err) == (0, "")
    assert out.startswith("step 3, ")
    assert said(capsys, "checkpoint", "diff", f"{run_dir.path}@3", f"{plain.path}@3")[0] == 0  # optimizers' state too
    sample = ["--tokenizer", "byte", "--max-tokens", "4", "--device", "cpu", "--json"]
    code, out, _ = said(capsys, "sample", "tiny", *sample, "--workspace", tmp_path)
    assert (code, json.loads(out)["step"]) == (0, 3)
    exported = ["checkpoint", "export", run_dir.path, tmp_path / "hf", "--tokenizer", "none"]
    assert said(capsys, *exported)[0] == 0
    assert not [r for r in records(run_dir.journal_file) if r["kind"] == "finished"]
    train_on(a_run(cut.data, **{"checkpoint.every": 3}), tmp_path, 1)
    started = [r for r in records(run_dir.journal_file) if r["kind"] == "start"][-1]
    assert started["resumed_from"] == 3
    assert digest_of(run_dir) == digest_of(plain)


def test_stages_go_on_from_the_checkpoint_of_one_process(cut: Cut, plain: RunDir, tmp_path: Path) -> None:
    run = a_run(cut.data, **CUT)
    for stage in (0, 1):
        folder = tmp_path / str(stage)
        shutil.copytree(plain.checkpoints, folder / "checkpoints")
        work = StageLayers(run, stage, folder, CPU)
        assert work.saved() == [0, 3, 6]
        work.load(6)
        assert work.digest() == cut.digests[stage]
        assert work._optimizers.taken == 6


def test_what_does_not_belong_together_is_not_joined(
    cut: Cut, plain: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = cut.copy(tmp_path)
    cases: list[tuple[list[Path | str], int, str]] = [
        ([one], 2, "stage 2 of 2 is missing"),
        ([one, plain.path], 2, "is a whole model already"),
        ([one, two, "--step", "5"], 78, "do not all have step 5: stage 1 has 3, 6; stage 2 has 3, 6"),
    ]
    for folders, code, words in cases:
        found = said(capsys, "checkpoint", "join", *folders[:2], tmp_path / "out", *folders[2:])
        assert found[0] == code, found
        assert words in found[2]
        assert not (tmp_path / "out").exists()
    assert said(capsys, "checkpoint", "join", one, two, tmp_path)[2].strip().endswith("name a new folder.")
    other = StageLayers(a_run(cut.data, **CUT, seed=4), 1, tmp_path / "other", CPU)
    other.save(6)
    found = said(capsys, "checkpoint", "join", one, tmp_path / "other", tmp_path / "out")
    assert found[0] == 2
    assert "is not of the same run as" in found[2]
    assert "seed was 3, now 4" in found[2]


def test_a_model_in_a_subspace_is_joined_as_the_plain_model_that_computes_the_same(
    cut: Cut, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(cut.data, **{"swarm.stages": {"count": 2, "rank": 8}})
    works = [StageLayers(run, stage, tmp_path / str(stage), CPU) for stage in (0, 1)]
    for work in works:
        work.save(5)
    code, _, err = said(capsys, "checkpoint", "join", tmp_path / "0", tmp_path / "1", tmp_path / "out")
    assert code == 0
    assert "only the weights are there" in err
    found = checkpoint.newest(tmp_path / "out" / "checkpoints")
    assert found is not None
    whole = checkpoint.read_full(found)
    for name, tensor in {**works[0].whole(), **works[1].whole()}.items():
        assert whole.pop(name).equal(tensor), name
    assert not whole


def test_a_stage_states_what_a_run_in_one_process_decides(cut: Cut, tmp_path: Path) -> None:
    """Else the one does not go on from the checkpoint of the other."""
    run = any_run(cut.data, **CUT)
    work = StageLayers(run, 0, tmp_path, CPU)
    work.save(5)
    found = checkpoint.newest(tmp_path / "checkpoints")
    assert found is not None
    plain = decide(any_run(cut.data), tmp_path, 1).run
    differ = differences(Run.model_validate(found.extra["spec"]), plain, auto_is_equal=True)
    assert [str(d) for d in differ if not d.safe] == []


def test_retention_is_that_of_the_run_file(cut: Cut, tmp_path: Path) -> None:
    told: list[tuple[str, dict[str, Any]]] = []
    run = a_run(cut.data, **CUT, **{"checkpoint.keep": 2, "checkpoint.keep_every": 4, "train.steps": 20})
    work = StageLayers(run, 0, tmp_path, CPU, lambda kind, **fields: told.append((kind, fields)))
    work.load(0)
    for step in (2, 4, 5, 6, 7):
        work.save(step)
    assert work.saved() == [0, 4, 6, 7]
    assert [(kind, fields["step"]) for kind, fields in told] == [("checkpoint", step) for step in (2, 4, 5, 6, 7)]
    again = StageLayers(run, 0, tmp_path, CPU)
    assert again.saved() == [0, 4, 6, 7]
    again.load(4)  # what came after it is history no more
    assert again.saved() == [0, 4]
    again.save(6)
    assert [str(name) for name in again._states._names.values()] == ["step-00000004-term-1", "step-00000006-term-2"]


def test_peers_save_at_the_steps_that_the_run_file_says(cut: Cut) -> None:
    def steps(**changes: Any) -> list[int]:
        run = a_run(cut.data, **{**CUT, "train.steps": 11, "checkpoint": {}, **changes})
        return [step for step in range(1, 12) if saves_at(run)(step)]

    assert steps(**{"swarm.stages": {"count": 2, "save_every": 5}}) == [5, 10, 11]
    assert steps(**{"checkpoint.every": 4}) == [4, 8, 11]
    assert steps(**{"checkpoint.every": 0}) == [11]
    assert steps(**{"checkpoint.every": 0, "checkpoint.keep_every": 3}) == [3, 6, 9, 11]
    with pytest.raises(SpecError, match=r"checkpoint\.every is 30 s, .*give a number of steps"):
        steps(**{"checkpoint.every": "30 s"})
    with pytest.raises(SpecError, match=r"checkpoint\.keep is 1"):
        steps(**{"checkpoint.keep": 1})


def test_a_damaged_checkpoint_is_set_aside_and_an_older_one_is_used(cut: Cut, tmp_path: Path) -> None:
    folder = cut.copy(tmp_path)[0]
    (file,) = folder.glob("checkpoints/step-00000006-*/rank-00000.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    run = a_run(cut.data, **CUT)
    with pytest.raises(TransientError, match=r"is damaged and will not be used again .*: start this peer again"):
        StageLayers(run, 0, folder, CPU).load(6)
    again = StageLayers(run, 0, folder, CPU)
    assert again.saved() == [0, 3]
    again.load(3)


def test_a_save_that_fails_is_told_and_only_the_last_one_must_succeed(
    cut: Cut, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    work = StageLayers(a_run(cut.data, **CUT), 0, tmp_path, CPU, lambda kind, **fields: told.append(kind))
    work.load(0)

    def full(*args: Any, **kwargs: Any) -> None:
        raise SaveError("the disk is full")

    monkeypatch.setattr("shoal.train.writers.save", full)
    work.save(3)
    assert told == ["checkpoint_failed"]
    assert work.saved() == [0]
    with pytest.raises(SaveError):
        work.save(STEPS)


def test_another_start_on_the_same_folder_ends_this_one(cut: Cut, tmp_path: Path) -> None:
    run = a_run(cut.data, **CUT)
    first, second = (StageLayers(run, 0, tmp_path, CPU) for _ in range(2))
    first.load(0)
    second.load(0)
    with pytest.raises(ledger.Fenced):
        first.save(3)
    second.save(3)
    assert second.saved() == [0, 3]


def test_a_plain_run_does_not_go_on_from_one_stage(cut: Cut, tmp_path: Path) -> None:
    stage = checkpoint.newest(Folder(cut.folders[0] / "checkpoints"))
    assert stage is not None
    with pytest.raises(CheckpointError, match="holds stage 1 of 2"):
        checkpoint.load(stage, {})


def test_a_state_has_its_number_even_when_the_peer_is_told_to_stop_while_it_is_taken() -> None:
    """Both change in the thread that computes: what is saved at a stop is not called another step's."""

    class Taking:
        def restore(self, step: int, state: bytes) -> None: ...
        def load(self, step: int) -> None: ...

    peer = Peer.__new__(Peer)
    peer.work, peer.steps, peer.at = Taking(), 9, 1  # type: ignore[assignment]
    peer._restore(5, b"")
    assert peer.at == 5
    peer._load(3)
    assert peer.at == 3
