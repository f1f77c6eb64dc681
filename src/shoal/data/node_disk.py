"""Which folder of this machine's own disk may hold what can be fetched again. Never imports torch.

A workspace is often on a file system that all machines share: a cache there would be one for a thousand processes, and
each look at it a question over the network. What is in memory (tmpfs) is no place either: it is what the model needs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

# File systems whose other end is another machine, as the kernel names them; a `fuse.` may be anything, and is taken so.
_SHARED = {
    "9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "ocfs2", "orangefs",
    "panfs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs",
}  # fmt: skip
_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
_NAMED = ("SLURM_TMPDIR", "TMPDIR")  # where schedulers and administrators say that there is room
_USUAL = ("/var/tmp", "/tmp")


def cache_folder(workspace: Path, mounts: str | None = None, env: Mapping[str, str] = os.environ) -> Path:
    """In the workspace if that is on a disk of this machine, else on one that is; in the workspace where there is none.
    `mounts` is what the kernel says is mounted (/proc/self/mountinfo)."""
    here = workspace / ".shoal" / "cache"
    kinds = _mounts(_mountinfo() if mounts is None else mounts)
    if not _shared(_kind(workspace, kinds)):
        return here
    for base in (*(env[name] for name in _NAMED if env.get(name)), *_USUAL):
        kind = _kind(Path(base), kinds)
        if not _shared(kind) and kind not in _MEMORY and _own(folder := Path(base) / f"shoal-cache-{os.getuid()}"):
            return folder
    return here


def is_shared(path: Path, mounts: str | None = None) -> bool:
    """Whether other machines see the same files there."""
    return _shared(_kind(path, _mounts(_mountinfo() if mounts is None else mounts)))


def _own(folder: Path) -> bool:
    """Ours, and nobody else may write to it: in /tmp anybody may have made it before."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and not status.st_mode & 0o022 and not folder.is_symlink()


def _shared(kind: str) -> bool:
    return kind in _SHARED or kind.startswith("fuse")


def _kind(path: Path, kinds: Mapping[Path, str]) -> str:
    """Of the file system that a path is on, or would be."""
    real = path.resolve()
    return next((kinds[folder] for folder in (real, *real.parents) if folder in kinds), "")


def _mounts(text: str) -> dict[Path, str]:
    """Mount point → kind; of several at one point the last is what is seen."""
    found: dict[Path, str] = {}
    for line in text.splitlines():
        before, found_dash, after = line.partition(" - ")
        fields = before.split()
        if found_dash and len(fields) > 4 and after.split():
            found[Path(_unescaped(fields[4]))] = after.split()[0]
    return found


def _unescaped(name: str) -> str:
    for code, sign in _ESCAPED:
        name = name.replace(code, sign)
    return name


_ESCAPED: Iterable[tuple[str, str]] = (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\"))


def _mountinfo() -> str:
    try:
        return Path("/proc/self/mountinfo").read_text()
    except OSError:
        return ""
