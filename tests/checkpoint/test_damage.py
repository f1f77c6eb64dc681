"""Whatever is wrong with the newest checkpoint is noticed, said, and the newest good one is used instead."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.ranks import run_ranks

from shoal import checkpoint
from shoal.checkpoint import Name, ledger
from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.find import Found, newest_readable
from shoal.checkpoint.names import MANIFEST
from shoal.checkpoint.store import Folder
from shoal.errors import WRONG_ENVIRONMENT, CheckpointError, SetupError, TransientError

FILE = "rank-00000.safetensors"
NEWEST = Name(3, 1)


def state(value: float) -> dict[str, torch.Tensor]:
    matrix, vector, scalar = torch.full((40, 5), float(value)), torch.full((7,), float(value)), torch.tensor(int(value))
    return {"model.w": matrix, "model.b": vector, "count": scalar}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1, 2 and 3, where the tensors of step n hold n."""
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, state(step), {"step": step}, term=1, piece_bytes=200)
    return tmp_path


def restored(root: Path | list[Path]) -> tuple[int, str]:
    """(the step that was loaded, what was said about newer ones)"""
    tensors = state(0)
    found = checkpoint.restore(root, tensors)
    assert found is not None
    assert found.extra == {"step": found.step}
    assert all((t == found.step).all() for t in tensors.values()), "tensors of more than one checkpoint"
    return found.step, "; ".join(map(str, found.skipped))


def newest_folder(root: Path) -> Path:
    return root / str(NEWEST)


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
    (folder / MANIFEST).unlink()


def garble_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("{ not json")


def empty_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_bytes(b"")


def fifo_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    os.mkfifo(folder / MANIFEST)


def device_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).symlink_to("/dev/zero")


def folder_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).mkdir()


def change_manifest(folder: Path) -> None:
    path = folder / MANIFEST
    path.write_text(path.read_text().replace('"extra":{"step":3}', '"extra":{"step":9}'))


def take_file_of_another_step(folder: Path) -> None:
    shutil.copy(folder.parent / "step-00000002-term-1" / FILE, folder / FILE)


def take_manifest_of_another_step(folder: Path) -> None:
    shutil.copy(folder.parent / "step-00000002-term-1" / MANIFEST, folder / MANIFEST)


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
    fifo_manifest: "manifest.json cannot be read (is a FIFO, where a file should be)",
    device_manifest: "manifest.json cannot be read (is a device, where a file should be)",
    folder_manifest: "manifest.json cannot be read (is a folder, where a file should be)",
    take_file_of_another_step: "a file from elsewhere",
    take_manifest_of_another_step: "that of step-00000002-term-1",
    put_a_folder_in_place_of_the_file: FILE,
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_damage_to_the_newest_is_noticed_and_the_one_before_is_used(damage: Callable[[Path], None], root: Path) -> None:
    damage(newest_folder(root))
    step, said = restored(root)
    assert step == 2
    assert said.startswith(f"{NEWEST}: ")
    assert DAMAGES[damage] in said
    # It is quarantined with the reason, which is said again and not looked for again.
    assert DAMAGES[damage] in ledger.quarantine_reason(Folder(root), NEWEST)
    again = checkpoint.restore(root, state(0))
    assert again is not None
    assert again.step == 2
    assert [(bad.name, bad.known) for bad in again.skipped] == [(NEWEST, True)]
    assert DAMAGES[damage] in str(again.skipped[0])


def test_nothing_is_said_when_nothing_is_wrong(root: Path) -> None:
    assert restored(root) == (3, "")


def test_two_bad_ones_are_both_named_and_the_third_is_used(root: Path) -> None:
    flip_data(root / "step-00000003-term-1")
    truncate(root / "step-00000002-term-1")
    step, said = restored(root)
    assert step == 1
    assert "step-00000003-term-1" in said
    assert "step-00000002-term-1" in said


def test_a_published_one_that_is_gone_is_noticed(root: Path) -> None:
    shutil.rmtree(newest_folder(root))
    assert restored(root) == (2, f"{NEWEST}: it was published, and is gone")


