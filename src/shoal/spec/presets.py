"""Named model shapes, from a laptop's to the 671B class. The YAML files in `presets/` hold them, one file a family."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from shoal.errors import SpecError
from shoal.spec.yaml_text import parse


@dataclass(frozen=True)
class Preset:
    name: str
    about: str
    params: int
    """Published parameters; for a shape of ours, with the vocabulary that `about` states."""
    model: dict[str, Any]
    """Fields of the `model` section."""


@cache
def presets() -> dict[str, Preset]:
    """All of them, the smallest first."""
    found: list[Preset] = []
    for file in files("shoal.spec").joinpath("presets").iterdir():
        if file.name.endswith(".yaml"):
            table = parse(file.read_text(encoding="utf-8"), file.name).values
            found += [Preset(name=name, **entry) for name, entry in table.items()]
    return {preset.name: preset for preset in sorted(found, key=lambda p: p.params)}


def preset(name: str, where: str) -> Preset:
    """The preset called `name`; `where` is the place that asked for it."""
    known = presets()
    if name in known:
        return known[name]
    near = get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "`shoal show --presets` lists them."
    raise SpecError(f"{where}: there is no preset '{name}'; {hint}")
