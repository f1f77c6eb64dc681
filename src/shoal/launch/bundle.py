"""The code that travels with a run: its resolved run file and the files of `launch.code`, named by their content.

Paths, modes and bytes are hashed, times are not: the same files give the same name on every machine, and a node that
has a bundle of that name needs nothing else.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import ClassVar

from shoal.errors import SetupError, UsageError
from shoal.own.files import travels

MOST_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Bundle:
    RUN_FILE: ClassVar[str] = "run.yaml"
    CODE: ClassVar[str] = "code"
    files: dict[str, bytes] = field(repr=False)  # by their paths, sorted
    executable: frozenset[str] = frozenset()

    @classmethod
    def of(cls, run_file: str, code: Path | None, own: Mapping[str, bytes] | None = None) -> Bundle:
        """`own`: modules that the run names (`shoal.own.files`), by their paths."""
        files = {cls.RUN_FILE: run_file.encode(), **{f"{cls.CODE}/{name}": data for name, data in (own or {}).items()}}
        executable = set()
        total = 0
        for path in _files(code) if code else ():
            name = f"{cls.CODE}/{path.relative_to(code).as_posix()}"  # type: ignore[arg-type]  # no code, no path
            files[name] = path.read_bytes()
            if os.access(path, os.X_OK):
                executable.add(name)
            total += len(files[name])
            if total > MOST_BYTES:
                raise UsageError(
                    f"launch.code {code} holds more than {MOST_BYTES >> 20} MiB: code travels, data does not; name a "
                    "smaller folder, or list what stays behind in its .gitignore."
                )
        return cls(dict(sorted(files.items())), frozenset(executable))

    @property
    def sha256(self) -> str:
        whole = hashlib.sha256()
        for name, data in self.files.items():
            about = f"{name}\0{int(name in self.executable)}\0{len(data)}\0"
            whole.update(about.encode() + hashlib.sha256(data).digest())
        return whole.hexdigest()

    def tar(self) -> bytes:
        """The same bytes for the same content: no times, no owners."""
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w:gz", compresslevel=6, format=tarfile.USTAR_FORMAT) as tar:
            for name, data in self.files.items():
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(data), 0o755 if name in self.executable else 0o644
                tar.addfile(entry, io.BytesIO(data))
        whole = bytearray(out.getvalue())
        whole[4:8] = bytes(4)  # gzip's own time
        return bytes(whole)

    @classmethod
    def of_tar(cls, data: bytes) -> Bundle:
        """What `tar` gave, after a journey: plain files alone, none outside of the folder, and not too much. OSError,
        EOFError, ValueError or an error of tarfile or zlib for anything else."""
        files: dict[str, bytes] = {}
        executable = set()
        inflate = zlib.decompressobj(wbits=31)  # of gzip
        plain = inflate.decompress(data, 2 * MOST_BYTES)  # half of it may be headers
        if inflate.unconsumed_tail or not inflate.eof:
            raise tarfile.TarError("it holds too much, or is cut off")
        with tarfile.open(fileobj=io.BytesIO(plain), mode="r:") as tar:
            for entry in tar:
                path, content = PurePosixPath(entry.name), tar.extractfile(entry) if entry.isreg() else None
                if content is None or entry.size < 0 or entry.pax_headers or entry.sparse is not None:
                    raise tarfile.TarError("it holds something else than plain files")
                if path.is_absolute() or ".." in path.parts or not path.name or "\0" in entry.name:
                    raise tarfile.TarError("it names a file outside of its folder")
                files[entry.name] = content.read()
                if entry.mode & 0o100:
                    executable.add(entry.name)
        return cls(files, frozenset(executable))

    def place_in(self, workspace: Path) -> Path:
        return workspace / ".shoal" / "bundles" / self.sha256[:16]

    def unpack_into(self, workspace: Path) -> Path:
        """`.shoal/bundles/SHA` of a workspace that the nodes share."""
        there = self.place_in(workspace)
        try:
            self.unpack_at(there)
        except OSError as e:
            raise SetupError(f"cannot write the code of the run to {there.parent} ({e.strerror}); mend that.") from e
        return there

    def unpack_at(self, there: Path) -> None:
        """Whole or not at all; whoever comes second finds it there."""
        if there.is_dir():
            return
        there.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=there.parent))
        try:
            for name, data in self.files.items():
                path = temporary / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                path.chmod(0o755 if name in self.executable else 0o644)
            temporary.chmod(0o755)
            temporary.rename(there)
        except OSError:
            if not there.is_dir():  # else somebody was faster, with the same content
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _files(folder: Path) -> Iterator[Path]:
    """The files that travel: what git would track where it is a repository, else everything but what never should."""
    if not folder.is_dir():
        raise UsageError(f"launch.code names {folder}, which is not a folder; give the folder of your code.")
    tracked = _known_to_git(folder)
    paths = list(folder.rglob("*")) if tracked is None else [folder / name for name in tracked]
    for path in sorted(paths):
        if path.is_file() and travels(path, folder):
            yield path


def _known_to_git(folder: Path) -> list[str] | None:
    listing = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "."]
    try:
        listed = subprocess.run(listing, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git here, or no repository there
        return None
    return [name for name in os.fsdecode(listed.stdout).split("\0") if name]
