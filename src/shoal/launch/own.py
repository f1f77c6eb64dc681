"""A launcher of the user's own (`own.launcher`): the five functions of a `Backend`, of a class in the user's folder.

`shoal launch` imports it, since a person has named the run file, and notes class and folder among those that this
person uses (a file in their home, as ssh keeps known hosts). `ps`, `logs`, `stop` and `resume` read the name in a job
file, which may be somebody else's: they import nothing but what is noted. What the class raises or returns wrongly is
one sentence, so that one launcher never hides the runs of the others.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shoal.errors import SetupError, ShoalError
from shoal.launch.backend import Rendered, State
from shoal.launch.job import Job
from shoal.leaving import own_place
from shoal.own.code import imported
from shoal.plain_file import read_plain
from shoal.spec.run import Run
from shoal.values import BadValue, items, read_json, short

if TYPE_CHECKING:
    from shoal.launch.request import Request

FOLDER = "own.folder"  # in `Job.where`
MOST = 1000  # launchers that one person uses
MOST_BYTES = 1 << 20
NEEDED = ("render", "submit", "states", "logs", "stop")
T = TypeVar("T")
_importing = threading.Lock()  # schedulers are asked at the same time, each in a thread


def note(run: Run) -> None:
    """For `shoal launch` alone: this person uses the launcher that the run file names."""
    if run.own.launcher is None:
        return
    pair, file = [run.own.launcher, run.own.folder or os.getcwd()], _file()  # always an absolute folder
    known = _noted(file)
    if pair in known:
        return
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        temporary.write_text(json.dumps([*known[-MOST + 1 :], pair], indent=1) + "\n")
        temporary.rename(file)
    except OSError as e:
        raise SetupError(
            f"cannot write {file} ({e.strerror}), where the launchers that you use are noted; mend that."
        ) from None


def launcher(name: str, folder: str) -> OwnLauncher:
    """Of a job that may be anybody's: made if this person uses it."""
    if [name, folder] not in _noted(_file()):
        raise SetupError(
            f"the launcher {name} of {folder} is not one that you have launched with, and its code is not run unasked; "
            f"ask whoever launched the run, or use `shoal launch` with it yourself (it is noted in {_file()})."
        )
    with _importing:
        return _made(name, folder)


@cache
def _made(name: str, folder: str) -> OwnLauncher:
    make = imported("own.launcher", name, Path(folder))
    made = _asked(name, "making it", lambda: make())
    if missing := [one for one in NEEDED if not callable(getattr(made, one, None))]:
        raise SetupError(f"own.launcher {name} has no {missing[0]}(): it needs {', '.join(NEEDED)}.")
    return OwnLauncher(name, folder, made)


class OwnLauncher:
    """Stands between the verbs and the class: a `Backend` that fails in sentences."""

    def __init__(self, name: str, folder: str, does: Any) -> None:
        self.name, self._folder, self._does = name, folder, does

    def render(self, request: Request) -> list[Rendered]:
        return self._all("render", Rendered, lambda: list(self._does.render(request)))

    def submit(self, request: Request) -> Job:
        job = _asked(self.name, "submit", lambda: self._does.submit(request))
        (job,) = self._all("submit", Job, lambda: [job])
        return replace(job, run=request.name, backend=self.name, where={**job.where, FOLDER: self._folder})

    def states(self, jobs: Sequence[Job]) -> Mapping[str, State]:
        found = _asked(self.name, "states", lambda: dict(self._does.states(jobs)))
        self._all("states", State, lambda: list(found.values()))
        return found

    def logs(self, job: Job, follow: bool, lines: int | None) -> Iterator[str]:
        said = _asked(self.name, "logs", lambda: iter(self._does.logs(job, follow, lines)))
        while True:
            line = _asked(self.name, "logs", lambda: next(said, None))
            if line is None:
                return
            yield str(line)

    def stop(self, job: Job, now: bool) -> None:
        _asked(self.name, "stop", lambda: self._does.stop(job, now))

    def _all(self, what: str, kind: type[T], do: Callable[[], list[Any]]) -> list[T]:
        found = _asked(self.name, what, do)
        for one in found:
            if not isinstance(one, kind):
                raise SetupError(
                    f"own.launcher {self.name}: {what}() gave {type(one).__name__} where a "
                    f"{kind.__module__}.{kind.__name__} is needed."
                )
        return found


def _asked(name: str, what: str, do: Callable[[], T]) -> T:
    try:
        return do()
    except ShoalError:
        raise
    except Exception as e:
        raise SetupError(f"own.launcher {name}: {what} failed: {own_place(e)}{type(e).__name__}: {e}.") from e


def _file() -> Path:
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "shoal" / "launchers.json"


def _noted(file: Path) -> list[list[str]]:
    try:
        said = items(read_json(read_plain(file, MOST_BYTES)), MOST)
        return [[short(part) for part in items(pair, 2)] for pair in said]
    except FileNotFoundError:
        return []
    except (OSError, BadValue) as e:
        raise SetupError(f"{file} cannot be read ({e}); move it away, and launch with your launchers again.") from None
