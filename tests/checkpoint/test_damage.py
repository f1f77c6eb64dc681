"""Whatever is wrong with the newest checkpoint is noticed, said, and the newest good one is used instead."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.ranks import run_ranks

from shoal import checkpoint
from shoal.checkpoint import manifest as manifests
from shoal.errors import CheckpointError

FILE = "rank-00000.safetensors"


def state(value: float) -> dict[str, torch.Tensor]:
    matrix, vector, scalar = torch.full((40, 5), float(value)), torch.full((7,), float(value)), torch.tensor(int(value))
    return {"model.w": matrix, "model.b": vector, "count": scalar}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1, 2 and 3, where the tensors of step n hold n."""
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, state(step), {"step": step}, piece_bytes=200)
    return tmp_path


def restored(root: Path) -> tuple[int, str]:
    """(the step that was loaded, what was said about newer ones)"""
    tensors = state(0)
    found = checkpoint.restore(root, tensors)
    assert found is not None
    assert found.extra == {"step": found.step}
    assert all((t == found.step).all() for t in tensors.values()), "tensors of more than one checkpoint"
    return found.step, "; ".join(map(str, found.skipped))


def newest_folder(root: Path) -> Path:
    return root / "step-00000003"


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def flip_data(folder: Path) -> None:
    flip(folder / FILE, (folder / FILE).stat().st_size * 8 - 100)


def flip_header(folder: Path) -> None:
    flip(folder / FILE, 8 * 20)


def truncate(folder: Path) -> None:
    with open(folder / FILE, "r+b") as f:
        f.truncate(f.seek(0, 2) - 1)


def append(folder: Path) -> None:
    with open(folder / FILE, "ab") as f:
        f.write(b"x")


def delete_file(folder: Path) -> None:
    (folder / FILE).unlink()


def delete_manifest(folder: Path) -> None:
    (folder / manifests.MANIFEST).unlink()


def garble_manifest(folder: Path) -> None:
    (folder / manifests.MANIFEST).write_text("{ not json")


def empty_manifest(folder: Path) -> None:
    (folder / manifests.MANIFEST).write_bytes(b"")


def change_manifest(folder: Path) -> None:
    path = folder / manifests.MANIFEST
    path.write_text(path.read_text().replace('"extra":{"step":3}', '"extra":{"step":9}'))


def take_file_of_another_step(folder: Path) -> None:
    shutil.copy(folder.parent / "step-00000002" / FILE, folder / FILE)


def take_manifest_of_another_step(folder: Path) -> None:
    shutil.copy(folder.parent / "step-00000002" / manifests.MANIFEST, folder / manifests.MANIFEST)


def put_a_folder_in_place_of_the_file(folder: Path) -> None:
    (folder / FILE).unlink()
    (folder / FILE).mkdir()


DAMAGES: dict[Callable[[Path], None], str] = {
    flip_data: "checksum does not match",
    flip_header: "another header",
    truncate: "bytes where",
    append: "bytes where",
    delete_file: f"{FILE} is missing",
    delete_manifest: "no manifest.json",
    garble_manifest: "manifest.json is damaged",
    empty_manifest: "manifest.json is damaged",
    change_manifest: "manifest.json is damaged",
    take_file_of_another_step: "a file from elsewhere",
    take_manifest_of_another_step: "that of step 2",
    put_a_folder_in_place_of_the_file: FILE,
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_damage_to_the_newest_is_noticed_and_the_one_before_is_used(damage: Callable[[Path], None], root: Path) -> None:
    damage(newest_folder(root))
    step, said = restored(root)
    assert step == 2
    assert said.startswith("step-00000003: ")
    assert DAMAGES[damage] in said


def test_nothing_is_said_when_nothing_is_wrong(root: Path) -> None:
    assert restored(root) == (3, "")


def test_two_bad_ones_are_both_named_and_the_third_is_used(root: Path) -> None:
    flip_data(root / "step-00000003")
    truncate(root / "step-00000002")
    step, said = restored(root)
    assert step == 1
    assert "step-00000003" in said
    assert "step-00000002" in said


def test_no_bit_of_a_checkpoint_can_flip_unnoticed(root: Path) -> None:
    folder = newest_folder(root)
    rng = random.Random(0)
    for path in sorted(folder.iterdir()):
        for bit in rng.sample(range(path.stat().st_size * 8), 100):
            flip(path, bit)
            assert restored(root)[0] == 2, f"bit {bit} of {path.name}"
            flip(path, bit)
    assert restored(root) == (3, "")


def test_a_bit_that_only_one_rank_reads_makes_all_ranks_fall_back_together(tmp_path: Path) -> None:
    def work(rank: int, world: int) -> tuple[int, str, float]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (world,))

        def sharded(value: float) -> dict[str, torch.Tensor]:
            return {"w": distribute_tensor(torch.full((8, 4), float(value)), mesh, [Shard(0)])}

        for step in (1, 2):
            checkpoint.save(tmp_path, step, sharded(step), {})
        if rank == 1:
            flip_data_of_rank_1 = tmp_path / "step-00000002" / "rank-00001.safetensors"
            flip(flip_data_of_rank_1, flip_data_of_rank_1.stat().st_size * 8 - 1)
        torch.distributed.barrier()
        tensors = sharded(0)
        found = checkpoint.restore(tmp_path, tensors)
        assert found is not None
        local = tensors["w"].to_local()  # type: ignore[attr-defined]  # a DTensor
        return found.step, "; ".join(map(str, found.skipped)), local.mean().item()

    results = run_ranks(work, 2)
    assert [(step, value) for step, _, value in results] == [(1, 1.0), (1, 1.0)]
    assert "rank-00001.safetensors" in results[0][1]


