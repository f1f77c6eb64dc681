"""What a run is: the typed run file, presets, overrides, JSON schema. Imports nothing of ours but errors.

The types are imported when they are first asked for: whoever needs one value of a run file (`shoal ps`) does not wait
for pydantic.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.spec.resolve import Loaded, load
    from shoal.spec.run import Run
    from shoal.spec.write import dump

__all__ = ["Loaded", "Run", "dump", "load"]

_HOMES = {"Loaded": "resolve", "load": "resolve", "Run": "run", "dump": "write"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found