def test_no_bit_of_a_checkpoint_can_flip_unnoticed(root: Path) -> None:
    folder = newest_folder(root)
    rng = random.Random(0)
    for path in sorted(folder.iterdir()):
        for bit in rng.sample(range(path.stat().st_size * 8), 100):
            flip(path, bit)
            assert restored(root)[0] == 2, f"bit {bit} of {path.name}"
            flip(path, bit)
            ledger.release(Folder(root), NEWEST)
    assert restored(root) == (3, "")


def test_each_rank_looks_at_its_share_of_the_headers_and_what_one_finds_makes_all_fall_back(tmp_path: Path) -> None:
    """At a thousand ranks nobody opens a thousand files before the first byte is read."""

    def work(rank: int, world: int) -> tuple[int, list[str], str]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        from shoal.checkpoint import find

        mesh, looked, real = init_device_mesh("cpu", (world,)), [], find._check_header

        def sharded(value: float) -> dict[str, torch.Tensor]:
            return {"w": distribute_tensor(torch.full((8, 4), float(value)), mesh, [Shard(0)])}

        for step in (1, 2):
            checkpoint.save(tmp_path, step, sharded(step), {})
        if rank == 1:
            flip(tmp_path / "step-00000002-term-0" / "rank-00002.safetensors", 8 * 12)  # in its header
        torch.distributed.barrier()

        def look(found: Found, file: str) -> None:
            looked.append(f"{found.name.step} {file}")
            real(found, file)

        find._check_header = look
        found = checkpoint.restore(tmp_path, sharded(0))
        assert found is not None
        return found.step, looked, "; ".join(map(str, found.skipped))

    results = run_ranks(work, 3)
    assert [step for step, _, _ in results] == [1, 1, 1]
    for rank, (_, looked, _) in enumerate(results):
        assert looked == [f"2 rank-{rank:05d}.safetensors", f"1 rank-{rank:05d}.safetensors"]
    assert "rank-00002.safetensors" in results[0][2]
    assert "rank-00002.safetensors" in ledger.quarantine_reason(Folder(tmp_path), Name(2, 0))


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
            flip_data_of_rank_1 = tmp_path / "step-00000002-term-0" / "rank-00001.safetensors"
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
        delete_manifest(root / f"step-{step:08d}-term-1")
    with pytest.raises(CheckpointError, match=r"step-00000003-term-1: .*step-00000001-term-1: ") as e:
        checkpoint.restore(root, state(0))
    assert e.value.exit_code == WRONG_ENVIRONMENT
    assert "\n" not in str(e.value)
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        checkpoint.newest(root)


def test_no_history_is_a_fresh_start(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "never made") is None
    assert checkpoint.restore(tmp_path, state(0)) is None


def test_files_that_do_not_belong_are_ignored(root: Path) -> None:
    (newest_folder(root) / ".nfs0001").write_text("left by a file server")
    (root / "notes.txt").write_text("mine")
    (root / "step-later").mkdir()
    (root / "step-00000009").mkdir()
    (root / "step-00000009-term-01").mkdir()
    (root / ledger.LEDGER / "published-later.json").write_text("{}")
    assert restored(root) == (3, "")


def test_what_has_the_name_of_a_checkpoint_and_is_none_is_said(root: Path) -> None:
    (root / "step-00000009-term-1").write_text("a file")
    (root / "step-00000008-term-1").mkdir()
    step, said = restored(root)
    assert step == 3
    assert "step-00000009-term-1: manifest.json cannot be read" in said
    assert "step-00000008-term-1: it has no manifest.json" in said


def test_a_checkpoint_of_a_newer_shoal_is_not_passed_over_in_silence(root: Path) -> None:
    path = newest_folder(root) / MANIFEST
    head = path.read_bytes().rpartition(b",")[0].replace(b'"version":2', b'"version":3')
    path.write_bytes(head + manifests.seal(head))
    with pytest.raises(CheckpointError, match="newer Shoal"):
        checkpoint.newest(root)


