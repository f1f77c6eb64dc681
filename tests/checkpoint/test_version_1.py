"""Checkpoints of version 1 of the format stay readable: `version_1` was written by the last Shoal that wrote it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tests.checkpoint import layouts
from tests.checkpoint.layouts import as_rank
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shoal import checkpoint
from shoal.checkpoint import loading

VERSION_1 = Path(__file__).with_name("version_1")


def test_a_checkpoint_of_version_1_is_read_verified_and_read_into_other_layouts() -> None:
    found = checkpoint.newest(VERSION_1, verify=True)
    assert found is not None
    assert (found.name, found.extra, found.manifest.world) == (layouts.NAME, layouts.EXTRA, layouts.WORLD)
    layouts.assert_all_values(found)
    for rank in range(3):
        with as_rank(rank, 3):
            mesh = init_device_mesh("cpu", (3,))
            for name in ("model.fsdp", "model.strided", "model.experts"):
                whole = torch.zeros_like(layouts.value_of(name))
                mine = {name: distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)}
                loading._fill(found, mine)
                expected = distribute_tensor(layouts.value_of(name), mesh, [Shard(0)], src_data_rank=None)
                assert torch.equal(mine[name].to_local(), expected.to_local())


def test_every_byte_of_a_checkpoint_of_version_1_is_still_verified(tmp_path: Path) -> None:
    shutil.copytree(VERSION_1, tmp_path, dirs_exist_ok=True)
    opened = checkpoint.open_checkpoint(tmp_path, layouts.NAME)
    for path in sorted(tmp_path.glob("step-*/*.safetensors")):
        whole = path.read_bytes()
        for at in range(0, len(whole), 37):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(checkpoint.Corrupt, match=path.name):
                checkpoint.verify(opened)
        path.write_bytes(whole)


def test_one_of_version_1_is_resumed_from_and_kept_beside_new_ones(tmp_path: Path) -> None:
    shutil.copytree(VERSION_1, tmp_path, dirs_exist_ok=True)
    tensors = {name: torch.zeros_like(layouts.value_of(name)) for name in layouts.STATE}
    found = checkpoint.restore(tmp_path, tensors)
    assert found is not None
    assert all(torch.equal(tensors[name], layouts.value_of(name)) for name in tensors)
    checkpoint.save(tmp_path, 13, tensors, {}, term=3)
    assert checkpoint.prune(tmp_path, keep=2) == []
    again = checkpoint.restore(tmp_path, tensors, before=checkpoint.Name(13, 0))
    assert again is not None
    assert again.name == layouts.NAME
    assert checkpoint.prune(tmp_path, keep=1) == [layouts.NAME]
