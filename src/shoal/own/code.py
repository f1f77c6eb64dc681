"""Imports own code, from the run's copy of it. Only those who train or check a run do; nobody else ever runs it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from shoal.errors import SpecError
from shoal.leaving import own_place, show_own
from shoal.near import closest
from shoal.own.files import files_of
from shoal.spec.run import Run


@dataclass(frozen=True)
class Code:
    """What a run names, imported; None where it names nothing."""

    model: Callable[..., Any] | None = None
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
    # A trial run (`profile`) has no copy, and on a node without the run's directory its bundle is on the path.
    if (place := folder if folder.is_dir() else Path(run.own.folder or "")) and place.is_dir():
        show_own(place)
        _first_on_path(place, files_of(run, place))
    kept, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # the folder stays what was copied
    try:
        found = {key: _object(key, name) for key, name in run.own.objects.items()}
    finally:
        sys.dont_write_bytecode = kept
    for key, thing in found.items():
        if not callable(thing):
            raise SpecError(f"{key}: {run.own.objects[key]} is {type(thing).__name__}, not a class or a function.")
    return Code(
        found.get("own.model"),
        found.get("own.block"),
        found.get("own.objective"),
        found.get("own.optimizer"),
        found.get("own.schedule"),
        tuple(found[f"own.hooks.{i}"] for i in range(len(run.own.hooks))),
        found.get("own.loop"),
        found.get("own.data"),
    )


def imported(key: str, name: str, folder: Path) -> Callable[..., Any]:
    """One class or function of a folder of the user's own, for a verb that trains nothing; other files of the folder
    hide nothing that is imported later."""
    top = name.partition(":")[0].partition(".")[0]
    show_own(folder)
    _first_on_path(folder, [top] if (folder / f"{top}.py").is_file() or (folder / top).is_dir() else [])
    try:
        thing = _object(key, name)
    finally:
        sys.path[:] = [*(p for p in sys.path if p != str(folder)), str(folder)]
    if not callable(thing):
        raise SpecError(f"{key}: {name} is {type(thing).__name__}, not a class or a function.")
    return cast(Callable[..., Any], thing)


def _first_on_path(folder: Path, files: Iterable[str]) -> None:
    """The run's copy is asked before everything else, also where a module of that name is loaded already: in one
    process several runs may be opened, each with its own."""
    place = str(folder)
    sys.path[:] = [place, *(p for p in sys.path if p != place)]
    importlib.invalidate_caches()
    mine = {name.partition("/")[0].removesuffix(".py") for name in files}
    for name in list(sys.modules):
        if name.partition(".")[0] in mine:
            del sys.modules[name]


def _object(key: str, name: str) -> Any:
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
            hint = f"; there is `{near}`." if near else "."
            raise SpecError(f"{key} names {name}: {module_name} has no `{part}`{hint}")
        thing = getattr(thing, part)
    return thing