def test_a_manifest_that_leads_out_of_its_folder_is_refused(root: Path) -> None:
    path = newest_folder(root) / MANIFEST
    head = path.read_bytes().rpartition(b",")[0].replace(b'"rank-00000.safetensors"', b'"../rank-00000.safetensors"')
    path.write_bytes(head + manifests.seal(head))
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


@pytest.fixture
def copy(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(root, tmp_path_factory.mktemp("elsewhere") / "checkpoints"))


def test_a_copy_elsewhere_is_used_before_an_older_step(root: Path, copy: Path) -> None:
    flip_data(newest_folder(root))
    assert restored([root, copy])[0] == 3
    flip_data(newest_folder(copy))
    assert restored([root, copy])[0] == 2


def test_who_reads_the_weights_alone_takes_the_copy_too(root: Path, copy: Path) -> None:
    flip_data(newest_folder(root))
    heard: list[str] = []
    found, weights = newest_readable([root, copy], checkpoint.read_full, heard.append)
    assert found.where == str(newest_folder(copy))
    assert (weights["w"] == 3).all()
    assert len(heard) == 1
    for broken in (newest_folder(copy), root / "step-00000002-term-1", copy / "step-00000002-term-1"):
        delete_manifest(broken)
    heard.clear()
    found, weights = newest_readable([root, copy], checkpoint.read_full, heard.append)
    assert (weights["w"] == 1).all()
    assert len(heard) == 4, "each copy that was not taken is said"


class Refusing(Folder):
    """A disk on which the system refuses to read one file."""

    def __init__(self, root: Path, name: str, number: int) -> None:
        super().__init__(root)
        self.name, self.number = name, number

    def read(self, name: str) -> bytes:
        self._refuse(name)
        return super().read(name)

    def read_into(self, name: str, at: int, into: memoryview) -> None:
        self._refuse(name)
        super().read_into(name, at, into)

    def _refuse(self, name: str) -> None:
        if name == self.name:
            raise OSError(self.number, os.strerror(self.number), name)


@pytest.mark.parametrize("file", [FILE, MANIFEST])
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ELOOP], ids=errno.errorcode.get)
def test_a_file_that_cannot_be_read_is_bad(root: Path, file: str, number: int) -> None:
    tensors = state(0)
    found = checkpoint.restore(Refusing(root, f"{NEWEST}/{file}", number), tensors)
    assert found is not None
    assert found.step == 2
    assert os.strerror(number) in str(found.skipped[0])


@pytest.mark.parametrize("file", [FILE, MANIFEST])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT], ids=errno.errorcode.get)
def test_a_limit_of_the_process_or_the_network_is_not_taken_for_damage(root: Path, file: str, number: int) -> None:
    with pytest.raises(TransientError, match=f"{NEWEST}/{file} cannot be read now"):
        checkpoint.restore(Refusing(root, f"{NEWEST}/{file}", number), state(0))
    assert restored(root) == (3, ""), "nothing was quarantined"


class Stale(Folder):
    """A network file system whose listing is a minute old."""

    def list(self, folder: str = "") -> list[str]:
        return [entry for entry in super().list(folder) if entry != str(NEWEST)]


def test_what_an_old_listing_does_not_show_is_not_taken_for_lost(root: Path) -> None:
    found = checkpoint.restore(Stale(root), state(0))
    assert found is not None
    assert (found.name, found.skipped) == (NEWEST, ())


class Unlisted(Folder):
    def __init__(self, root: Path, number: int) -> None:
        super().__init__(root)
        self.number = number

    def list(self, folder: str = "") -> list[str]:
        raise OSError(self.number, os.strerror(self.number), str(self.root))


def test_a_folder_that_cannot_be_listed_is_no_fresh_start(root: Path) -> None:
    with pytest.raises(TransientError, match="cannot be listed"):
        checkpoint.newest(Unlisted(root, errno.EIO))
    with pytest.raises(SetupError, match="cannot be listed"):
        checkpoint.newest(Unlisted(root, errno.EACCES))
    with pytest.raises(CheckpointError, match="cannot be listed"):
        checkpoint.restore(Unlisted(root, errno.EACCES), state(0))
