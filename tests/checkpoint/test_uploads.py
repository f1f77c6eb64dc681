"""A copy in a store that compares what it takes in is good to its last byte, and is not read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint import Name, publish
from shoal.checkpoint.bucket import Bucket
from shoal.checkpoint.find import Found
from shoal.checkpoint.layout import bytes_of
from shoal.checkpoint.names import rank_file
from shoal.checkpoint.part import write_part
from shoal.checkpoint.publish import complete
from shoal.checkpoint.saving import contents_of
from shoal.checkpoint.setup import Setup
from shoal.checkpoint.store import Folder
from shoal.checkpoint.uploads import Uploads, open_upload
from shoal.train.writers import AtOnce

NAME = Name(10, 1)


class Comparing(Folder):
    compares = True


class State:
    def tensors(self) -> dict[str, torch.Tensor]:
        return {"w": torch.ones(3)}

    def holders(self) -> None:
        return None

    def extra(self, step: int) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(("store", "read_back", "times"), [(Folder, "headers", 3), (Comparing, "headers", 0)])
def test_a_store_that_has_compared_is_not_read_back_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: type[Folder], read_back: str, times: int
) -> None:
    read: list[Name] = []
    damage = publish.damage

    def counted(found: Found) -> list[str]:
        read.append(found.name)
        return damage(found)

    monkeypatch.setattr(publish, "damage", counted)
    there = store(tmp_path)
    write = AtOnce(Setup(0, 1, 1, -1, (there.where,), None, keep=1, read_back=read_back), [there])
    for step in (10, 20, 30):
        write.begin(step, State(), durable=True, upload=False)
    assert len(read) == times
    assert [name for name in sorted(there.list()) if Name.of(name)] == ["step-00000030-term-1"]


def test_s3_compares_and_a_folder_does_not(tmp_path: Path) -> None:
    setup = Setup(0, 1, 1, -1, (), None)
    assert Bucket("s3://copies/run").compares
    assert not Bucket(tmp_path.as_uri()).compares
    assert (setup.read_back_of(Bucket("s3://copies/run")), setup.verifies(Bucket("s3://copies/run"))) == (
        "headers",
        True,
    )
    assert (setup.read_back_of(Folder(tmp_path)), setup.verifies(Folder(tmp_path))) == ("full", True)
    assert not setup.verifies(Bucket(tmp_path.as_uri()))


@pytest.mark.parametrize("at", [None, 3, -1, -4000])
def test_what_the_disk_gives_back_otherwise_than_it_was_written_is_not_copied(tmp_path: Path, at: int | None) -> None:
    here, there, weights = Folder(tmp_path / "here"), Folder(tmp_path / "there"), torch.arange(3000.0)
    contents = contents_of({"w": weights}, block_bytes=1024)
    part = write_part(here, NAME, 0, 1, contents, [bytes_of(weights)])
    path = here.path(f"{here.staging(str(NAME))}/{rank_file(0)}")
    if at is not None:
        damaged = bytearray(path.read_bytes())
        damaged[at] ^= 8
        path.write_bytes(damaged)
    said: list[tuple[str, str]] = []

    def say(kind: str, step: int, **about: Any) -> None:
        said.append((kind, about.get("error", "")))

    def published(*about: object) -> Found:
        return complete(there, NAME, 1, {})

    uploads = Uploads(there, here, 1, say, published, lambda store: None)
    uploads.add(open_upload(here, NAME, part, {}))
    uploads.finish()
    if at is None:
        assert said == [("uploaded", "")]
        assert there.path(f"{NAME}/{rank_file(0)}").read_bytes() == path.read_bytes()
    else:
        assert [kind for kind, _ in said] == ["upload-failed"]
        assert "is on the disk no more as it was written to it" in said[0][1]
        assert str(NAME) not in there.list()
