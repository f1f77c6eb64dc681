"""Where what can be fetched again is kept: on a disk of this machine, never on one that all machines share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.data.node_disk import cache_folder


def mounted(*places: tuple[Path | str, str]) -> str:
    """As /proc/self/mountinfo tells it."""
    lines = ["22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw"]
    lines += [
        f"{n} 22 0:{n} / {place} rw shared:{n} - {kind} server:/x rw" for n, (place, kind) in enumerate(places, 30)
    ]
    return "\n".join(lines)


def test_a_workspace_on_a_disk_of_this_machine_holds_its_cache(tmp_path: Path) -> None:
    assert cache_folder(tmp_path, mounted(), {}) == tmp_path / ".shoal" / "cache"


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "fuse.juicefs", "virtiofs"])
def test_a_shared_workspace_does_not(tmp_path: Path, kind: str) -> None:
    home, scratch = tmp_path / "home", tmp_path / "scratch"
    scratch.mkdir()
    found = cache_folder(home / "runs", mounted((home, kind)), {"SLURM_TMPDIR": str(scratch)})
    assert found == scratch / f"shoal-cache-{os.getuid()}"
    assert found.stat().st_mode & 0o777 == 0o700


def test_memory_and_other_shared_places_are_passed_over(tmp_path: Path) -> None:
    home, memory, disk = (tmp_path / name for name in ("my home", "memory", "disk"))
    disk.mkdir()
    mounts = mounted((str(home).replace(" ", "\\040"), "nfs"), (memory, "tmpfs"))
    assert cache_folder(home, mounts, {"SLURM_TMPDIR": str(memory), "TMPDIR": str(disk)}).parent == disk


def test_a_folder_that_somebody_else_could_have_made_is_not_used(tmp_path: Path) -> None:
    home, disk = tmp_path / "home", tmp_path / "disk"
    folder = disk / f"shoal-cache-{os.getuid()}"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    everything_else = mounted((home, "nfs"), ("/var/tmp", "tmpfs"), ("/tmp", "tmpfs"), (disk, "ext4"))
    assert cache_folder(home, everything_else, {"TMPDIR": str(disk)}) == home / ".shoal" / "cache"
    folder.rmdir()
    folder.symlink_to(tmp_path)
    assert cache_folder(home, everything_else, {"TMPDIR": str(disk)}) == home / ".shoal" / "cache"
    folder.unlink()
    assert cache_folder(home, everything_else, {"TMPDIR": str(disk)}) == folder