def test_history_that_is_all_bad_is_an_error_and_not_a_fresh_start(root: Path) -> None:
    for step in (1, 2, 3):
        delete_manifest(root / f"step-{step:08d}")
    with pytest.raises(CheckpointError, match=r"step-00000003: .*step-00000001: "):
        checkpoint.restore(root, state(0))
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        checkpoint.newest(root)


def test_no_history_is_a_fresh_start(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "never made") is None
    assert checkpoint.restore(tmp_path, state(0)) is None


def test_files_that_do_not_belong_are_ignored(root: Path) -> None:
    (newest_folder(root) / ".nfs0001").write_text("left by a file server")
    (root / "notes.txt").write_text("mine")
    (root / "step-later").mkdir()
    (root / "step-00000009").write_text("a file, no checkpoint")
    assert restored(root) == (3, "")


def test_a_checkpoint_of_a_newer_shoal_is_not_passed_over_in_silence(root: Path) -> None:
    path = newest_folder(root) / manifests.MANIFEST
    head = path.read_bytes().rpartition(b",")[0].replace(b'"version":1', b'"version":2')
    path.write_bytes(head + manifests._seal(head))
    with pytest.raises(CheckpointError, match="newer Shoal"):
        checkpoint.newest(root)


def test_a_manifest_that_leads_out_of_its_folder_is_refused(root: Path) -> None:
    path = newest_folder(root) / manifests.MANIFEST
    head = path.read_bytes().rpartition(b",")[0].replace(b'"rank-00000.safetensors"', b'"../rank-00000.safetensors"')
    path.write_bytes(head + manifests._seal(head))
    step, said = restored(root)
    assert step == 2
    assert "not one of a checkpoint" in said


def test_newest_with_verify_reads_everything(root: Path) -> None:
    flip_data(newest_folder(root))
    cheap, thorough = checkpoint.newest(root), checkpoint.newest(root, verify=True)
    assert cheap is not None
    assert thorough is not None
    assert (cheap.step, thorough.step) == (3, 2)
    with pytest.raises(checkpoint.Corrupt, match=FILE):
        checkpoint.verify(cheap)
    checkpoint.verify(thorough)


def test_saving_a_step_again_keeps_the_good_one_and_replaces_a_bad_one(root: Path) -> None:
    before = (newest_folder(root) / manifests.MANIFEST).read_bytes()
    again = checkpoint.save(root, 3, state(3), {"step": 3}, attempt=1)
    assert again.kept
    assert (newest_folder(root) / manifests.MANIFEST).read_bytes() == before

    flip_data(newest_folder(root))  # the cheap check does not see it
    again = checkpoint.save(root, 3, state(3), {"step": 3}, attempt=2)
    assert not again.kept
    assert restored(root) == (3, "")
    attempt = json.loads((newest_folder(root) / manifests.MANIFEST).read_text())["attempt"]
    assert attempt == 2
