"""What is written down about own code: the record of a check in a workspace, the launchers that a person uses."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.reader import Target, reader
from tests.fuzz.samples import texts_of


@reader("own-record", "own.record", quick=200, share=50)
def own_record(folder: Path) -> Target:
    """One that cannot be read is none: `train` says that the code was not checked."""
    from shoal.own.record import read

    file = folder / "record.json"

    def look(text: bytes) -> None:
        file.write_bytes(text)
        read(file)

    return Target(texts_of({"passed": False, "time": 1.7e9, "failed": ["resume", "dp_shard"]}), look)


@reader("launchers", "launch.own", quick=200, share=50)
def launchers(folder: Path) -> Target:
    """A damaged list is said in a sentence; nothing that it does not name is imported."""
    from shoal.errors import SetupError
    from shoal.launch.own import _noted

    file = folder / "launchers.json"

    def look(text: bytes) -> None:
        file.write_bytes(text)
        _noted(file)

    return Target(texts_of([["mine:Queue", "/home/me/runs"], ["other.module:Launcher", "/x"]]), look, (SetupError,))
