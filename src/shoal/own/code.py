"""Imports own code, from the run's copy of it. Only those who train or check a run do; nobody else ever runs it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from shoal.errors import SpecError
from shoal.leaving import own_place, show_own
from shoal.near import closest
from shoal.spec.run import Run


@dataclass(frozen=True)
class Code:
    """What a run names, imported; None where it names nothing."""

    block: type[Any] | None = None
    objective: Any = None
    optimizer: Callable[..., Any] | None = None
    schedule: Callable[..., Any] | None = None
    hooks: tuple[Callable[..., Any], ...] = ()
    loop: Callable[..., Any] | None = None
    data: Callable[..., Any] | None = None


NONE = Code()


def load(run: Run, folder: Path) -> Code:
    """`folder`: where the run's copy is (`shoal.own.carry`)."""
    if not run.own.objects:
        return NONE
    if folder.is_dir():  # else on a node without the run's directory, where its bundle is on the path
        show_own(folder)
        _first_on_path(folder)
    found = {key: _object(key, name, folder) for key, name in run.own.objects.items()}
    for key, thing in found.items():
        if not callable(thing):
            raise SpecError(f"{key}: {run.own.objects[key]} is {type(thing).__name__}, not a class or a function.")
    return Code(
        found.get("own.block"),
        found.get("own.objective"),
        found.get("own.optimizer"),
        found.get("own.schedule"),
        tuple(found[f"own.hooks.{i}"] for i in range(len(run.own.hooks))),
        found.get("own.loop"),
        found.get("own.data"),
    )


def imported(key: str, name: str, folder: Path) -> Callable[..., Any]:
    """One class or function of a folder of the user's own, for a verb that trains nothing; what else is loaded stays.
    A module of that name from elsewhere gives way where the folder has one; other files of the folder hide nothing
    that is imported later."""
    top = name.partition(":")[0].partition(".")[0]
    show_own(folder)
    others = [p for p in sys.path if p != str(folder)]
    sys.path[:] = [str(folder), *others]
    importlib.invalidate_caches()
    if (folder / f"{top}.py").is_file() or (folder / top).is_dir():
        for loaded in list(sys.modules):
            if loaded.partition(".")[0] == top and not _from(sys.modules[loaded], folder):
                del sys.modules[loaded]
    try:
        thing = _object(key, name, folder)
    finally:
        sys.path[:] = [*others, str(folder)]
    if not callable(thing):
        raise SpecError(f"{key}: {name} is {type(thing).__name__}, not a class or a function.")
    return cast(Callable[..., Any], thing)


def _first_on_path(folder: Path) -> None:
    """The run's copy is asked before everything else, also where a module of that name is loaded already: in one
    process several runs may be opened, each with its own."""
    place = str(folder)
    sys.path[:] = [place, *(p for p in sys.path if p != place)]
    importlib.invalidate_caches()
    mine = {p.stem for p in folder.glob("*.py")} | {p.name for p in folder.iterdir() if p.is_dir()}
    for name in list(sys.modules):
        if name.partition(".")[0] in mine and not _from(sys.modules[name], folder):
            del sys.modules[name]


def _from(module: Any, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).is_relative_to(folder)


def _object(key: str, name: str, folder: Path) -> Any:
    module_name, _, path = name.partition(":")
    try:
        thing: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        if e.name is not None and (module_name == e.name or module_name.startswith(f"{e.name}.")):
            raise SpecError(
                f"{key} names {name}: there is no module {e.name} beside the run file (own.folder), nor installed."
            ) from None
        raise SpecError(f"{key}: {name} could not be imported: {own_place(e)}{e}.") from e
    except Exception as e:
        raise SpecError(f"{key}: {name} could not be imported: {own_place(e)}{type(e).__name__}: {e}.") from e
    for part in path.split("."):
        if not hasattr(thing, part):
            known = [n for n in vars(thing) if not n.startswith("_")] if hasattr(thing, "__dict__") else []
            near = closest(part, known)
            hint = f"; did you mean {near}?" if near else "."
            raise SpecError(f"{key} names {name}: {module_name} has no `{part}`{hint}")
        thing = getattr(thing, part)
    return thing
